"""Measure the machine that this runs on: kernels on every rank at once, collectives on every group at once.

Every rank calls ``measure``; all return the same. On GPUs under NCCL the same code runs with events in place of the
clock; no GPU was there to try it on when it was written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from cost_model.kinds import CollectiveKind
from cost_model.measurements import AttentionPoint, GemmPoint, Measurements, StreamPoint
from cost_model.sweep import Sweep, make_sweep

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_S = 0.2
"""Seconds of one measurement of a CPU's kernel: some of the scheduler's time slices."""
_COLLECTIVES: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured: sizes that suit the device.

    Attributes:
        gemms: (m, n, k).
        attention: (batch, heads, seq, head_dim).
        streams: bytes of one tensor.
        collectives: bytes, as ``collective_time_s`` counts them.
        repeats: of each, at least.
    """

    dtypes: tuple[str, ...]
    gemms: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    streams: tuple[int, ...]
    collectives: tuple[int, ...]
    repeats: int


CPU = Plan(
    dtypes=("fp32",),
    gemms=(
        (128, 256, 256),
        (256, 256, 256),
        (256, 512, 512),
        (512, 512, 512),
        (256, 1024, 512),
        (512, 2048, 512),
        (1024, 1024, 1024),
    ),
    attention=((2, 4, 128, 64), (4, 8, 128, 64), (2, 8, 256, 64)),
    streams=(2**20, 2**21, 2**22, 2**23),
    collectives=(2**12, 2**15, 2**18, 2**20, 2**22, 2**24),
    repeats=5,
)
GPU = Plan(
    dtypes=("bf16", "tf32"),
    gemms=(
        (1024, 4096, 4096),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 28672, 4096),
        (16384, 4096, 14336),
    ),
    attention=((16, 16, 1024, 128), (4, 16, 4096, 128), (2, 32, 8192, 128), (4, 32, 4096, 64)),
    streams=(2**26, 2**28, 2**30),
    collectives=tuple(2**power for power in range(14, 31, 2)),
    repeats=20,
)


def measure(device: torch.device, what: Plan | None = None) -> Measurements:
    """Return what this cluster does; every rank of the default process group calls it, with one device each.

    Args:
        device: of this rank; its type decides ``what`` where that is None.
        what: the sizes to measure.
    """
    what = what or (CPU if device.type == "cpu" else GPU)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    sweeps, notes = _sweeps(device, what, ranks_per_node)
    is_cpu = device.type == "cpu"
    return Measurements(
        device="cpu" if is_cpu else torch.cuda.get_device_name(device),
        kind="cpu" if is_cpu else "rocm" if torch.version.hip else "cuda",
        nodes=dist.get_world_size() // ranks_per_node,
        ranks_per_node=ranks_per_node,
        memory_bytes=_memory_bytes(device, ranks_per_node),
        launch_s=_of_ranks(_launch_s(device, what.repeats)),
        gemms=tuple(_gemm(device, dtype, shape, what.repeats) for dtype in what.dtypes for shape in what.gemms),
        attention=tuple(
            point for shape in what.attention for point in _attention(device, what.dtypes[0], shape, what.repeats)
        ),
        streams=tuple(_stream(device, nbytes, what.repeats) for nbytes in what.streams),
        sweeps=sweeps,
        notes=notes,
    )


# --- time -------------------------------------------------------------------------------------------------------------


def time_s(run: Callable[[], object], device: torch.device, repeats: int, least_s: float = 0.0) -> float:
    """Return the seconds of ``run`` after two calls to warm up; all ranks begin together.

    Of a GPU's events the median counts. Processes of a CPU may share cores, and then a short call is either
    undisturbed or stopped for long: only the mean over many says what a step will see.

    Args:
        repeats: calls at least.
        least_s: seconds that they take together at least, on a CPU; 0 where all ranks must call equally often.
    """
    for _ in range(2):
        run()
    dist.barrier()
    if device.type != "cpu":
        return median(_event_s(run) for _ in range(repeats))
    calls = 0
    begin = time.perf_counter()
    while calls < repeats or time.perf_counter() - begin < least_s:
        run()
        calls += 1
    return (time.perf_counter() - begin) / calls


