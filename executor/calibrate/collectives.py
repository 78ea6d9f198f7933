"""Measured seconds of every kind of collective, on process groups inside a node, across nodes, and of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from cost_model.hardware.collective_kinds import COLLECTIVE_KINDS, CollectiveKind
from cost_model.hardware.sweep import Sweep, make_sweep
from executor.calibrate.timing import slowest_rank_s, time_s


def measure_collectives(
    device: torch.device, sizes: Sequence[int], ranks_per_node: int, repeats: int
) -> tuple[tuple[Sweep, ...], tuple[str, ...]]:
    """Return a sweep for each kind of collective and shape of group, and a note on each that could not be measured.

    Every rank calls this function. All groups of one shape run a collective at the same time.

    Args:
        device: this rank's device.
        sizes: bytes, as ``collective_time_s`` counts them.
        ranks_per_node: number of ranks on each node.
        repeats: number of calls of each collective.
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
    """Return (nodes, ranks per node) of groups inside a node, across nodes, and of all ranks."""
    inside = {(1, size) for size in (2, ranks_per_node) if size > 1 and ranks_per_node % size == 0}
    across = {(nodes, 1), (nodes, ranks_per_node)} if nodes > 1 else set()
    return sorted(inside | across)


def _members(nodes: int, ranks_per_node: int, shape: tuple[int, int]) -> list[list[int]]:
    """Return the ranks of each group of ``shape``; every rank is in one group."""
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
    """Return this rank's process group. Every rank creates all of ``groups``, and is in one of them."""
    created: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
    (own,) = (index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return created[own]


def _collective_s(
    kind: CollectiveKind, nbytes: int, group: dist.ProcessGroup, device: torch.device, repeats: int
) -> float:
    """Return the slowest rank's seconds of one collective."""
    ranks = dist.get_process_group_ranks(group)
    # The bytes of an all-gather are those of its output. The bytes of any other collective are those of its input.
    numel = max(len(ranks), nbytes // 4 // (len(ranks) if kind == "all_gather" else 1))
    numel -= numel % len(ranks) if kind in ("reduce_scatter", "all_to_all") else 0
    tensor = torch.ones(numel, device=device)
    run = _collective(kind, tensor, group, ranks)
    return slowest_rank_s(time_s(run, device, repeats))


def _collective(
    kind: CollectiveKind, tensor: torch.Tensor, group: dist.ProcessGroup, ranks: list[int]
) -> Callable[[], object]:
    """Return the call to time: the functional collective that DTensor uses, where there is one."""
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
    """Send ``tensor`` to the next rank of the group, and receive from the one before."""
    index = ranks.index(dist.get_rank())
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[(index + 1) % len(ranks)], group),
        dist.P2POp(dist.irecv, received, ranks[index - 1], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
