"""Cheapest redistributions of a tensor between two layouts: paths of steps, each on one mesh axis.

A step changes one placement on one axis:

    R -> S(d)      slice            local, free
    S(d) -> R      all_gather
    P -> R         all_reduce
    P -> S(d)      reduce_scatter
    S(d) -> S(e)   all_to_all

Where two axes shard the same dim, the outer axis shards first (DTensor's order). So a step on axis ``a`` may shard or
unshard dim ``d`` only if no axis inside ``a`` shards ``d``: (S(0),S(0)) -> (R,S(0)) is not one all-gather. The search
runs over whole layouts, so a path may go through a third layout if that is cheaper: (P,P) -> (S(0),S(0)) -> (R,R)
instead of two all-reduces. The executor runs the same path.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout, divides, format_layout, sharded_dim, split_factor
from cost_model.layouts.uneven import Rounded, piece_numel, shards_once

RedistributionCollective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
"""The collectives of redistributions: those of ``CollectiveKind`` that change a layout."""
StepKind = Literal["slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
PriceStep = Callable[[RedistributionCollective, int, int], float]
"""(kind, index of the mesh axis, bytes of the full buffer) -> seconds."""


class NoPathError(ValueError):
    """No path of steps leads from one layout to the other (for example R -> P, or an uneven shard)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionStep:
    """One change of placement on one mesh axis.

    Attributes:
        nbytes: bytes of the full buffer of the collective, as nccl-tests counts it: the output of an all-gather, the
            input of a reduce-scatter or an all-reduce, one rank's buffer of an all-to-all; 0 for a slice.
        before, after: the tensor's layouts before and after the step.
    """

    kind: StepKind
    axis: int
    nbytes: int
    before: Layout
    after: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribution:
    """The cheapest path from one layout to another: its steps in order, and the sum of their seconds."""

    steps: tuple[RedistributionStep, ...]
    time_s: float

    @property
    def collectives(self) -> tuple[RedistributionStep, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if step.kind != "slice")


