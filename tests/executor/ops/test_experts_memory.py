"""Saved and peak bytes of the experts op are those that are priced, on one rank and on meta."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.op_bytes import bytes_seen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import local_shape
from executor.ops.experts import experts
from executor.redistribute import Redistributor, contiguous_stride
from executor.torch_internals.dtensor import fake_process_group, make_dtensor
from planner.counting.activation_costs import activation_costs
from planner.model_rewrites.experts.experts_op import OWN_ACTIVATION, ExpertsForm
from planner.model_rewrites.experts.modules import Activation
from planner.model_rewrites.experts.placements import experts_placements
from planner.model_rewrites.experts.work import ExpertsWork
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

RANKS = 4
TOKENS, CHOSEN, EXPERTS = 1024, 2, 8
SPLITS = ("nothing", "tokens", "experts", "inner", "tokens and experts")
"""What the axis shards, in the order of `experts_placements`."""


def clamped_gate(inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner[..., ::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def squared_relu(inner: torch.Tensor) -> torch.Tensor:
    return inner.relu().square()


class Case(NamedTuple):
    form: ExpertsForm
    activation: Activation | None = None
    biased: bool = False


CASES = {
    "silu": Case(ExpertsForm("silu")),
    "biased": Case(ExpertsForm("silu"), biased=True),
    "transposed": Case(ExpertsForm("silu", transposed=True)),
    "clamped gate": Case(ExpertsForm(OWN_ACTIVATION, alternating=True, transposed=True), clamped_gate, biased=True),
    "no gate": Case(ExpertsForm(OWN_ACTIVATION, gated=False), squared_relu),
}


def measure(case: Case, split: str, width: int, inner: int) -> tuple[ExpertsWork, dict[str, int]]:
    """Return the priced work of one rank, and the bytes that were measured on it."""
    form = case.form
    if case.activation is not None:
        form = form._replace(costs=activation_costs(case.activation, form.matrices))
    up = form.matrices * inner
    matrices = [(EXPERTS, up, width), (EXPERTS, width, inner)]
    matrices = [(n, columns, rows) for n, rows, columns in matrices] if form.transposed else matrices
    biases = [(EXPERTS, up), (EXPERTS, width)] if case.biased else []
    shapes = [(TOKENS, width), (TOKENS, CHOSEN), (TOKENS, CHOSEN), *matrices, *biases]
    place = experts_placements(form)[SPLITS.index(split)]
    layouts = [(place.tokens,)] * 3 + [(each,) for each in place.weights[: len(shapes) - 3]]
    dtypes = [torch.int64 if position == 1 else torch.bfloat16 for position in range(len(shapes))]
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
        seen = bytes_seen(lambda: experts(redistributor, *inputs, form=form, activation=case.activation), inputs)
    work = ExpertsWork.from_shapes(form, local_shapes, EXPERTS, 2, RANKS if split == "tokens and experts" else 1)
    return work, seen


@pytest.mark.parametrize(("width", "inner"), [(256, 896), (512, 256)])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_that_are_priced(case: str, split: str, width: int, inner: int) -> None:
    work, seen = measure(CASES[case], split, width, inner)
    assert seen["saved"] == pytest.approx(work.saved_nbytes, rel=1e-3)  # and the rows of each expert
    indices_nbytes = 4 * 8 * work.rows  # not priced
    assert work.forward_peak_nbytes <= seen["forward"] <= work.forward_peak_nbytes + indices_nbytes
    assert work.backward_rise_nbytes <= seen["backward"] <= work.backward_rise_nbytes + indices_nbytes
