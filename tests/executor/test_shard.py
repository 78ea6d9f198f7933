"""Contexts, gradients and parameters during and after runs of a sharded module, on fake processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.executor_cases import FP32, MESH, S0, S1, P, R, fully_sharded, make_batch, make_model, megatron
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.unreduced_gradient import UnreducedGradient
from executor.shard import shard_module
from executor.torch_internals.dtensor import allows_implicit_replication, fake_process_group
from planner.errors import PlanLayoutError, PlanTypeError, UnmatchedKeyError
from planner.plan.job import Job
from planner.plan.sharding_plan import Port, ShardingPlan


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


def sharded(module: nn.Module, plan: ShardingPlan) -> nn.Module:
    return shard_module(module, device_mesh_for(plan), plan, src_data_rank=None)


def two_layers(**fields: object) -> ShardingPlan:
    fields = {"plan": {"*.*": (R, R)}, "input_plan": {"input": {"x": Port(layout=(S0, S0))}}} | fields
    return ShardingPlan(mesh=MESH, job=FP32, **fields)


class Either(nn.Module):
    """Uses either of two layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        if which == "fail":
            raise RuntimeError("on purpose")
        used = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[which]
        return torch.stack([layer(x).sum() for layer in used]).sum()


def layouts_of_gradients(module: Either) -> dict[str, object]:
    gradients = {"left": module.left.weight.grad, "right": module.right.weight.grad}
    return {
        name: (P, P) if isinstance(gradient, UnreducedGradient) else gradient.placements
        for name, gradient in gradients.items()
        if gradient is not None
    }


def test_gradients_are_reduced_in_the_last_micro_batch() -> None:
    module, x = sharded(Either(), two_layers(micro_batches=2)), torch.randn(2, 8)
    module(x).backward()
    assert layouts_of_gradients(module) == {"left": (P, P), "right": (P, P)}
    module(x).backward()
    assert layouts_of_gradients(module) == {"left": (R, R), "right": (R, R)}


def test_gradients_of_parameters_that_the_last_micro_batch_does_not_use_are_reduced() -> None:
    module, x = sharded(Either(), two_layers(micro_batches=2)), torch.randn(2, 8)
    for _ in range(2):
        module(x, which="left").backward()
        module(x, which="right").backward()
        assert layouts_of_gradients(module) == {"left": (R, R), "right": (R, R)}
        module.zero_grad()


def test_clearing_gradients_restarts_the_step() -> None:
    module, x = sharded(Either(), two_layers(micro_batches=2)), torch.randn(2, 8)
    module(x).backward()
    module.zero_grad()
    module(x).backward()
    assert layouts_of_gradients(module) == {"left": (P, P), "right": (P, P)}
    module(x).backward()
    assert layouts_of_gradients(module) == {"left": (R, R), "right": (R, R)}


def test_contexts_end_with_the_run_even_if_it_fails() -> None:
    module, x = sharded(Either(), two_layers()), torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="on purpose"):
        module(x, which="fail")
    assert not allows_implicit_replication()
    assert not _get_current_function_mode_stack()
    loss = module(x)
    assert not _get_current_function_mode_stack()
    # A backward pass may follow, and needs the flag from its start.
    assert allows_implicit_replication()
    loss.backward()
    del loss
    assert not allows_implicit_replication()
    with torch.no_grad():
        module(x)
    assert not allows_implicit_replication()


def test_two_models_do_not_switch_off_each_others_contexts() -> None:
    old, new, x = sharded(Either(), two_layers()), sharded(Either(), two_layers()), torch.randn(2, 8)
    old_loss = old(x)
    loss = new(x)
    # The old model's graph is freed while that of the new one may still be run backward, and the other way round.
    del old, old_loss
    assert allows_implicit_replication()
    loss.backward()
    assert layouts_of_gradients(new) == {"left": (R, R), "right": (R, R)}
    del loss
    assert not allows_implicit_replication()


def test_a_graph_may_be_freed_by_another_thread() -> None:
    module, x = sharded(Either(), two_layers()), torch.randn(2, 8)
    losses = [module(x)]

    def free() -> bool:
        losses.clear()
        return allows_implicit_replication()

    with ThreadPoolExecutor(1) as other:
        assert not other.submit(free).result()
    loss = module(x)
    assert allows_implicit_replication()
    loss.backward()
    del loss
    assert not allows_implicit_replication()