def _event_s(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _of_ranks(seconds: float, take: Callable[[Sequence[float]], float] = mean) -> float:
    """Return one figure for all ranks' ``seconds``."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seconds)
    return take(found)


# --- kernels ----------------------------------------------------------------------------------------------------------


def _launch_s(device: torch.device, repeats: int) -> float:
    """Return the seconds of one op too small to count: a kernel of a full queue, or, on a CPU, an op of a DTensor in
    forward and backward, which wait for the host."""
    ops = 100
    tensor = torch.ones(16, device=device)
    if device.type != "cpu":

        def queue() -> None:
            value = tensor
            for _ in range(ops):
                value = value + tensor

        return time_s(queue, device, repeats) / ops
    factor = distribute_tensor(tensor, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
    start = factor.clone().requires_grad_()

    def forward_and_backward() -> None:
        value = start
        for _ in range(ops):
            value = value * factor
        value.sum().backward()

    return time_s(forward_and_backward, device, repeats, _LEAST_S) / (2 * ops)


def _gemm(device: torch.device, dtype: str, shape: tuple[int, int, int], repeats: int) -> GemmPoint:
    m, n, k = shape
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    left = torch.randn(m, k, device=device).to(_DTYPES[dtype])
    right = torch.randn(n, k, device=device).to(_DTYPES[dtype])
    seconds = _of_ranks(time_s(lambda: F.linear(left, right), device, repeats, _LEAST_S))
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return GemmPoint(m=m, n=n, k=k, dtype=dtype, time_s=seconds)


def _attention(
    device: torch.device, dtype: str, shape: tuple[int, int, int, int], repeats: int
) -> tuple[AttentionPoint, AttentionPoint]:
    batch, heads, seq, head_dim = shape
    tensors = [torch.randn(shape, device=device).to(_DTYPES[dtype]).requires_grad_() for _ in range(3)]

    def forward() -> torch.Tensor:
        query, key, value = tensors
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    forward_s = _of_ranks(time_s(forward, device, repeats, _LEAST_S))
    both_s = _of_ranks(time_s(both, device, repeats, _LEAST_S))
    first = AttentionPoint(
        batch=batch, heads=heads, seq=seq, head_dim=head_dim, backward=False, dtype=dtype, time_s=forward_s
    )
    return first, replace(first, backward=True, time_s=max(both_s - forward_s, 0.1 * both_s))


def _stream(device: torch.device, nbytes: int, repeats: int) -> StreamPoint:
    """Add two tensors: two are read, one is made and written, as in a step."""
    left, right = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    seconds = _of_ranks(time_s(lambda: torch.add(left, right), device, repeats, _LEAST_S))
    return StreamPoint(nbytes=3 * nbytes, time_s=seconds)


def _memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_per_node
    return int(torch.cuda.get_device_properties(device).total_memory)


# --- collectives ------------------------------------------------------------------------------------------------------


def _shapes(nodes: int, ranks_per_node: int) -> list[tuple[int, int]]:
    """Return (nodes, ranks per node) of the groups that axes of a mesh make: inside a node, across, and all."""
    inside = {(1, size) for size in (2, ranks_per_node) if size > 1 and ranks_per_node % size == 0}
    across = {(nodes, 1), (nodes, ranks_per_node)} if nodes > 1 else set()
    return sorted(inside | across)


def _members(nodes: int, ranks_per_node: int, shape: tuple[int, int]) -> list[list[int]]:
    """Return the ranks of each group of ``shape``; all together cover all ranks once."""
    if shape[0] == 1:
        size = shape[1]
        starts = [
            node * ranks_per_node + part for node in range(nodes) for part in range(0, ranks_per_node - size + 1, size)
        ]
        return [list(range(start, start + size)) for start in starts]
    if shape[1] == 1:
        return [[node * ranks_per_node + local for node in range(nodes)] for local in range(ranks_per_node)]
    return [list(range(nodes * ranks_per_node))]


def _sweeps(device: torch.device, what: Plan, ranks_per_node: int) -> tuple[tuple[Sweep, ...], tuple[str, ...]]:
    nodes = dist.get_world_size() // ranks_per_node
    sweeps: list[Sweep] = []
    notes: list[str] = []
    for shape in _shapes(nodes, ranks_per_node):
        group = _own_group(_members(nodes, ranks_per_node, shape))
        for kind in _COLLECTIVES:
            try:
                points = [(float(size), _collective_s(kind, size, group, device, what)) for size in what.collectives]
            except (RuntimeError, NotImplementedError) as error:
                notes.append(f"{kind} on {shape[0]}x{shape[1]} was not measured: {str(error).splitlines()[0]}")
                continue
            sweeps.append(make_sweep(kind, *shape, points, source="shardplan calibrate"))
    return tuple(sweeps), tuple(notes)


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's group among ``groups``, which cover all ranks; every rank makes them all."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
    (place,) = (place for place, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[place]


def _collective_s(
    kind: CollectiveKind, nbytes: int, group: dist.ProcessGroup, device: torch.device, what: Plan
) -> float:
    """Return the slowest rank's seconds; every group runs it at the same time."""
    ranks = dist.get_process_group_ranks(group)
    # all-gather counts what it returns, the others what they are given
    numel = max(len(ranks), nbytes // 4 // (len(ranks) if kind == "all_gather" else 1))
    numel -= numel % len(ranks) if kind in ("reduce_scatter", "all_to_all") else 0
    tensor = torch.ones(numel, device=device)
    run = _calls(kind, tensor, group, ranks)
    return _of_ranks(time_s(run, device, what.repeats), max)


def _calls(
    kind: CollectiveKind, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: list[int]
) -> Callable[[], object]:
    """Return the call to time: the functional collectives that DTensor uses, where there is one."""
    if kind == "all_reduce":
        return lambda: funcol.wait_tensor(funcol.all_reduce(tensor, "sum", group))
    if kind == "all_gather":
        return lambda: funcol.wait_tensor(funcol.all_gather_tensor(tensor, 0, group))
    if kind == "reduce_scatter":
        return lambda: funcol.wait_tensor(funcol.reduce_scatter_tensor(tensor, "sum", 0, group))
    if kind == "all_to_all":
        return lambda: funcol.wait_tensor(funcol.all_to_all_single(tensor, None, None, group))
    if kind == "broadcast":
        return lambda: dist.broadcast(tensor, src=ranks[0], group=group)
    return lambda: _ring_shift(tensor, group, ranks)


def _ring_shift(tensor: torch.Tensor, group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Send to the next rank of the group and receive from the one before."""
    place = ranks.index(dist.get_rank())
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[(place + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[place - 1], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
