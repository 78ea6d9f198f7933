"""Products of experts run in the way that they are priced in, and give the same either way."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cost_model import find_device
from executor.expert_products import ExpertProducts
from planner import op_times
from planner.graph import Value
from planner.op_times import OpTimes

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
    together, apart = ExpertProducts(counts, one_by_one=False), ExpertProducts(counts, one_by_one=True)
    torch.testing.assert_close(apart.of_rows(rows, matrices), together.of_rows(rows, matrices))
    found = apart.of_matrices(of_results, rows, matrices)
    torch.testing.assert_close(found, together.of_matrices(of_results, rows, matrices))
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
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(rows, WIDTH))
    runs = ExpertProducts.of(torch.tensor([1]), on_gpu, torch.empty(EXPERTS, WIDTH, INNER, device="meta")).one_by_one
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
