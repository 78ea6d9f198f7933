"""Models with sequences in zigzag order have the unsharded model's loss and gradients, and exchange no queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.gloo import run_on_gloo
from support.unsharded import differences
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from executor import local_batch, natural_order, shard_module
from executor.resolve.mesh import device_mesh_for
from executor.verify import verify
from planner import PlanningSession
from planner.errors import PlanError
from planner.plan.sharding_plan import ShardingPlan

ROWS = 256
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": ROWS,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def make_llama() -> nn.Module:
    return make_model("llama")


def make_mixtral() -> nn.Module:
    return make_model("mixtral")


def make_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).train()


def make_batch() -> dict[str, Any]:
    ids = torch.randint(0, 256, (2, ROWS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, :100] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WithLossModule(nn.Module):
    """A model whose loss is a module, which gets the labels unshifted."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.criterion = make_model("llama"), Loss()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.model(input_ids=input_ids, use_cache=False)
        return CausalLMOutput(loss=self.criterion(output.logits, labels))


def make_with_loss_module() -> nn.Module:
    torch.manual_seed(0)
    return WithLossModule().train()


def ids_and_labels() -> dict[str, Any]:
    return {name: tensor for name, tensor in make_batch().items() if name != "use_cache"}


def planned(family: str, mesh: str, **options: Any) -> ShardingPlan:
    session = PlanningSession(
        make_model(family),
        cluster="1x4xtoy",
        example_inputs=make_batch(),
        dtype="fp32",
        optimizer="sgd",
        micro_batches=1,
        zigzag=True,
        data_axes=["dp"] if mesh == "dp=2,tp=2" else [],
        # With projections replicated, heads are not sharded, so sequences are.
        pins=[f"model.layers.*.self_attn.{name}_proj.weight:used=R@tp" for name in "qkvo"],
        **options,
    )
    return session.plan(mesh=mesh)


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    return {
        "plain": planned("llama", "dp=1,tp=4", ac="none"),
        "recomputed": planned("llama", "dp=1,tp=4", ac="full"),
        "samples sharded too": planned("llama", "dp=2,tp=2", ac="none"),
        "fused_ops": planned("llama", "dp=2,tp=2", ac="none", fused_ops=True),
        "experts": planned("mixtral", "dp=2,tp=2", ac="none"),
    }


def test_plans_have_the_order_and_exchange_no_queries(plans: dict[str, ShardingPlan]) -> None:
    for name, plan in plans.items():
        assert plan.zigzag is not None, name
        assert (plan.zigzag.axis, plan.zigzag.length) == ("tp", ROWS)
        assert plan.zigzag.inputs == {"input": {"input_ids": 1}}
        assert plan.zigzag.outputs == {"model.rotary_emb": {"0": 1, "1": 1}}
        assert any("logits" in note for note in plan.notes)
        assert ShardingPlan.from_dict(plan.to_dict()) == plan
        assert plan.estimate is not None
        queries_nbytes = 2 * ROWS * 64 * 4 // 4  # of one rank, of both sequences
        exchanged = [r for r in plan.estimate.collectives if r.kind == "all_to_all" and r.bytes >= queries_nbytes]
        assert not [r for r in exchanged if r.count > 2], name
        report = verify(make_model("mixtral" if name == "experts" else "llama"), plan, make_batch())
        assert report.equal, (name, report)


def train_llama(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_llama, make_batch)


def train_mixtral(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_mixtral, make_batch)


def test_losses_and_gradients_equal_the_unsharded_models(plans: dict[str, ShardingPlan]) -> None:
    documents = {name: plan.to_dict() for name, plan in plans.items()}
    experts = {"experts": documents.pop("experts")}
    assert run_on_gloo(train_llama, 4, documents) == [[]] * 4
    assert run_on_gloo(train_mixtral, 4, experts) == [[]] * 4


def train_with_loss_module(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_with_loss_module, ids_and_labels)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", pytest.param("dp=1,tp=4", marks=pytest.mark.slow)])
def test_labels_of_a_loss_module_are_not_sharded_along_the_sequence(mesh: str) -> None:
    pins = [f"model.model.layers.*.self_attn.{name}_proj.weight:used=R@tp" for name in "qkvo"]
    options: dict[str, Any] = {"dtype": "fp32", "optimizer": "sgd", "micro_batches": 1, "ac": "none", "pins": pins}
    session = PlanningSession(
        make_with_loss_module(), cluster="1x4xtoy", example_inputs=ids_and_labels(), zigzag=True, **options
    )
    plan = session.plan(mesh=mesh)
    assert plan.zigzag is not None
    assert verify(make_with_loss_module(), plan, ids_and_labels()).equal
    assert run_on_gloo(train_with_loss_module, 4, {mesh: plan.to_dict()}) == [[]] * 4


def run_wrong(rank: int, documents: list[dict[str, Any]]) -> list[str]:
    messages = []
    for document in documents:
        plan = ShardingPlan.from_dict(document)
        mesh = device_mesh_for(plan)
        try:
            shard_module(make_llama(), mesh, plan)(**local_batch(make_batch(), mesh, plan))
            messages.append("")
        except PlanError as error:
            messages.append(str(error))
    return messages


def test_errors_name_tensors_that_cannot_be_in_zigzag_order(plans: dict[str, ShardingPlan]) -> None:
    plan = plans["samples sharded too"]
    order = plan.zigzag
    assert order is not None
    wrong = [
        dataclasses.replace(order, outputs={"model.rotary_emb": {"7": 1, "1": 1}}),
        dataclasses.replace(order, inputs={"input": {"zzz": 1}}),
        dataclasses.replace(order, outputs={"model.rotary": {"0": 1, "1": 1}}),
        dataclasses.replace(order, outputs={"model.rotary_emb": {"0": 2, "1": 1}}),
    ]
    documents = [dataclasses.replace(plan, zigzag=each).to_dict() for each in wrong]
    for messages in run_on_gloo(run_wrong, 4, documents):
        reasons = ("'7', '1' of the output", "'zzz' of the input", "'model.rotary'", "no whole sequence of 256")
        assert all(reason in message for reason, message in zip(reasons, messages, strict=True)), messages
    for bad, reason in (
        (dataclasses.replace(order, axis="cp"), "over 'cp'"),
        (dataclasses.replace(order, length=255), "255 tokens"),
        (dataclasses.replace(order, outputs={"": {"logits": 1}}), "results of the root"),
        (dataclasses.replace(order, inputs={"input": {"input_ids": -1}}), "zigzag has int"),
    ):
        with pytest.raises(PlanError, match=reason):
            dataclasses.replace(plan, zigzag=bad).validate()


def logits_of(rank: int, document: dict[str, Any]) -> tuple[float, float]:
    """Return the largest differences of logits from the unsharded model's, in natural order and in zigzag order."""
    plan = ShardingPlan.from_dict(document)
    mesh = device_mesh_for(plan)
    expected = make_llama()(**make_batch()).logits
    model = shard_module(make_llama(), mesh, plan)
    logits = model(**local_batch(make_batch(), mesh, plan)).logits.full_tensor()
    return (natural_order(logits, plan) - expected).abs().max().item(), (logits - expected).abs().max().item()


def test_natural_order_restores_the_order_of_logits(plans: dict[str, ShardingPlan]) -> None:
    for in_natural_order, in_zigzag_order in run_on_gloo(logits_of, 4, plans["samples sharded too"].to_dict()):
        assert in_natural_order < 1e-5 < in_zigzag_order
