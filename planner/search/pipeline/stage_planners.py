"""A pipeline's stages as models of their own: their graphs, their share of the cluster, what they may choose.

What stages hand to each other has one layout on both sides, split on the first axis by samples (of a single one by its
sequence) and on those within it by anything or nothing. So has what the chunks of interleaved stages hand on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate, Shard

from cost_model import ClusterSpec
from cost_model.configuration.pipeline_schedules import idle_passes
from cost_model.layouts.layout import Layout, MeshSpec, divides
from planner.pricing.run_spec import PIPELINE_AXIS, Run, StagePlace
from planner.regions.regions import Region, Slot, is_sent
from planner.run.baselines import Restriction
from planner.run.model_analysis import ModelAnalysis
from planner.run.run_planner import Candidate, RunPlanner
from planner.search.pipeline import split_graph as cutting
from planner.search.pipeline.interleaving import Role, chunk_sizes
from planner.search.pipeline.step_time import StageKind, kinds_of
from planner.strategies.context_parallel_order import has_zigzag_attention, sequence_axes
from planner.strategies.enumerate import Strategy

R = Replicate()

MOST_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A way to run a job in stages.

    Attributes:
        mesh: of one stage.
        counts: blocks of each stage.
        chunks: of the model that each stage has; more than one are interleaved.
        bounds_chunks: whether it is looked at, in one chunk, for what it says of all stages, interleaved ones too.
    """

    mesh: MeshSpec
    counts: tuple[int, ...]
    micro_batches: int
    ac: str
    chunks: int = 1
    bounds_chunks: bool = False

    @property
    def whole_mesh(self) -> MeshSpec:
        """The mesh of all stages."""
        return MeshSpec(axes=((PIPELINE_AXIS, len(self.counts)), *self.mesh.axes))

    @property
    def kinds(self) -> tuple[StageKind, ...]:
        """The kinds of its stages, the most frequent first."""
        return kinds_of(self.counts, self.chunks)

    @property
    def passes(self) -> float:
        """How many micro-batches a step of equal stages takes as long as."""
        return self.micro_batches + idle_passes(len(self.counts), self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """A pipeline whose stages are planned.

    Attributes:
        layout: in which stages hand tensors on, on the mesh of a stage.
        kinds: each kind of stage with its plan.
    """

    pipeline: PipelineRun
    layout: Layout
    kinds: tuple[tuple[StageKind, Candidate], ...]
    step_time_s: float

    def stages(self) -> list[Candidate]:
        """Return the plan of each stage, in order."""
        by_index = {index: candidate for kind, candidate in self.kinds for index in kind.indices}
        return [by_index[index] for index in range(len(self.pipeline.counts))]


def stage_clusters(cluster: ClusterSpec, most: int) -> Iterator[tuple[int, ClusterSpec]]:
    """Yield each number of stages up to ``most`` with the cluster that one of them has: whole nodes, or part of one."""
    nodes, per_node = cluster.nodes, cluster.devices_per_node
    for stages in range(2, most + 1):
        if nodes % stages == 0:
            yield stages, dataclasses.replace(cluster, nodes=nodes // stages)
        elif stages % nodes == 0 and per_node % (stages // nodes) == 0:
            parts = stages // nodes
            cards = max(cluster.cards_per_node // parts, 1)
            yield (
                stages,
                dataclasses.replace(cluster, nodes=1, devices_per_node=per_node // parts, cards_per_node=cards),
            )


def stage_clusters_of(search: RunPlanner) -> dict[int, ClusterSpec]:
    """Return the numbers of stages that a model and its cluster can be cut into, with the cluster of one of them."""
    return dict(stage_clusters(search.cluster, min(len(listed_blocks(search)), MOST_STAGES)))


@dataclass(slots=True)
class StagePlanners:
    """What plans each kind of stage on its share of the cluster; every answer is remembered.

    Attributes:
        whole: the search of the whole model on the whole cluster.
        restrict: what pins leave to choose on a stage's mesh.
        clusters: number of stages -> what one of them has.
    """

    whole: RunPlanner
    restrict: Callable[[MeshSpec], Restriction | None]
    clusters: dict[int, ClusterSpec]
    _models: dict[tuple[Role, int, int], ModelAnalysis] = field(default_factory=dict)
    _searches: dict[tuple[Role, int, int, int], RunPlanner] = field(default_factory=dict)
    _ends_alone: bool | None = None

    def of(self, kind: StageKind, stages: int) -> RunPlanner:
        """Return what plans a kind of stage on its share of the cluster."""
        key = kind.role, kind.blocks, kind.chunks, stages
        if key not in self._searches:
            cluster, whole = self.clusters[stages], self.whole
            beside = next((s for (_, _, _, n), s in self._searches.items() if n == stages), whole)
            model = self.model(kind)
            found = RunPlanner(model, whole.job, cluster, whole.batch, whole.clock, beside)
            found.memory_bytes = whole.memory_bytes
            self._searches[key] = found
        return self._searches[key]

    def may_have_ends_alone(self) -> bool:
        """Tell whether a chunk may be what runs before all blocks, or after, alone."""
        if self._ends_alone is None:
            traced = self.whole.model
            self._ends_alone = cutting.obstacle(traced.graph, traced.blocks, ends_alone=True) is None
        return self._ends_alone

    def under(self, memory_bytes: int, restrict: Callable[[MeshSpec], Restriction | None]) -> None:
        """Plan under another cap on memory, and with other choices left."""
        self.restrict = restrict
        for search in self._searches.values():
            search.memory_bytes = memory_bytes

    def model(self, kind: StageKind) -> ModelAnalysis:
        """Return the graph of a kind of stage, as a model of its own."""
        key = kind.role, kind.blocks, kind.chunks
        if key not in self._models:
            traced, total = self.whole.model, len(listed_blocks(self.whole))
            counts, which = stage_counts(kind, total)
            graph = cutting.cut(traced.graph, traced.blocks, counts, *which)
            self._models[key] = ModelAnalysis(
                graph=graph,
                traced_batch=traced.traced_batch,
                any_batch=traced.any_batch,
                flash_attention=traced.flash_attention,
                fold=traced.fold,
                lists=frozenset(traced.blocks.lists),
                compiles=traced.compiles,
                joins=traced.joins,
                reordering=traced.reordering,
            )
        return self._models[key]

    def run(self, search: RunPlanner, kind: StageKind, pipeline: PipelineRun) -> Run:
        """Return the run of the first stage of a kind."""
        place = StagePlace(
            index=kind.indices[0],
            stages=len(pipeline.counts),
            cluster=self.whole.cluster,
            chunks=pipeline.chunks,
            bounds_chunks=pipeline.bounds_chunks,
            end_alone=0 in chunk_sizes(kind.role, kind.blocks, kind.chunks),
        )
        run = search.run_of(pipeline.mesh, pipeline.micro_batches, pipeline.ac)
        return dataclasses.replace(run, place=place)

    @staticmethod
    def layouts(search: RunPlanner, mesh: MeshSpec, batch: int) -> list[Layout]:
        """Return the layouts in which a stage can be handed a micro-batch, and hand it on."""
        graph = search.model.graph_at(batch)
        shapes = [graph.values[output.value].shape for output in graph.outputs if output.is_sent]
        shapes += [graph.values[given.value].shape for given in graph.inputs if is_handed_over(given.path)]
        outer = R if mesh.shape[0] == 1 else Shard(1) if batch == 1 else Shard(0)
        inner = itertools.product(*((R, Shard(1), Shard(0)) if size > 1 else (R,) for size in mesh.shape[1:]))
        found: list[Layout] = [(outer, *rest) for rest in inner]
        return [layout for layout in found if all(divides(shape, layout, mesh.shape) for shape in shapes)]

    def restriction(
        self, search: RunPlanner, run: Run, layout: Layout | None, even_axis: int | None = None
    ) -> Restriction:
        """Return what a stage may choose: tensors handed over in ``layout``, or in any; its inputs split alike.

        Args:
            even_axis: the one on which attention's sequences, in an even order, are split in all stages, or
                `even_attention.NOT_SPLIT`; None: any.
        """
        layouts = [layout] if layout is not None else self.layouts(search, run.mesh, search.micro_batch(run))
        pinned = self.restrict(run.mesh)

        def accepts(region: Region, strategy: Strategy) -> bool:
            if pinned is not None and not pinned.accepts(region, strategy):
                return False
            is_held = even_axis is not None and has_zigzag_attention(region)
            if is_held and sequence_axes(region, strategy, run.mesh.shape) != {even_axis}:
                return False
            for slot, forward, gradient in zip(region.slots, strategy.forward, strategy.gradient, strict=True):
                if is_sent(region, slot) or (is_root_input(slot) and is_handed_over(_path(slot))):
                    if forward not in layouts or gradient not in (None, forward):
                        return False
                elif is_root_input(slot) and forward not in _by_samples(slot, layouts, run.mesh):
                    return False
            return True

        return Restriction(
            accepts=accepts,
            accepts_stored=(lambda *_: True) if pinned is None else pinned.accepts_stored,
        )


def stage_counts(kind: StageKind, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return blocks of parts of the model, and which of them are the chunks of a stage of this kind.

    One block lies between two chunks, as if other stages had no more: a chunk is the same wherever it lies. What else
    comes before or after is one part.
    """
    between = [part for size in chunk_sizes(kind.role, kind.blocks, kind.chunks) for part in (size, 1)][:-1]
    left = blocks - sum(between)
    which = range(0, len(between), 2)
    if kind.role == "first":
        return (*between, left), tuple(which)
    before = (left,) if kind.role == "last" else (1,)
    after = () if kind.role == "last" else (left - 1,)
    return (*before, *between, *after), tuple(1 + part for part in which)


def is_handed_over(path: str) -> bool:
    """Tell whether an argument or a result of the root is what one stage hands to another."""
    return path.startswith(f"{cutting.PATH}.")


def is_root_input(slot: Slot) -> bool:
    """Tell whether a slot shows what a stage is called with."""
    return slot.origin == "entry" and slot.source is None and slot.value.kind == "input"


def _path(slot: Slot) -> str:
    assert slot.boundary is not None
    return slot.boundary.path


def _by_samples(slot: Slot, layouts: Collection[Layout], mesh: MeshSpec) -> list[Layout]:
    """Return the layouts of an input that go with those of what is handed over: split by samples on the same axes."""
    found: list[Layout] = [tuple(p if p == Shard(0) else R for p in layout) for layout in layouts]
    fitting = [layout for layout in found if divides(slot.value.shape, layout, mesh.shape)]
    return fitting or [tuple(R for _ in mesh.shape)]


def listed_blocks(search: RunPlanner) -> tuple[str, ...]:
    """Return the blocks of a model that can be cut, in order."""
    (listed,) = search.model.blocks.lists.values()
    return listed