def _has_inner_shard(layout: Layout, axis: int, dim: int) -> bool:
    """Return whether an axis inside ``axis`` shards ``dim``."""
    return any(sharded_dim(placement) == dim for placement in layout[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """A step from one layout of a `_LayoutGraph` to another.

    Attributes:
        divisor: bytes of the whole tensor over bytes of the step's buffer; 0 for a slice, which has no buffer.
        target: number of the layout after the step.
    """

    kind: StepKind
    axis: int
    divisor: int
    target: int


def _edges_from(layout: Layout, ndim: int, mesh_shape: Sequence[int]) -> Iterator[tuple[StepKind, int, int, Layout]]:
    """Yield (kind, axis, divisor of the buffer, layout after) of every step out of ``layout``."""
    split = split_factor(layout, mesh_shape)
    for axis, placement in enumerate(layout):
        size = mesh_shape[axis]
        if size == 1:
            continue
        targets = [Shard(d) for d in range(ndim) if not _has_inner_shard(layout, axis, d)]
        origin = sharded_dim(placement)
        if origin is not None:
            if type(placement) is not Shard or _has_inner_shard(layout, axis, origin):
                continue
            options: list[tuple[StepKind, Placement, int]] = [("all_gather", Replicate(), split // size)]
            options += [("all_to_all", target, split) for target in targets if target.dim != origin]
        elif placement.is_partial():
            options = [("all_reduce", Replicate(), split)]
            options += [("reduce_scatter", target, split) for target in targets]
        else:
            options = [("slice", target, 0) for target in targets]
        for kind, target, divisor in options:
            yield kind, axis, divisor, (*layout[:axis], target, *layout[axis + 1 :])


class _LayoutGraph:
    """The layouts of a tensor and the steps between them.

    Shapes share one graph if the same sets of axes divide their dims evenly, and the same dims are rounded up. Such a
    dim is sharded by one axis at most, and no all-to-all moves a split to or from it.

    Attributes:
        layouts: every layout; its index is the layout's number.
        numbers: layout -> its number.
        texts: text of each layout, by number; texts break ties between paths of equal cost.
    """

    def __init__(self, shape: Sequence[int], mesh_shape: tuple[int, ...], rounded: Rounded) -> None:
        self._shape = tuple(shape)
        self._rounded = rounded
        self._mesh_shape = mesh_shape
        options = (Replicate(), Partial(), *(Shard(d) for d in range(len(shape))))
        layouts = [
            layout
            for layout in itertools.product(options, repeat=len(mesh_shape))
            if divides(shape, layout, mesh_shape) and shards_once(shape, layout, rounded)
        ]
        self.layouts: list[Layout] = layouts
        self.numbers = {layout: number for number, layout in enumerate(layouts)}
        self.texts = [format_layout(layout) for layout in layouts]
        self._edges: dict[Layout, tuple[_Edge, ...]] = {}

    def edges(self, layout: Layout) -> tuple[_Edge, ...]:
        """Return the steps out of ``layout`` to layouts with even shards."""
        if layout not in self._edges:
            self._edges[layout] = tuple(
                _Edge(kind=kind, axis=axis, divisor=divisor, target=self._number(after))
                for kind, axis, divisor, after in _edges_from(layout, len(self._shape), self._mesh_shape)
                if divides(self._shape, after, self._mesh_shape)
                and shards_once(self._shape, after, self._rounded)
                and not (kind == "all_to_all" and self._moves_rounded(layout[axis], after[axis]))
            )
        return self._edges[layout]

    def _moves_rounded(self, before: Placement, after: Placement) -> bool:
        dims = (sharded_dim(before), sharded_dim(after))
        return any(dim is not None and self._shape[dim] in self._rounded for dim in dims)

    def _number(self, layout: Layout) -> int:
        if layout not in self.numbers:
            # The source has an average or a strided shard on another axis, which the constructor does not enumerate.
            self.numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
            self.texts.append(format_layout(layout))
        return self.numbers[layout]


@functools.lru_cache(maxsize=4096)
def _even_subsets(length: int, mesh_shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Return, for every subset of the axes, whether the subset shards a dim of ``length`` evenly."""
    subsets = itertools.product((False, True), repeat=len(mesh_shape))
    return tuple(
        length % math.prod(size for size, is_member in zip(mesh_shape, subset, strict=True) if is_member) == 0
        for subset in subsets
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathEnd:
    """The end of the cheapest path to a layout: its seconds, and its last step (None for the source)."""

    time_s: float
    before: Layout | None
    edge: _Edge | None


class RedistributionPlanner:
    """Cheapest redistributions on one mesh, cached by shape; the search is Dijkstra's, over whole layouts."""

    def __init__(self, mesh_shape: Sequence[int], price_step: PriceStep, rounded: Rounded | None = None) -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._price_step = price_step
        self._rounded: Rounded = rounded or {}
        self._graphs: dict[tuple[tuple[object, ...], ...], _LayoutGraph] = {}
        self._path_ends: dict[tuple[tuple[int, ...], int, Layout], dict[Layout, _PathEnd]] = {}
        self._paths: dict[tuple[tuple[int, ...], int, Layout, Layout], Redistribution | None] = {}
        self._prices: dict[tuple[StepKind, int, int], float] = {}

    def paths_from(self, shape: Sequence[int], itemsize: int, source: Layout) -> dict[Layout, Redistribution]:
        """Return the cheapest redistribution from ``source`` to every layout that can be reached.

        Args:
            shape: global shape of the tensor.
            itemsize: bytes per element in the collectives.
            source: the tensor's layout; it must shard ``shape`` evenly.
        """
        ends = self._ends_from(tuple(shape), itemsize, source)
        return {target: self.path(shape, itemsize, source, target) for target in ends}

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution:
        """Return the cheapest redistribution from ``source`` to ``target``.

        Raises:
            NoPathError: no path leads from ``source`` to ``target``.
        """
        redistribution = self.find(shape, itemsize, source, target)
        if redistribution is None:
            raise NoPathError(
                f"no redistribution from {format_layout(source)} to {format_layout(target)} "
                f"for shape {tuple(shape)} on mesh {self._mesh_shape}; take evenly sharded layouts"
            )
        return redistribution

    def find(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution from ``source`` to ``target``; None if no path leads there."""
        key = (tuple(shape), itemsize, source, target)
        try:
            return self._paths[key]  # one look-up: layouts take long to hash
        except KeyError:
            path = Redistribution(steps=(), time_s=0.0) if source == target else self._backtrack(*key)
            self._paths[key] = path
        return path

    def _backtrack(
        self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout
    ) -> Redistribution | None:
        ends = self._ends_from(shape, itemsize, source)
        end = ends.get(target)
        if end is None:
            return None
        whole = math.prod(shape) * itemsize
        steps: list[RedistributionStep] = []
        layout, last = target, end
        while (edge := last.edge) is not None:
            before = last.before
            assert before is not None
            nbytes = whole // edge.divisor if edge.divisor else 0
            if nbytes and any(length in self._rounded for length in shape):
                nbytes = itemsize * self._buffer_numel(shape, edge, before, layout)
            steps.append(RedistributionStep(kind=edge.kind, axis=edge.axis, nbytes=nbytes, before=before, after=layout))
            layout, last = before, ends[before]
        return Redistribution(steps=tuple(reversed(steps)), time_s=end.time_s)

    def _buffer_numel(self, shape: tuple[int, ...], edge: _Edge, before: Layout, after: Layout) -> int:
        """Return the elements of a step's buffer where dims are rounded up: collectives pad pieces to the largest."""
        pieces = self._mesh_shape[edge.axis] if edge.kind in ("all_gather", "reduce_scatter") else 1
        layout = after if edge.kind == "reduce_scatter" else before
        return pieces * piece_numel(shape, layout, self._mesh_shape, self._rounded)

    def _ends_from(self, shape: tuple[int, ...], itemsize: int, source: Layout) -> dict[Layout, _PathEnd]:
        key = (shape, itemsize, source)
        ends = self._path_ends.get(key)
        if ends is None:
            ends = self._path_ends[key] = self._search(*key)
        return ends

    def _graph(self, shape: tuple[int, ...]) -> _LayoutGraph:
        evens = tuple(_even_subsets(length, self._mesh_shape) for length in shape)
        key = evens, tuple(length in self._rounded for length in shape)
        if key not in self._graphs:
            self._graphs[key] = _LayoutGraph(shape, self._mesh_shape, self._rounded)
        return self._graphs[key]

    def _cost(self, edge: _Edge, whole: int) -> float:
        if edge.kind == "slice":
            return 0.0
        key = (edge.kind, edge.axis, whole // edge.divisor)
        if key not in self._prices:
            self._prices[key] = self._price_step(edge.kind, edge.axis, key[2])
        return self._prices[key]

    def _search(self, shape: tuple[int, ...], itemsize: int, source: Layout) -> dict[Layout, _PathEnd]:
        graph = self._graph(shape)
        whole = math.prod(shape) * itemsize
        settled: dict[Layout, _PathEnd] = {}
        # Ties break by fewer steps, then by the text of the path, so that planner and executor agree.
        start = _PathEnd(time_s=0.0, before=None, edge=None)
        queue: list[tuple[float, int, tuple[tuple[str, ...], ...], int, Layout, _PathEnd]] = [
            (0.0, 0, (), 0, source, start)
        ]
        pushed = 0
        while queue:
            time_s, count, text, _, layout, end = heapq.heappop(queue)
            if layout in settled:
                continue
            settled[layout] = end
            for edge in graph.edges(layout):
                after = graph.layouts[edge.target]
                if after in settled:
                    continue
                pushed += 1
                next_end = _PathEnd(time_s=time_s + self._cost(edge, whole), before=layout, edge=edge)
                entry = (next_end.time_s, count + 1, (*text, graph.texts[edge.target]), pushed, after, next_end)
                heapq.heappush(queue, entry)
        return settled
