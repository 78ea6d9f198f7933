"""Saved and peak bytes of the experts op are those that are priced, on one rank and on meta."""

from __future__ import annotations

import pytest
import torch
from support.op_bytes import bytes_seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cost_model.layouts.layout import local_shape
from executor.ops.experts import experts
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import fake_process_group, make_dtensor
from planner.model_rewrites.experts import ExpertsWork
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

R, S0 = Replicate(), Shard(0)
RANKS = 4
TOKENS, CHOSEN, EXPERTS = 1024, 2, 8
SPLITS = {
    "nothing": (R, R, R),
    "tokens": (S0, R, R),
    "experts": (R, S0, S0),
    "inner": (R, _StridedShard(1, split_factor=2), Shard(2)),
    "tokens and experts": (S0, S0, S0),
}


def measure(split: str, width: int, inner: int) -> tuple[ExpertsWork, dict[str, int]]:
    """Return the priced work of one rank, and the bytes that were measured on it."""
    tokens, up, down = SPLITS[split]
    shapes = [(TOKENS, width), (TOKENS, CHOSEN), (TOKENS, CHOSEN), (EXPERTS, 2 * inner, width), (EXPERTS, width, inner)]
    layouts = [(tokens,)] * 3 + [(up,), (down,)]
    dtypes = [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    mesh = PlanMesh(axes=(("x", RANKS),), device="cpu")
    local_shapes = [local_shape(shape, layout, (RANKS,)) for shape, layout in zip(shapes, layouts, strict=True)]
    with fake_process_group(RANKS):
        device_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("x",))
        redistributor = Redistributor.from_plan(device_mesh, ShardingPlan(mesh=mesh))
        inputs: list[DTensor] = []
        for shape, own_shape, layout, dtype in zip(shapes, local_shapes, layouts, dtypes, strict=True):
            local = torch.empty(own_shape, dtype=dtype, device="meta")
            tensor = make_dtensor(local, device_mesh, layout, shape, contiguous_stride(shape))
            inputs.append(tensor.requires_grad_(dtype.is_floating_point))
        seen = bytes_seen(lambda: experts(redistributor, *inputs, "silu"), inputs)
    work = ExpertsWork.from_shapes(local_shapes, EXPERTS, 2, RANKS if split == "tokens and experts" else 1)
    return work, seen


@pytest.mark.parametrize(("width", "inner"), [(256, 896), (512, 256)])
@pytest.mark.parametrize("split", SPLITS)
def test_bytes_are_those_that_are_priced(split: str, width: int, inner: int) -> None:
    work, seen = measure(split, width, inner)
    assert seen["saved"] == pytest.approx(work.saved_nbytes, rel=1e-3)  # and the rows of each expert
    indices_nbytes = 4 * 8 * work.rows  # not priced
    assert work.forward_peak_nbytes <= seen["forward"] <= work.forward_peak_nbytes + indices_nbytes
    assert work.backward_rise_nbytes <= seen["backward"] <= work.backward_rise_nbytes + indices_nbytes
