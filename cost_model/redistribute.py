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

RedistributionCollective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
"""The collectives of redistributions: those of ``CollectiveKind`` that change a layout."""
StepKind = Literal["slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
PriceStep = Callable[[RedistributionCollective, int, int], float]
"""(kind, index of the mesh axis, bytes of the full buffer) -> seconds."""


class NoPathError(ValueError):
    """No sequence of steps leads from one layout to the other (for example R -> P, or an uneven split)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionStep:
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

    steps: tuple[RedistributionStep, ...]
    time_s: float

    @property
    def collectives(self) -> tuple[RedistributionStep, ...]:
        """The steps that communicate."""
        return tuple(step for step in self.steps if step.kind != "slice")


def _is_inner_split(layout: Layout, axis: int, dim: int) -> bool:
    """Tell whether an axis inside ``axis`` splits ``dim``."""
    return any(sharded_dim(placement) == dim for placement in layout[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """A single step between two layouts of a `_LayoutGraph`; its buffer is the whole tensor over ``divisor``."""

    kind: StepKind
    axis: int
    divisor: int
    target: int


def _edges_from(layout: Layout, ndim: int, mesh_shape: Sequence[int]) -> Iterator[tuple[StepKind, int, int, Layout]]:
    """Yield (kind, axis, divisor of the buffer, layout after) of every single step out of ``layout``."""
    split = split_factor(layout, mesh_shape)
    for axis, placement in enumerate(layout):
        size = mesh_shape[axis]
        if size == 1:
            continue
        targets = [Shard(d) for d in range(ndim) if not _is_inner_split(layout, axis, d)]
        origin = sharded_dim(placement)
        if origin is not None:
            if type(placement) is not Shard or _is_inner_split(layout, axis, origin):
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
    """The layouts that a tensor can be in and the single steps between them; the same for all sizes that split alike.

    Attributes:
        layouts: by number.
        numbers: layout -> its number.
        texts: of each layout, which order paths that cost the same.
    """

    def __init__(self, shape: Sequence[int], mesh_shape: tuple[int, ...]) -> None:
        self._shape = tuple(shape)
        self._mesh_shape = mesh_shape
        options = (Replicate(), Partial(), *(Shard(d) for d in range(len(shape))))
        layouts = [
            layout
            for layout in itertools.product(options, repeat=len(mesh_shape))
            if divides(shape, layout, mesh_shape)
        ]
        self.layouts: list[Layout] = layouts
        self.numbers = {layout: number for number, layout in enumerate(layouts)}
        self.texts = [format_layout(layout) for layout in layouts]
        self._edges: dict[Layout, tuple[_Edge, ...]] = {}

    def edges(self, layout: Layout) -> tuple[_Edge, ...]:
        """Return the single steps out of ``layout`` that keep all splits even."""
        if layout not in self._edges:
            self._edges[layout] = tuple(
                _Edge(kind=kind, axis=axis, divisor=divisor, target=self._number(after))
                for kind, axis, divisor, after in _edges_from(layout, len(self._shape), self._mesh_shape)
                if divides(self._shape, after, self._mesh_shape)
            )
        return self._edges[layout]

    def _number(self, layout: Layout) -> int:
        if layout not in self.numbers:
            # Reached from a source with an average or a strided shard on another axis.
            self.numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
            self.texts.append(format_layout(layout))
        return self.numbers[layout]


@functools.lru_cache(maxsize=4096)
def _splits(length: int, mesh_shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Tell for every subset of the axes whether they split a dim of ``length`` evenly: all that a graph asks of it."""
    subsets = itertools.product((False, True), repeat=len(mesh_shape))
    return tuple(
        length % math.prod(size for size, taken in zip(mesh_shape, subset, strict=True) if taken) == 0
        for subset in subsets
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """The end of the cheapest path to a layout: its seconds, and the last step; the source has none."""

    time_s: float
    before: Layout | None
    edge: _Edge | None


class RedistributionPlanner:
    """Cheapest redistributions on one mesh, remembered per shape; the search is Dijkstra's over whole layouts."""

    def __init__(self, mesh_shape: Sequence[int], price_step: PriceStep) -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._price_step = price_step
        self._graphs: dict[tuple[tuple[bool, ...], ...], _LayoutGraph] = {}
        self._reached: dict[tuple[tuple[int, ...], int, Layout], dict[Layout, _Reached]] = {}
        self._paths: dict[tuple[tuple[int, ...], int, Layout, Layout], Redistribution | None] = {}
        self._prices: dict[tuple[StepKind, int, int], float] = {}

    def paths_from(self, shape: Sequence[int], itemsize: int, source: Layout) -> dict[Layout, Redistribution]:
        """Return the cheapest redistribution from ``source`` to every layout that can be reached.

        Args:
            shape: global shape of the tensor.
            itemsize: bytes per element as it travels.
            source: the layout that the tensor is in; it must divide ``shape`` evenly.
        """
        reached = self._reached_from(tuple(shape), itemsize, source)
        return {target: self.path(shape, itemsize, source, target) for target in reached}

    def path(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution:
        """Return the cheapest redistribution from ``source`` to ``target``.

        Raises:
            NoPathError: there is none.
        """
        found = self.find(shape, itemsize, source, target)
        if found is None:
            raise NoPathError(
                f"no redistribution from {format_layout(source)} to {format_layout(target)} "
                f"for shape {tuple(shape)} on mesh {self._mesh_shape}"
            )
        return found

    def find(self, shape: Sequence[int], itemsize: int, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution from ``source`` to ``target``, None where there is none."""
        key = (tuple(shape), itemsize, source, target)
        try:
            return self._paths[key]  # asked for once: layouts take long to hash
        except KeyError:
            found = Redistribution(steps=(), time_s=0.0) if source == target else self._walked_back(*key)
            self._paths[key] = found
        return found

    def _walked_back(
        self, shape: tuple[int, ...], itemsize: int, source: Layout, target: Layout
    ) -> Redistribution | None:
        reached = self._reached_from(shape, itemsize, source)
        end = reached.get(target)
        if end is None:
            return None
        whole = math.prod(shape) * itemsize
        steps: list[RedistributionStep] = []
        layout, last = target, end
        while (edge := last.edge) is not None:
            before = last.before
            assert before is not None
            nbytes = whole // edge.divisor if edge.divisor else 0
            steps.append(RedistributionStep(kind=edge.kind, axis=edge.axis, nbytes=nbytes, before=before, after=layout))
            layout, last = before, reached[before]
        return Redistribution(steps=tuple(reversed(steps)), time_s=end.time_s)

    def _reached_from(self, shape: tuple[int, ...], itemsize: int, source: Layout) -> dict[Layout, _Reached]:
        key = (shape, itemsize, source)
        found = self._reached.get(key)
        if found is None:
            found = self._reached[key] = self._search(*key)
        return found

    def _graph(self, shape: tuple[int, ...]) -> _LayoutGraph:
        key = tuple(_splits(length, self._mesh_shape) for length in shape)
        if key not in self._graphs:
            self._graphs[key] = _LayoutGraph(shape, self._mesh_shape)
        return self._graphs[key]

    def _cost(self, edge: _Edge, whole: int) -> float:
        if edge.kind == "slice":
            return 0.0
        key = (edge.kind, edge.axis, whole // edge.divisor)
        if key not in self._prices:
            self._prices[key] = self._price_step(edge.kind, edge.axis, key[2])
        return self._prices[key]

    def _search(self, shape: tuple[int, ...], itemsize: int, source: Layout) -> dict[Layout, _Reached]:
        graph = self._graph(shape)
        whole = math.prod(shape) * itemsize
        settled: dict[Layout, _Reached] = {}
        # Ties go to fewer steps, then to the text of the path, so that planner and executor always agree.
        start = _Reached(time_s=0.0, before=None, edge=None)
        queue: list[tuple[float, int, tuple[tuple[str, ...], ...], int, Layout, _Reached]] = [
            (0.0, 0, (), 0, source, start)
        ]
        pushed = 0
        while queue:
            time_s, count, text, _, layout, found = heapq.heappop(queue)
            if layout in settled:
                continue
            settled[layout] = found
            for edge in graph.edges(layout):
                after = graph.layouts[edge.target]
                if after in settled:
                    continue
                pushed += 1
                reached = _Reached(time_s=time_s + self._cost(edge, whole), before=layout, edge=edge)
                entry = (reached.time_s, count + 1, (*text, graph.texts[edge.target]), pushed, after, reached)
                heapq.heappush(queue, entry)
        return settled
