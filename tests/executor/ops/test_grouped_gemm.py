"""Products of experts run in the way that they are priced in, and give the same either way."""

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
from planner.pricing import op_times
from planner.pricing.op_times import OpTimes

EXPERTS, WIDTH, INNER = 4, 7168, 2048


def grouped(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """As `torch.nn.functional.grouped_mm`, which runs on a GPU alone."""
    ends = [0, *offs.tolist()]
    if matrices.dim() == 2:  # rows are [n, rows]
        return torch.stack([rows[:, a:b] @ matrices[a:b] for a, b in itertools.pairwise(ends)])
    pieces = zip(itertools.pairwise(ends), matrices, strict=True)
    return torch.cat([rows[a:b] @ matrix for (a, b), matrix in pieces])


def test_both_ways_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped)
    counts = torch.tensor([3, 0, 5])
    rows, matrices = torch.randn(8, 4, dtype=torch.float64), torch.randn(3, 6, 4, dtype=torch.float64)
    of_results = torch.randn(8, 6, dtype=torch.float64)
    together, apart = GroupedGemm(counts, per_expert=False), GroupedGemm(counts, per_expert=True)
    torch.testing.assert_close(apart.forward(rows, matrices), together.forward(rows, matrices))
    found = apart.weight_gradient(of_results, rows, matrices)
    torch.testing.assert_close(found, together.weight_gradient(of_results, rows, matrices))
    assert found.shape == matrices.shape
    assert not found[1].any(), "an expert that nobody chose"


@pytest.mark.parametrize("device_name", ["h100-sxm-80gb", "gb200-nvl72-186gb", "b200-sxm-180gb"])
@pytest.mark.parametrize("rows", [EXPERTS * 64, EXPERTS * 1024, EXPERTS * 8192])
def test_what_is_priced_is_what_runs(device_name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = find_device(device_name)
    number = device.architecture.removeprefix("sm")
    processors = SimpleNamespace(multi_processor_count=device.processors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (int(number[:-1]), int(number[-1])))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: processors)
    down: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(EXPERTS, WIDTH, INNER))
    runs = GroupedGemm.choose(torch.tensor([1]), None, rows, down).per_expert
    kernels = set()
    timed = op_times.grouped_gemm_time_s

    def seen(**given: Any) -> float:
        kernels.add(given["kernel"])
        return timed(**given)

    monkeypatch.setattr(op_times, "grouped_gemm_time_s", seen)
    tokens, up, down = (rows // EXPERTS, EXPERTS), (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
    shapes = [(tokens[0], WIDTH), tokens, tokens, up, down]
    inputs = [
        Value(name=str(n), shape=shape, dtype=torch.bfloat16, kind="activation", requires_grad=True)
        for n, shape in enumerate(shapes)
    ]
    OpTimes(device, flash_attention=True)._experts(inputs, shapes, "bf16", backward=True, ranks=1)
    assert kernels == {"one by one" if runs else "grouped"}
    assert runs == (device.architecture == "sm100" and rows >= EXPERTS * 8192)


class Counted(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.shardplan.gemm_per_expert.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


class Forward(torch.autograd.Function):
    """Products as experts have them, inside a function of its own."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        products = GroupedGemm.choose(torch.tensor([3, 5]), None, 8, matrices)
        found = products.forward(rows, matrices)
        ctx.save_for_backward(rows, matrices, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, matrices, _ = ctx.saved_tensors
        return torch.zeros_like(rows), torch.zeros_like(matrices)


@pytest.mark.parametrize(("kept", "again"), [(SAVED_OPS, 0), (frozenset(), 1)])
def test_selective_checkpointing_keeps_products_of_experts(kept: frozenset[Any], again: int) -> None:
    rows, matrices = torch.randn(8, 4, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(kept))
    found = checkpoint(Forward.apply, rows, matrices, use_reentrant=False, context_fn=contexts)
    with Counted() as counted:
        found.sum().backward()
    assert counted.products == again
