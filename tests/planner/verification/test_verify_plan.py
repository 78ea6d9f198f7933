"""Plans are run before they are given: a shortened module stands for the whole one, and what is left out is said."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from executor.torch_internals.dtensor import fake_process_group
from executor.verify import observed_collectives
from planner import PlanningSession
from planner.errors import RunError
from planner.graph.example_inputs import meta_inputs
from planner.plan.estimate import Verification
from planner.plan.fingerprint import model_fingerprint
from planner.plan.sharding_plan import ShardingPlan
from planner.verification import verify_plan
from planner.verification.block_runs import BlockRun, find_block_runs
from planner.verification.shortened import shortened_copy
from planner.verification.verify_plan import micro_batch_arguments, verification_of

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_hidden_layers=7)),
    # The first block of each stack has the table of relative positions.
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=6, num_decoder_layers=7, num_heads=4, vocab_size=64,
            dropout_rate=0, decoder_start_token_id=0,
        )
    ),
    # One block in two has a sliding window.
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_SIZES, head_dim=8, num_hidden_layers=12, sliding_window=8)
    ),
}  # fmt: skip
# The plan of the llama names the input of its first block.
RUNS = {"llama": [(1, 1, 6)], "t5": [(1, 1, 5), (1, 1, 6)], "gemma2": [(0, 2, 6)]}


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]().train()


def session_of(model: nn.Module, **options: Any) -> PlanningSession:
    job = {"cluster": "1x4xtoy", "batch": 8, "seq": 16, "dtype": "fp32", "micro_batches": 2, "ac": "none"}
    return PlanningSession(model, **{**job, **options})


@pytest.fixture(scope="module")
def llama() -> tuple[PlanningSession, ShardingPlan]:
    """The session of a llama of seven blocks, and a plan of it."""
    session = session_of(build("llama"))
    return session, session.plan(mesh="dp=2,tp=2")


@pytest.mark.parametrize("name", MODELS)
def test_a_shortened_module_runs_the_collectives_of_the_whole_one(name: str) -> None:
    module = build(name)
    before = model_fingerprint(module)
    session = session_of(module)
    plan = session.plan(mesh="dp=2,tp=2", planner="ilp" if name == "llama" else "fully-sharded")
    assert [(run.first, run.period, run.groups) for run in find_block_runs(module, plan)] == RUNS[name]
    arguments = micro_batch_arguments(plan, session.inputs)
    extrapolated = verify_plan._extrapolated(module, plan, arguments)
    whole = observed_collectives(module, plan, arguments)
    assert extrapolated is not None
    assert whole
    assert +extrapolated == whole
    assert model_fingerprint(module) == before


def test_a_decoding_step_is_shortened_with_its_cache() -> None:
    module = build("llama")
    session = session_of(module, phase="decode", micro_batches=None, ac=None)
    plan = session.plan(mesh="dp=2,tp=2")
    arguments = micro_batch_arguments(plan, session.inputs)
    extrapolated = verify_plan._extrapolated(module, plan, arguments)
    assert extrapolated is not None
    assert +extrapolated == observed_collectives(module, plan, arguments)


def test_a_shortened_copy_counts_its_own_layers_and_leaves_the_module_alone(
    llama: tuple[PlanningSession, ShardingPlan],
) -> None:
    module = MODELS["llama"]()
    run = BlockRun(fqn="model.layers", first=0, period=1, groups=7)
    settings = copy.deepcopy(module.config.to_dict())
    short = shortened_copy(module, {run: 3})
    assert [name for name, _ in short.model.layers.named_children()] == ["0", "1", "2"]
    assert short.config.num_hidden_layers == 3
    assert short.model.config is short.config
    assert [layer.self_attn.layer_idx for layer in short.model.layers] == [0, 1, 2]
    assert {tensor.device.type for tensor in short.parameters()} == {"meta"}
    assert module.config.to_dict() == settings
    assert len(module.model.layers) == 7
    assert {tensor.device.type for tensor in module.parameters()} == {"cpu"}


def test_a_plan_that_runs_as_planned_says_so(llama: tuple[PlanningSession, ShardingPlan]) -> None:
    session, plan = llama
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        verification = verification_of(session.module, plan, session.inputs)
    kinds = {(row.phase, row.kind, row.axis, row.bytes) for row in plan.estimate.collectives if row.count}
    assert verification == Verification(outcome="as-planned", kinds=len(kinds))
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plan_with_another_estimate_does_not_run_as_planned(llama: tuple[PlanningSession, ShardingPlan]) -> None:
    session, plan = llama
    rows = list(plan.estimate.collectives)
    rows[0] = dataclasses.replace(rows[0], count=rows[0].count + 1)
    changed = dataclasses.replace(plan, estimate=dataclasses.replace(plan.estimate, collectives=tuple(rows)))
    with pytest.raises(RunError, match="differ from the plan's in 1 kinds"):
        verification_of(session.module, changed, session.inputs)


def test_reasons_for_not_running(llama: tuple[PlanningSession, ShardingPlan]) -> None:
    session, plan = llama
    assert verification_of(None, plan, session.inputs).outcome == "not-run"
    random_plan = session.plan(planner="random:0", mesh="dp=2,tp=2")
    assert verification_of(session.module, random_plan, session.inputs).reason == "a random plan is not verified"


def test_a_process_group_of_the_caller_is_left_alone(llama: tuple[PlanningSession, ShardingPlan]) -> None:
    session, plan = llama
    with fake_process_group(3):
        verification = verification_of(session.module, plan, session.inputs)
        assert dist.get_world_size() == 3
    assert verification.outcome == "not-run"
    assert "process group (fake) is initialised" in str(verification.reason)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verification = verification_of(session.module, plan, session.inputs)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
    assert verification.outcome == "not-run"
    assert "process group (gloo) is initialised" in str(verification.reason)


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.argmax(-1), self.last(self.first(x).relu())


def test_a_model_without_a_loss_runs_from_its_results() -> None:
    inputs = (torch.zeros(8, 16, device="meta"),)
    model = NoLoss()
    session = PlanningSession(model, cluster="1x4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1, ac="none")
    plan = session.plan(mesh="dp=2,tp=2", planner="fully-sharded")
    verification = verification_of(model, plan, meta_inputs(inputs))
    assert verification.outcome == "as-planned"
    assert verification.reason is None
    assert any(row.phase == "backward" for row in plan.estimate.collectives)


def test_batch_norms_compute_in_the_dtype_of_their_statistics_as_planned() -> None:
    """In bf16 each weight is cast when it is used, so that autograd saves the cast weight, not the gathered one."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).train()
    inputs = {"pixel_values": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.long)}
    session = PlanningSession(model, cluster="2x2xtoy", example_inputs=inputs, batch=8)
    for planner in ("fully-sharded", "ilp"):
        plan = session.plan(mesh="fsdp=4", planner=planner)
        assert verification_of(model, plan, meta_inputs(inputs)).outcome == "as-planned"
