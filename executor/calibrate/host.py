"""Measure what a CPU waits for beside its kernels: the host, for each op of a DTensor, and new memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.calibrate.timing import of_ranks, time_s

_BLOCKS = 4
_ROWS, _HEADS, _WIDTH = 16, 4, 32
"""Of the block's tensors, which are too small to count."""

_TOUCHED_BYTES = 2**22
"""What is written between two ops, as kernels do in a step: more than a core's own caches hold, so that the host finds
its code and data as cold as there."""

_NEW_BYTES = 2**26
"""More than malloc keeps for the next call."""

_ROUNDS = 5
"""Of writes to memory that is new, and to memory that is not, in turn."""


def host_op_s(least_s: float) -> float:
    """Return the seconds of one op on DTensors of a few elements, in forward and backward, between kernels.

    Every rank of the default process group calls it at once.

    Args:
        least_s: seconds that it measures, at least, what is between the ops included.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kernels = _Between()
    step = _step(lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]), kernels)
    count = _Count()
    with count:
        step()
    kernels.touched = torch.zeros(_TOUCHED_BYTES // 4)
    step()
    dist.barrier()
    calls, kernels.time_s, taken_s = 0, 0.0, 0.0
    begin = time.perf_counter()
    while taken_s < least_s:
        step()
        calls += 1
        taken_s = time.perf_counter() - begin
    return of_ranks((taken_s - kernels.time_s) / calls) / count.ops


def first_touch_s_per_byte(least_s: float) -> float:
    """Return the seconds that writing a byte takes longer in memory that the process has just got."""
    cpu = torch.device("cpu")
    held = torch.zeros(_NEW_BYTES // 4)
    longer = []
    for _ in range(_ROUNDS):
        held_s = of_ranks(time_s(lambda: held.fill_(1.0), cpu, 1, least_s / 2))
        new_s = of_ranks(time_s(lambda: torch.empty(_NEW_BYTES // 4).fill_(1.0), cpu, 1, least_s / 2))
        longer.append(new_s - held_s)
    return max(median(longer), 0.0) / _NEW_BYTES


class _Between:
    """Does between two ops what kernels would, and keeps the time of it.

    Attributes:
        touched: what is written; None: nothing.
        time_s: seconds that it took so far.
    """

    def __init__(self) -> None:
        self.touched: torch.Tensor | None = None
        self.time_s = 0.0

    def run(self) -> None:
        """Write what is to be written."""
        if self.touched is not None:
            begin = time.perf_counter()
            self.touched.add_(1.0)
            self.time_s += time.perf_counter() - begin

    def after(self, result: torch.Tensor) -> torch.Tensor:
        """Return ``result`` of an op, behind which kernels run, in the backward as well."""
        self.run()
        result.register_hook(lambda gradient: self.run())
        return result


def _step(placed: Callable[[torch.Tensor], torch.Tensor], kernels: _Between) -> Callable[[], None]:
    """Return forward and backward of blocks of the kinds of ops that models are made of, on tensors so placed."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return placed(torch.randn(shape, generator=generator)).requires_grad_()

    start, norm, into, out = (leaf(*s) for s in ((_ROWS, _WIDTH), (_WIDTH,), (_WIDTH, _WIDTH), (_WIDTH, _WIDTH)))
    halves = _WIDTH // _HEADS // 2
    then = kernels.after

    def step() -> None:
        value = then(start.clone())
        for _ in range(_BLOCKS):
            scale = then(torch.rsqrt(then(then(then(value.pow(2)).mean(-1, keepdim=True)) + 1e-6)))
            normed = then(norm * then(value * scale))
            heads = then(F.linear(normed, into)).view(_ROWS, _HEADS, -1).transpose(0, 1)
            turned = then(torch.cat((then(-heads[..., halves:]), heads[..., :halves]), -1))
            mixed = then(then(heads * 0.5) + turned).transpose(0, 1).reshape(_ROWS, _WIDTH)
            gated = then(then(F.silu(then(mixed))) * normed)
            value = then(value + then(F.linear(gated, out)))
        value.sum().backward()
        for tensor in (start, norm, into, out):
            tensor.grad = None

    return step


class _Count(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))
