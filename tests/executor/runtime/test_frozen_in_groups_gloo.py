"""Frozen parameters in FSDP groups on four real processes: as planned, and equal to the unsharded module."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import peft
import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import PlanningSession, ShardingPlan
from planner.errors import PlanMismatchError
from planner.verification.verify_plan import verification_of

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's

STEPS = 3
ROWS = torch.randint(96, (8, 12), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": ROWS, "labels": ROWS, "use_cache": False}


def adapted() -> torch.nn.Module:
    """Return a Llama with adapters in its later blocks: nothing before them has a backward."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=96
    )
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 2])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # at their usual value, zero, lora_A would have no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def session_of(micro_batches: int = 1, dtype: str = "fp32") -> PlanningSession:
    return PlanningSession(adapted(), cluster="1x4xtoy", example_inputs=BATCH, dtype=dtype, micro_batches=micro_batches)


def planned(micro_batches: int, reshard_after: str, dtype: str = "fp32") -> ShardingPlan:
    plan = session_of(micro_batches, dtype).plan(planner="fully-sharded", mesh="fsdp=4")
    if reshard_after != "forward":
        field = {"backward": "keep_gathered", "step": "keep_gathered_for_step"}[reshard_after]
        plan = dataclasses.replace(plan, **{field: tuple(plan.fully_shard)})
    return plan


def test_a_block_is_gathered_whole_and_reduces_its_adapters() -> None:
    plan = planned(1, "forward")
    assert set(plan.fully_shard) == {"base_model.model.model.layers.1", "base_model.model.model.layers.2"}
    for names in plan.fully_shard.values():
        assert {"self_attn.q_proj.base_layer.weight", "self_attn.q_proj.lora_A.default.weight"} <= set(names)
    block = [parameter for name, parameter in adapted().named_parameters() if ".layers.2." in name]
    rows = Counter()
    for row in plan.estimate.collectives:
        rows[row.kind, row.phase, row.bytes] += row.count
    assert rows["all_gather", "forward", 4 * sum(parameter.numel() for parameter in block)] == 1
    trained_nbytes = 4 * sum(parameter.numel() for parameter in block if parameter.requires_grad)
    assert rows["reduce_scatter", "backward", trained_nbytes] == 2
    session = session_of()
    assert verification_of(session.module, plan, session.inputs).outcome == "as-planned"


def test_frozen_parameters_are_planned_without_a_master_copy() -> None:
    parameters = list(adapted().parameters())
    plan = planned(1, "forward", dtype="bf16")
    nbytes = sum(parameter.numel() * (4 if parameter.requires_grad else 2) for parameter in parameters)
    assert plan.estimate.memory["parameters"] == pytest.approx(nbytes / 4, rel=1e-3)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert plan.estimate.memory["optimizer_state"] == trained * 8 / 4


def run_steps(rank: int, micro_batches: int, reshard_after: str) -> tuple[float, set[str]]:
    plan = planned(micro_batches, reshard_after)
    reference, model = adapted(), adapted()
    mesh = device_mesh_for(plan)
    shard_module(model, mesh, plan)
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2) for one in (reference, model)
    ]
    error = 0.0
    size = len(ROWS) // micro_batches
    for _ in range(STEPS):
        for rows in ROWS.split(size):
            batch = {"input_ids": rows, "labels": rows, "use_cache": False}
            expected = reference(**batch).loss / micro_batches
            expected.backward()
            loss = model(**local_batch(batch, mesh, plan)).loss / micro_batches
            loss.backward()
            error = max(error, abs(expected.item() - loss.full_tensor().item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for own, sharded in zip(reference.parameters(), model.parameters(), strict=True):
        error = max(error, (own - sharded.full_tensor()).abs().max().item())
    gathered = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    return error, gathered


@pytest.mark.parametrize(("micro_batches", "reshard_after"), [(1, "forward"), (1, "backward"), (2, "step")])
def test_losses_and_parameters_equal_the_unsharded_modules(micro_batches: int, reshard_after: str) -> None:
    for error, gathered in run_on_gloo(run_steps, 4, micro_batches, reshard_after):
        assert error <= 1e-5
        assert not gathered


def run_in_bf16(rank: int) -> tuple[float, set[tuple[bool, torch.dtype]]]:
    plan = planned(1, "forward", dtype="bf16")
    model = adapted()
    reference = copy.deepcopy(model).to(torch.bfloat16)
    mesh = device_mesh_for(plan)
    shard_module(model, mesh, plan)
    loss = model(**local_batch(BATCH, mesh, plan)).loss
    loss.backward()
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    error = abs(loss.full_tensor().item() - reference(**BATCH).loss.item())
    model.requires_grad_(True)
    with pytest.raises(PlanMismatchError, match="were frozen when the module was sharded"):
        model(**local_batch(BATCH, mesh, plan))
    return error, dtypes


def test_frozen_parameters_are_stored_in_the_compute_dtype() -> None:
    for error, dtypes in run_on_gloo(run_in_bf16, 4):
        assert error <= 1e-2
        assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


def run_stored_narrower(rank: int) -> set[torch.dtype]:
    plan = planned(1, "forward")
    model = adapted()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    shard_module(model, device_mesh_for(plan), plan)
    return {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}


def test_frozen_parameters_in_a_narrower_dtype_keep_it() -> None:
    assert run_on_gloo(run_stored_narrower, 4) == [{torch.bfloat16}] * 4
