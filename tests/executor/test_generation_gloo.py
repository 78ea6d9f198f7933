"""``generate`` and whole batches on real processes: tokens and results equal the unsharded model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cached_models import EAGER, eager_model, recurrent_model
from support.executor_cases import make_model
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.tensor import DTensor

from executor import device_mesh_for, shard_module, whole_batches
from planner import PlanningSession
from planner.errors import PlanMismatchError, RunError
from planner.plan.sharding_plan import ShardingPlan

BATCH, SEQ, NEW = 8, 16, 4
PLANS = (
    ("training", "fsdp=4", "ilp"),
    ("training", "dp=2,tp=2", "random:1"),
    ("decode", "dp=2,tp=2", "ilp"),
    ("decode", "tp=4", "ilp"),
    ("decode", "dp=2,tp=2", "random:2"),
)
FAMILIES = ("llama", "gpt2", "mixtral", "deepseek", "t5")
CACHED_FAMILIES = ("mamba2", "qwen3_next", "falcon_h1", "gpt_oss")
DRAWN = {(family, "decode") for family in ("t5", *CACHED_FAMILIES)}
"""Families other than Llama, and phases, of which plans are drawn as well: their states are in many layouts."""
# Prompts that the mesh divides, and prompts that no axis divides.
PROMPTS = ((8, 16), (3, 7))


def model_of(family: str) -> nn.Module:
    if family in EAGER:
        return eager_model(family)
    return recurrent_model(family) if family in CACHED_FAMILIES else make_model(family)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(length))


def prompt(rows: int, length: int) -> dict[str, Any]:
    """Return ids and a mask that pads the second row on the left."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1:2, :2] = 0
    return {"input_ids": tokens(rows, length), "attention_mask": mask}


def plans_of(family: str, wanted: tuple[tuple[str, str, str], ...]) -> dict[str, dict[str, Any]]:
    documents = {}
    for phase, mesh, planner in wanted:
        is_drawn = planner != "ilp" and family != "llama"
        if is_drawn and (family, phase) not in DRAWN:
            continue
        session = PlanningSession(
            model_of(family), cluster="1x4xtoy", batch=BATCH, seq=SEQ, dtype="fp32", phase=phase, micro_batches=1
        )
        documents[f"{phase} {mesh} {planner}"] = session.plan(planner=planner, mesh=mesh).to_dict()
    return documents


def generate(rank: int, family: str, plans: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return case -> whether the sharded model generates the tokens of the unsharded one."""
    equal = {}
    reference: Any = model_of(family).eval()
    options = {"max_new_tokens": NEW, "pad_token_id": 0}
    expected = {size: reference.generate(**prompt(*size), **options, do_sample=False) for size in PROMPTS}
    for name, document in plans.items():
        plan = ShardingPlan.from_dict(document)
        model: Any = shard_module(model_of(family).eval(), device_mesh_for(plan), plan)
        for size in PROMPTS:
            actual = model.generate(**prompt(*size), **options, do_sample=False)
            equal[f"{name}, {size}"] = torch.equal(actual, expected[size])
        if family == "llama":
            # Sampled and with beams, where every rank has another random state.
            torch.manual_seed(3)
            for extra in ({"do_sample": True}, {"num_beams": 2, "do_sample": False}):
                reference_tokens = reference.generate(**prompt(2, 6), **options, **extra)
                torch.manual_seed(3 + rank)
                actual = model.generate(**prompt(2, 6), **options, **extra)
                equal[f"{name}, {extra}"] = torch.equal(actual, reference_tokens)
    return equal


@pytest.mark.parametrize("family", FAMILIES + CACHED_FAMILIES)
def test_generated_tokens_are_those_of_the_unsharded_model(family: str) -> None:
    for cases in run_on_gloo(generate, 4, family, plans_of(family, PLANS)):
        assert len(cases) >= 2
        assert all(cases.values()), cases


def call_wrong(rank: int, document: dict[str, Any]) -> list[str]:
    plan = ShardingPlan.from_dict(document)
    model = shard_module(make_model("llama").eval(), device_mesh_for(plan), plan)
    messages = []
    try:
        model.generate(tokens(2, 6) + (rank == 2), max_new_tokens=2)
    except RunError as error:
        messages.append(str(error))
    with torch.no_grad(), whole_batches(model):
        whole = model(input_ids=tokens(8, 16)).logits
    with torch.no_grad():
        pieces = model(input_ids=tokens(8, 16)[2 * rank : 2 * rank + 2]).logits
    assert not isinstance(whole, DTensor)
    assert isinstance(pieces, DTensor)
    assert torch.equal(whole, pieces.full_tensor())
    return messages


def test_different_prompts_are_an_error_on_every_rank() -> None:
    (document,) = plans_of("llama", (("training", "fsdp=4", "fully-sharded"),)).values()
    for messages in run_on_gloo(call_wrong, 4, document):
        assert len(messages) == 1
        assert "different tensors on the ranks" in messages[0]


def test_a_plain_module_has_no_whole_batches() -> None:
    with pytest.raises(PlanMismatchError, match="no sharded module"), whole_batches(torch.nn.Linear(2, 2)):
        pass
