"""Redistribution: from one layout of a tensor to another, as the cheapest path of steps on single mesh axes.

A step changes one placement on one axis:

    R -> S(d)      slice            local, free
    S(d) -> R      all_gather
    P -> R         all_reduce
    P -> S(d)      reduce_scatter
    S(d) -> S(e)   all_to_all

Where two axes split the same dim, the outer axis splits first (DTensor's order). A step on axis ``a`` may therefore
open or close a split of dim ``d`` only where no inner axis splits ``d``: (S(0),S(0)) -> (R,S(0)) is not one gather.
The path is searched over whole layouts, so that it may go through a third layout where that is cheaper:
(P,P) -> (S(0),S(0)) -> (R,R) instead of two all-reduces. The executor walks the same path.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layout import Layout, divides, format_layout, sharded_dim, split_factor

CollectiveKind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
StepKind = Literal["slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
PriceStep = Callable[[CollectiveKind, int, int], float]
"""(kind, index of the mesh axis, bytes of the full buffer) -> seconds."""


class NoPathError(ValueError):
    """No sequence of steps leads from one layout to the other (for example R -> P, or an uneven split)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of placement on one mesh axis.

    ``nbytes`` is the full buffer of the collective, as nccl-tests counts it: what an all-gather yields, what a
    reduce-scatter or an all-reduce takes in, what one rank holds in an all-to-all; 0 for a slice.
    """

    kind: StepKind
    axis: int
    nbytes: int
    before: Layout
    after: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """The cheapest path from one layout to another: its steps, in order, and its seconds."""

    steps: tuple[Step, ...]
    time_s: float

    @property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if step.kind != "slice")


def _is_inner_split(layout: Layout, axis: int, dim: int) -> bool:
    """Tell whether an axis inside ``axis`` splits ``dim``."""
    return any(sharded_dim(placement) == dim for placement in layout[axis + 1 :])


def _steps_from(layout: Layout, shape: Sequence[int], itemsize: int, mesh_shape: Sequence[int]) -> Iterator[Step]:
    """Yield every single step out of ``layout`` that keeps all splits even."""
    whole = math.prod(shape) * itemsize
    held = whole // split_factor(layout, mesh_shape)
    for axis, placement in enumerate(layout):
        size = mesh_shape[axis]
        if size == 1:
            continue
        targets = [Shard(d) for d in range(len(shape)) if not _is_inner_split(layout, axis, d)]
        origin = sharded_dim(placement)
        if origin is not None:
            if type(placement) is not Shard or _is_inner_split(layout, axis, origin):
                continue
            options: list[tuple[StepKind, Placement, int]] = [("all_gather", Replicate(), held * size)]
            options += [("all_to_all", target, held) for target in targets if target.dim != origin]
        elif placement.is_partial():
            options = [("all_reduce", Replicate(), held)]
            options += [("reduce_scatter", target, held) for target in targets]
        else:
            options = [("slice", target, 0) for target in targets]
        for kind, target, nbytes in options:
            after = (*layout[:axis], target, *layout[axis + 1 :])
            if divides(shape, after, mesh_shape):
                yield Step(kind=kind, axis=axis, nbytes=nbytes, before=layout, after=after)


class RedistributionPlanner:
    """Cheapest redistributions on one mesh, remembered per shape; the search is Dijkstra's over whole layouts."""

    def __init__(self, mesh_shape: Sequence[int], price_step: PriceStep) -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._price_step = price_step
        self._found: dict[tuple[tuple[int, ...], int, Layout], dict[Layout, Redistribution]] = {}

    def paths_from(self, shape: Sequence[int], itemsize: int, source: Layout) -> dict[Layout, Redistribution]:
        """Return the cheapest redistribution from ``source`` to every layout that can be reached.

        Args:
            shape: global shape of the tensor.
            itemsize: bytes per element as it travels.
            source: the layout that the tensor is in; it must divide ``shape`` evenly.
        """
        key = (tuple(shape), itemsize, source)
        if key not in self._found:
            self._found[key] = self._search(*key)
        return self._found[key]

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution:
        """Return the cheapest redistribution from ``source`` to ``target``.

        Raises:
            NoPathError: there is none.
        """
        if source == target:
            return Redistribution(steps=(), time_s=0.0)
        found = self.paths_from(shape, itemsize, source).get(target)
        if found is None:
            raise NoPathError(
                f"no redistribution from {format_layout(source)} to {format_layout(target)} "
                f"for shape {tuple(shape)} on mesh {self._mesh_shape}"
            )
        return found

    def _search(self, shape: tuple[int, ...], itemsize: int, source: Layout) -> dict[Layout, Redistribution]:
        settled: dict[Layout, Redistribution] = {}
        # Ties go to fewer steps, then to the text of the path, so that planner and executor always agree.
        queue: list[tuple[float, int, tuple[str, ...], int, Layout, tuple[Step, ...]]] = [(0.0, 0, (), 0, source, ())]
        pushed = 0
        while queue:
            time_s, count, text, _, layout, steps = heapq.heappop(queue)
            if layout in settled:
                continue
            settled[layout] = Redistribution(steps=steps, time_s=time_s)
            for step in _steps_from(layout, shape, itemsize, self._mesh_shape):
                if step.after in settled:
                    continue
                cost = 0.0 if step.kind == "slice" else self._price_step(step.kind, step.axis, step.nbytes)
                pushed += 1
                entry = (
                    time_s + cost,
                    count + 1,
                    (*text, *format_layout(step.after)),
                    pushed,
                    step.after,
                    (*steps, step),
                )
                heapq.heappush(queue, entry)
        return settled