def test_parameters_are_restored_after_a_run() -> None:
    case = fully_sharded("mlp", job=Job(dtype="bf16"))
    module = sharded(make_model("mlp"), case.plan)
    before = dict(module.named_parameters())
    seen = []
    module.fc2.register_forward_pre_hook(lambda layer, args: seen.append((module.head.weight, layer.weight)))
    batch = local_batch(make_batch("mlp"), device_mesh_for(case.plan), case.plan)
    module(**{**batch, "x": batch["x"].bfloat16()}).backward()
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    # During the run all modules see the compute dtype, and the owner alone sees the compute layout.
    assert [tensor.dtype for tensor in seen[0]] == [torch.bfloat16] * 2
    assert [tensor.placements for tensor in seen[0]] == [(S0, S0)] * 2
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


def test_errors_name_mistyped_results_and_arguments() -> None:
    module = sharded(Either(), two_layers(output_plan={"left": {"1": Port(layout=(R, R))}}))
    with pytest.raises(UnmatchedKeyError, match=r"\['1'\] of 'left'"):
        module(torch.randn(2, 8))
    plan = two_layers(input_plan={"input": {"which": Port(layout=(R, R))}})
    with pytest.raises(PlanTypeError, match="'which' of the root"):
        sharded(Either(), plan)(torch.randn(2, 8), which="left")


class GemmCounter(TorchDispatchMode):
    """Counts GEMMs on local tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        # DTensor runs each op on fake tensors once.
        if FakeTensor not in types:
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def gemms(mode: str | None) -> int:
    blocks = {} if mode is None else {"model.layers.*": mode}
    case = fully_sharded("llama", activation_checkpointing=blocks)
    module, batch = sharded(make_model("llama"), case.plan), make_batch("llama")
    with GemmCounter() as counter:
        module(**local_batch(batch, device_mesh_for(case.plan), case.plan)).loss.backward()
    return counter.count


def test_selective_checkpointing_repeats_no_gemm() -> None:
    without, selective, full = gemms(None), gemms("selective"), gemms("full")
    assert selective == without
    # Seven in each of two blocks.
    assert full == without + 14


def test_local_batch_returns_the_slice_of_this_rank() -> None:
    plan = megatron().plan
    batch = make_batch("llama")
    mine = local_batch(batch, device_mesh_for(plan), plan)
    assert torch.equal(mine["input_ids"], batch["input_ids"][:4])
    assert mine["use_cache"] is False
    both = dataclasses.replace(plan, input_plan={"": (Port(layout=(S0, S1)), Port(layout=(R, R)))})
    first, second = local_batch((batch["input_ids"], batch["labels"]), device_mesh_for(both), both)
    assert torch.equal(first, batch["input_ids"][:4, :8])
    assert torch.equal(second, batch["labels"])


def test_batches_that_do_not_fit_the_plan_are_errors() -> None:
    plan = megatron().plan
    with pytest.raises(PlanLayoutError, match="does not divide"):
        local_batch({"input_ids": torch.zeros(7, 16)}, device_mesh_for(plan), plan)
    with pytest.raises(UnmatchedKeyError, match="'attention_mask'"):
        local_batch({"attention_mask": torch.zeros(8, 16)}, device_mesh_for(plan), plan)


def test_parameters_that_meet_no_sharded_tensor_stay_plain() -> None:
    """Without a layout of the inputs the right branch may run on plain tensors."""
    module = sharded(Either(), two_layers(plan={"left.weight": (R, S0)}, input_plan={}))
    assert isinstance(module.left.weight, DTensor)
    assert not isinstance(module.right.weight, DTensor)
    assert module.left.bias.placements == (R, R), "not named, but its module has a sharded weight"


def test_all_parameters_become_dtensors_where_the_plan_lays_out_the_inputs() -> None:
    """A plain parameter would get the gradient of this rank's shard of the batch alone."""
    module = sharded(Either(), two_layers(plan={"left.*": (R, S0)}))
    assert module.left.weight.placements == (R, S0)
    assert module.right.weight.placements == (R, R)
