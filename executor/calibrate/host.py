"""Seconds of a CPU's step that kernels do not account for: host time of each DTensor op, and first touch of memory."""

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

from executor.calibrate.timing import slowest_rank_s, time_s

_BLOCKS = 4
_ROWS, _HEADS, _WIDTH = 16, 4, 32
"""Sizes of the block's tensors, so small that their kernels take no time."""

_TOUCHED_BYTES = 2**22
"""Bytes written between two ops, more than a core's own caches hold. The kernels of a real step do the same: they evict
the host's code and data from the caches."""

_NEW_BYTES = 2**26
"""Bytes of an allocation so large that malloc takes the memory from the system each time."""

_ROUNDS = 5
"""Number of times that writes to new memory and to used memory are measured, in turn."""


def host_op_s(least_s: float) -> float:
    """Return the host's seconds of one op on small DTensors, averaged over a forward and backward.

    Every rank of the default process group calls it at once.

    Args:
        least_s: least seconds of the measurement.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kernels = _KernelStandIn()
    step = _step(lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]), kernels)
    counter = _OpCounter()
    with counter:
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
    return slowest_rank_s((taken_s - kernels.time_s) / calls) / counter.ops


def first_touch_s_per_byte(least_s: float) -> float:
    """Return the additional seconds per byte of a first write to newly allocated memory."""
    cpu = torch.device("cpu")
    used = torch.zeros(_NEW_BYTES // 4)
    additional_s = []
    for _ in range(_ROUNDS):
        used_s = slowest_rank_s(time_s(lambda: used.fill_(1.0), cpu, 1, least_s / 2))
        new_s = slowest_rank_s(time_s(lambda: torch.empty(_NEW_BYTES // 4).fill_(1.0), cpu, 1, least_s / 2))
        additional_s.append(new_s - used_s)
    return max(median(additional_s), 0.0) / _NEW_BYTES


class _KernelStandIn:
    """Writes memory between two ops in place of kernels, and adds up the time that this takes.

    Attributes:
        touched: tensor that is written; None: nothing is written.
        time_s: seconds of all writes so far.
    """

    def __init__(self) -> None:
        self.touched: torch.Tensor | None = None
        self.time_s = 0.0

    def run(self) -> None:
        """Write ``touched``, and add the time."""
        if self.touched is not None:
            begin = time.perf_counter()
            self.touched.add_(1.0)
            self.time_s += time.perf_counter() - begin

    def after(self, result: torch.Tensor) -> torch.Tensor:
        """Return the ``result`` of an op; ``run`` follows the op in the forward and in the backward."""
        self.run()
        result.register_hook(lambda gradient: self.run())
        return result


def _step(placed: Callable[[torch.Tensor], torch.Tensor], kernels: _KernelStandIn) -> Callable[[], None]:
    """Return a function that runs the forward and backward of blocks with a transformer's ops.

    Args:
        placed: plain tensor -> the tensor (such as a DTensor) that the blocks use.
        kernels: runs after each op.
    """
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return placed(torch.randn(shape, generator=generator)).requires_grad_()

    start, norm, into, out = (leaf(*s) for s in ((_ROWS, _WIDTH), (_WIDTH,), (_WIDTH, _WIDTH), (_WIDTH, _WIDTH)))
    half = _WIDTH // _HEADS // 2
    then = kernels.after

    def step() -> None:
        value = then(start.clone())
        for _ in range(_BLOCKS):
            scale = then(torch.rsqrt(then(then(then(value.pow(2)).mean(-1, keepdim=True)) + 1e-6)))
            normed = then(norm * then(value * scale))
            heads = then(F.linear(normed, into)).view(_ROWS, _HEADS, -1).transpose(0, 1)
            rotated = then(torch.cat((then(-heads[..., half:]), heads[..., :half]), -1))
            mixed = then(then(heads * 0.5) + rotated).transpose(0, 1).reshape(_ROWS, _WIDTH)
            gated = then(then(F.silu(then(mixed))) * normed)
            value = then(value + then(F.linear(gated, out)))
        value.sum().backward()
        for tensor in (start, norm, into, out):
            tensor.grad = None

    return step


class _OpCounter(TorchDispatchMode):
    """Counts the ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))
