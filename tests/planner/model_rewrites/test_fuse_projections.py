"""A model with fused projections computes what it did, and gives and takes the weights that it had."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from support.small_models import TINY_LLAMA
from torch import nn
from torch.distributed.tensor import Shard

from api.requests.model_registry import load_model, quiet_libraries
from api.requests.plan_request import fingerprint, opened_request
from api.requests.schemas import HuggingFaceModel, PlanRequest
from planner import PlanningSession, fuse_projections, unfuse_state_dict
from planner.errors import ModelError
from planner.model_rewrites.fuse_ops import TRACED_OPS, fuse_ops
from planner.model_rewrites.fuse_projections import carried_tp_plan, count_fused_projections
from planner.model_rewrites.fused_projection_modules import interleave_rows, split_rows

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
FAMILIES = {
    "llama": (lambda: transformers.LlamaConfig(**SIZES), 4),
    "biased": (lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), 4),
    "qwen2": (lambda: transformers.Qwen2Config(**SIZES), 4),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES, head_dim=8), 4),
    "as many heads of keys": (lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}), 4),
    "mixtral": (lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), 2),
}


def make(family: str) -> nn.Module:
    torch.manual_seed(0)
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(FAMILIES[family][0]()).train()
    for name, parameter in found.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return found


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_the_model_as_it_was(family: str) -> None:
    own, fused = make(family), fuse_projections(make(family))
    assert count_fused_projections(fused) == FAMILIES[family][1]
    expected, found = own(**batch()), fused(**batch())
    torch.testing.assert_close(found.logits, expected.logits)
    expected.loss.backward()
    found.loss.backward()
    gradients = {name: parameter.grad for name, parameter in fused.named_parameters()}
    of_own = unfuse_state_dict(fused, {name: grad for name, grad in gradients.items() if grad is not None})
    assert set(of_own) == {name for name, _ in own.named_parameters()}
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(of_own[name], parameter.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_in_and_come_out_under_the_names_that_they_had(family: str) -> None:
    own = make(family)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter))
    fused = fuse_projections(make(family))
    fused.load_state_dict(own.state_dict())
    given = unfuse_state_dict(fused, fused.state_dict())
    assert set(given) == set(own.state_dict())
    for name, tensor in own.state_dict().items():
        assert torch.equal(given[name], tensor)
    fused.load_state_dict(fused.state_dict())
    torch.testing.assert_close(fused(**batch()).logits, own(**batch()).logits)


def test_copies_are_models_of_their_own() -> None:
    fused = fuse_projections(make("llama"))
    other = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(**batch()).logits, make("llama")(**batch()).logits)
    before = [name for name, _ in fused.named_parameters()]
    assert [name for name, _ in fuse_projections(fused).named_parameters()] == before


def test_each_call_computes_with_its_own_input() -> None:
    model = fuse_projections(make("llama"))
    attention = model.model.layers[0].self_attn
    one, two = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    own = make("llama").model.layers[0].self_attn
    for names in (("q", "k", "q", "v"), ("v", "q", "k", "k")):
        for name, x in zip(names, (one, one, two, one), strict=True):
            found = getattr(attention, f"{name}_proj")(x).flatten(-2)
            torch.testing.assert_close(found, getattr(own, f"{name}_proj")(x))


@pytest.mark.parametrize("what", ["hook", "shared", "frozen", "other class"])
def test_layers_that_somebody_looks_at_stay_as_they_are(what: str) -> None:
    model = make("llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    if what == "hook":
        attention.k_proj.register_forward_hook(lambda *_: None)
        mlp.up_proj.register_full_backward_hook(lambda *_: None)
    elif what == "shared":
        attention.k_proj.weight = model.model.layers[1].self_attn.k_proj.weight
        mlp.up_proj.weight = mlp.gate_proj.weight
    elif what == "frozen":
        attention.k_proj.weight.requires_grad_(False)
        mlp.up_proj.weight.requires_grad_(False)
    else:
        attention.k_proj = nn.Sequential(attention.k_proj)
        mlp.up_proj = nn.Sequential(mlp.up_proj)
    fuse_projections(model)
    names = {name for name, _ in model.model.layers[0].named_modules()}
    assert not names & {"self_attn.qkv_proj", "mlp.gate_up_proj"}
    assert "mlp.gate_up_proj" in {name for name, _ in model.model.layers[1].named_modules()}


def test_rows_of_a_group_lie_together() -> None:
    parts = {"q": torch.arange(8), "k": torch.arange(10, 14), "v": torch.arange(20, 24)}
    fused = interleave_rows(parts, groups=2)
    assert fused.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    again = split_rows(fused, {name: len(part) for name, part in parts.items()}, groups=2)
    assert all(torch.equal(again[name], part) for name, part in parts.items())


def test_other_models_are_not_touched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert count_fused_projections(fuse_projections(model)) == 0
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=64, n_positions=16)
    with quiet_libraries(), pytest.raises(ModelError, match="gpt2 has no projections that can be fused"):
        load_model("gpt2+fused-projections")
    assert count_fused_projections(fuse_projections(transformers.GPT2LMHeadModel(config))) == 0


def test_a_preset_is_fused_by_name_and_its_plans_name_fused_layers() -> None:
    with quiet_libraries():
        source = load_model("llama-3.1-8b+packed", seq=2048)  # its former name
    assert source.name == "llama-3.1-8b+fused-projections"
    assert source.tp_plan is not None
    assert source.tp_plan["model.layers.*.self_attn.qkv_proj"] == "colwise"
    assert any("fused into" in note for note in source.notes)
    given = PlanRequest(
        model=HuggingFaceModel(hf_config=TINY_LLAMA, fused_projections=True), cluster="1x4xtoy", batch=4, seq=16
    )
    named = PlanRequest(model="llama-3.1-8b+fused-projections", cluster="1x8xh100-sxm-80gb", batch=8, seq=2048)
    for request in (given, named):
        whole = request.model_copy(
            update={"model": HuggingFaceModel(hf_config=TINY_LLAMA) if request is given else "llama-3.1-8b"}
        )
        assert fingerprint(request, allow_local=False) != fingerprint(whole, allow_local=False)
        names = [name for name, _ in opened_request(request, allow_local=False).model.named_parameters()]
        assert sum("qkv_proj" in name for name in names) > 0
        assert not any("q_proj" in name for name in names)
    for fused_ops in (False, True):
        session = PlanningSession(source.module, cluster="1x8xh100-sxm-80gb", batch=8, seq=2048, fused_ops=fused_ops)
        plan = session.plan(mesh="dp=2,tp=4")
        assert any(name.endswith("mlp.gate_up_proj.weight") for name in plan.plan)
        assert any(name.endswith("self_attn.qkv_proj.weight") for name in plan.plan)
        assert not any(name.endswith("q_proj.weight") for name in plan.plan)


def test_an_experts_plan_splits_fused_layers_too() -> None:
    steps = []
    for name in ("llama-3.1-8b", "llama-3.1-8b+fused-projections"):
        with quiet_libraries():
            source = load_model(name, seq=2048)
        session = PlanningSession(source.module, cluster="1x8xh100-sxm-80gb", batch=8, seq=2048)
        plan = session.plan(planner="tensor-parallel", mesh="tp=8", memory_bytes=2**40)
        assert plan.estimate is not None
        steps.append(plan.estimate.step_time_s)
        for parameter, layout in plan.plan.items():
            if re.search(r"(q|k|v|qkv|gate|up|gate_up)_proj\.weight$", parameter):
                assert layout == (Shard(0),), parameter
    assert steps[1] < steps[0]


def test_only_styles_that_its_layers_share_are_a_fused_layers() -> None:
    model = fuse_projections(make("llama"))
    model._tp_plan = {"a.q_proj": "colwise", "a.k_proj": "colwise", "b.gate_proj": "colwise", "b.up_proj": "rowwise"}
    assert carried_tp_plan(model) == model._tp_plan
    model._tp_plan["a.v_proj"] = "colwise"
    assert carried_tp_plan(model) == {**model._tp_plan, "a.qkv_proj": "colwise"}
    assert carried_tp_plan(nn.Linear(1, 1)) is None


def test_fused_activations_take_pairs() -> None:
    model = fuse_ops(fuse_projections(make("llama")), TRACED_OPS)
    with pytest.raises(NotImplementedError, match="only traced"):
        model.model.layers[0].mlp(torch.randn(1, 2, 32))
