"""GEMMs of experts run in the kernel that is priced, and both kernels give the same result."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cost_model import find_device
from executor.ops.grouped_gemm import GroupedGemm
from executor.runtime.checkpointing import SAVED_OPS
from planner.graph.op_graph import Value
from planner.model_rewrites.experts.experts_op import ExpertsForm
from planner.pricing import op_times
from planner.pricing.op_times import LocalOp, OpTimes

EXPERTS, WIDTH, INNER = 4, 7168, 2048


def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return what ``torch.nn.functional.grouped_mm`` does, which runs on a GPU alone."""
    ends = [0, *offs.tolist()]
    if weights.dim() == 2:  # rows are [n, rows]
        return torch.stack([rows[:, a:b] @ weights[a:b] for a, b in itertools.pairwise(ends)])
    by_expert = zip(itertools.pairwise(ends), weights, strict=True)
    return torch.cat([rows[a:b] @ weight for (a, b), weight in by_expert])


def test_the_grouped_kernel_and_gemms_per_expert_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    counts = torch.tensor([3, 0, 5])
    rows, weights = torch.randn(8, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    gradient = torch.randn(8, 6, dtype=torch.float64)
    grouped, per_expert = GroupedGemm(counts, per_expert=False), GroupedGemm(counts, per_expert=True)
    torch.testing.assert_close(per_expert.forward(rows, weights), grouped.forward(rows, weights))
    actual = per_expert.weight_gradient(gradient, rows, weights)
    torch.testing.assert_close(actual, grouped.weight_gradient(gradient, rows, weights))
    assert actual.shape == weights.shape
    assert not actual[1].any(), "an expert that no token chose"


@pytest.mark.parametrize("device_name", ["h100-sxm-80gb", "gb200-nvl72-186gb", "b200-sxm-180gb"])
@pytest.mark.parametrize("rows", [EXPERTS * 64, EXPERTS * 1024, EXPERTS * 8192])
def test_the_kernel_that_is_priced_runs(device_name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device(device_name)
    number = device.architecture.removeprefix("sm")
    processors = SimpleNamespace(multi_processor_count=device.processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (int(number[:-1]), int(number[-1])))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    down: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(EXPERTS, WIDTH, INNER))
    per_expert = GroupedGemm.choose(torch.tensor([1]), None, rows, down).per_expert
    kernels = set()
    grouped_gemm_time_s = op_times.grouped_gemm_time_s

    def record(**arguments: Any) -> float:
        kernels.add(arguments["kernel"])
        return grouped_gemm_time_s(**arguments)

    monkeypatch.setattr(op_times, "grouped_gemm_time_s", record)
    tokens, up, down = (rows // EXPERTS, EXPERTS), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
    shapes = [(tokens[0], WIDTH), tokens, tokens, up, down]
    inputs = [
        Value(name=str(n), shape=shape, dtype=torch.bfloat16, kind="activation", requires_grad=True)
        for n, shape in enumerate(shapes)
    ]
    unread: Any = None
    *form, costs = ExpertsForm("silu")
    op: Any = SimpleNamespace(args=(*[None] * 7, *form, costs))
    local = LocalOp(op=op, inputs=inputs, output=inputs[0], shapes=shapes, output_shape=(), profile=unread)
    OpTimes(device, flash_attention=True)._experts(local, backward=True)
    assert kernels == {"one by one" if per_expert else "grouped"}
    assert per_expert == (device.architecture == "sm100" and rows >= EXPERTS * 8192)


class GemmCounter(TorchDispatchMode):
    """Counts GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gemms += func in (torch.ops.shardplan.gemm_per_expert.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


class Forward(torch.autograd.Function):
    """A GEMM inside an autograd function, as of the experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gemm = GroupedGemm.choose(torch.tensor([3, 5]), None, 8, weights)
        result = gemm.forward(rows, weights)
        ctx.save_for_backward(rows, weights, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weights, _ = ctx.saved_tensors
        return torch.zeros_like(rows), torch.zeros_like(weights)


@pytest.mark.parametrize(("saved", "recomputed"), [(SAVED_OPS, 0), (frozenset(), 1)])
def test_selective_checkpointing_saves_gemms_of_experts(saved: frozenset[Any], recomputed: int) -> None:
    rows, weights = torch.randn(8, 4, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(saved))
    result = checkpoint(Forward.apply, rows, weights, use_reentrant=False, context_fn=contexts)
    with GemmCounter() as counter:
        result.sum().backward()
    assert counter.gemms == recomputed
