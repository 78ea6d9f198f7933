"""Measure collectives: every kind on groups as the axes of a mesh make them, all groups of a shape at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from cost_model.hardware.collective_kinds import COLLECTIVE_KINDS, CollectiveKind
from cost_model.hardware.sweep import Sweep, make_sweep
from executor.calibrate.timing import of_ranks, time_s


def measure_collectives(
    device: torch.device, sizes: Sequence[int], ranks_per_node: int, repeats: int
) -> tuple[tuple[Sweep, ...], tuple[str, ...]]:
    """Return (sweeps, what could not be measured and why); every rank calls it.

    Args:
        sizes: bytes, as ``collective_time_s`` counts them.
    """
    nodes = dist.get_world_size() // ranks_per_node
    sweeps: list[Sweep] = []
    notes: list[str] = []
    for shape in _shapes(nodes, ranks_per_node):
        group = _own_group(_members(nodes, ranks_per_node, shape))
        for kind in COLLECTIVE_KINDS:
            try:
                points = [(float(size), _collective_s(kind, size, group, device, repeats)) for size in sizes]
            except (RuntimeError, NotImplementedError) as error:
                notes.append(f"{kind} on {shape[0]}x{shape[1]} was not measured: {str(error).splitlines()[0]}")
                continue
            sweeps.append(make_sweep(kind, *shape, points, source="shardplan calibrate"))
    return tuple(sweeps), tuple(notes)


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


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Return this rank's group among ``groups``, which cover all ranks; every rank makes them all."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
    (place,) = (place for place, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[place]


def _collective_s(
    kind: CollectiveKind, nbytes: int, group: dist.ProcessGroup, device: torch.device, repeats: int
) -> float:
    """Return the slowest rank's seconds; every group runs it at the same time."""
    ranks = dist.get_process_group_ranks(group)
    # all-gather counts what it returns, the others what they are given
    numel = max(len(ranks), nbytes // 4 // (len(ranks) if kind == "all_gather" else 1))
    numel -= numel % len(ranks) if kind in ("reduce_scatter", "all_to_all") else 0
    tensor = torch.ones(numel, device=device)
    run = _calls(kind, tensor, group, ranks)
    return of_ranks(time_s(run, device, repeats))


def _calls(
    kind: CollectiveKind, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: list[int]
) -> Callable[[], object]:
    """Return the call to time: the functional collectives that DTensor uses, where there is one."""
    if kind == "all_reduce":
        return lambda: funcol.wait_tensor(funcol.all_reduce(tensor, "sum", group))
    if kind == "all_gather":
        return lambda: funcol.wait_tensor(funcol.all_gather_single(tensor, 0, group))
    if kind == "reduce_scatter":
        return lambda: funcol.wait_tensor(funcol.reduce_scatter_single(tensor, "sum", 0, group))
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
