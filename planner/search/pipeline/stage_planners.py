"""Pipeline stages as models of their own: their graphs, their parts of the cluster, their choices.

A boundary tensor is sent from one stage to the next, and has the same layout on both sides. The first axis shards it by
samples (a single sample by its sequence). The inner axes shard it in any way or not at all. The same holds for tensors
between the chunks of interleaved stages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from cost_model import ClusterSpec
from cost_model.configuration.pipeline_schedules import idle_passes
from cost_model.layouts.layout import Layout, MeshSpec, divides
from planner.pricing.run_spec import PIPELINE_AXIS, Run, StagePlace
from planner.regions.regions import Region, Slot, is_sent
from planner.run.baselines import Restriction
from planner.run.model_analysis import ModelAnalysis
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.pipeline import split_graph
from planner.search.pipeline.interleaving import Role, chunk_sizes
from planner.search.pipeline.step_time import StageKind, kinds_of
from planner.search.worker_context import Restrict
from planner.strategies.context_parallel_order import has_zigzag_attention, sequence_axes
from planner.strategies.enumerate import Strategy

R = Replicate()

MOST_STAGES = 64
"""Largest number of stages of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A way to run a job in stages.

    Attributes:
        mesh: the mesh of one stage.
        blocks_per_stage: number of blocks of each stage.
        ac: checkpointing mode.
        chunks: chunks of the model on each stage; several chunks are interleaved.
        bounds_chunks: whether the run, with one chunk per stage, is priced to bound interleaved stages too.
    """

    mesh: MeshSpec
    blocks_per_stage: tuple[int, ...]
    micro_batches: int
    ac: str
    chunks: int = 1
    bounds_chunks: bool = False

    @property
    def whole_mesh(self) -> MeshSpec:
        """The mesh of all stages together."""
        return MeshSpec(axes=((PIPELINE_AXIS, len(self.blocks_per_stage)), *self.mesh.axes))

    @property
    def kinds(self) -> tuple[StageKind, ...]:
        """The kinds of stages, the most frequent first."""
        return kinds_of(self.blocks_per_stage, self.chunks)

    @property
    def passes(self) -> float:
        """The number of micro-batches of one stage that take as long as a step of equal stages, idle time included."""
        return self.micro_batches + idle_passes(len(self.blocks_per_stage), self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """A pipeline whose stages are planned.

    Attributes:
        boundary: layout of the boundary tensors, on the mesh of a stage.
        kinds: (kind of stage, plan of such a stage).
    """

    pipeline: PipelineRun
    boundary: Layout
    kinds: tuple[tuple[StageKind, Candidate], ...]
    step_time_s: float

    def stages(self) -> list[Candidate]:
        """Return the plan of each stage, in order."""
        by_index = {index: candidate for kind, candidate in self.kinds for index in kind.indices}
        return [by_index[index] for index in range(len(self.pipeline.blocks_per_stage))]


def stage_clusters(cluster: ClusterSpec, most: int) -> Iterator[tuple[int, ClusterSpec]]:
    """Yield (number of stages, cluster of one stage) up to ``most`` stages. A stage has whole nodes, or part of one."""
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


def stage_clusters_of(planner: RunPlanner) -> dict[int, ClusterSpec]:
    """Return number of stages -> cluster of one stage, for all numbers that the model and its cluster allow."""
    return dict(stage_clusters(planner.cluster, min(len(listed_blocks(planner)), MOST_STAGES)))


class StagePlanners:
    """The planners of stages: one for each kind of stage on its part of the cluster, each built once.

    Attributes:
        whole: planner of the whole model on the whole cluster.
        clusters: number of stages -> cluster of one stage.
    """

    def __init__(self, whole: RunPlanner, clusters: Mapping[int, ClusterSpec] | None = None) -> None:
        """Prepare to plan stages; ``clusters`` None: those of `stage_clusters_of`."""
        self.whole = whole
        self.clusters = stage_clusters_of(whole) if clusters is None else clusters
        self._models: dict[tuple[Role, int, int], ModelAnalysis] = {}
        self._planners: dict[tuple[Role, int, int, int], RunPlanner] = {}

    def planner(self, kind: StageKind, stages: int) -> RunPlanner:
        """Return the planner of a kind of stage in a pipeline of ``stages`` stages."""
        key = kind.role, kind.blocks, kind.chunks, stages
        if key not in self._planners:
            whole = self.whole
            share_with = next((p for (_, _, _, n), p in self._planners.items() if n == stages), whole)
            self._planners[key] = RunPlanner(
                self.model(kind), whole.job, self.clusters[stages], whole.batch, whole.clock, share_with
            )
        return self._planners[key]

    @functools.cached_property
    def may_have_ends_alone(self) -> bool:
        """Whether a chunk may have no block, only the ops before or after all blocks."""
        model = self.whole.model
        return split_graph.obstacle(model.graph, model.blocks, ends_alone=True) is None

    def model(self, kind: StageKind) -> ModelAnalysis:
        """Return the model of a kind of stage."""
        key = kind.role, kind.blocks, kind.chunks
        if key not in self._models:
            model = self.whole.model
            counts, which = stage_counts(kind, len(listed_blocks(self.whole)))
            graph = split_graph.split(model.graph, model.blocks, counts, *which)
            self._models[key] = model.with_graph(graph, frozenset(model.blocks.lists))
        return self._models[key]

    def run(self, planner: RunPlanner, kind: StageKind, pipeline: PipelineRun) -> Run:
        """Return the run of the first stage of a kind."""
        place = StagePlace(
            index=kind.indices[0],
            stages=len(pipeline.blocks_per_stage),
            cluster=self.whole.cluster,
            chunks=pipeline.chunks,
            bounds_chunks=pipeline.bounds_chunks,
            end_alone=0 in chunk_sizes(kind.role, kind.blocks, kind.chunks),
        )
        run = planner.run_of(pipeline.mesh, pipeline.micro_batches, pipeline.ac)
        return dataclasses.replace(run, place=place)

    @staticmethod
    def layouts(planner: RunPlanner, mesh: MeshSpec, batch: int) -> list[Layout]:
        """Return the layouts that the boundary tensors of a stage can have, at a micro-batch of ``batch`` samples."""
        graph = planner.model.graph_at(batch)
        shapes = [graph.values[output.value].shape for output in graph.outputs if output.is_sent]
        shapes += [
            graph.values[model_input.value].shape for model_input in graph.inputs if is_boundary_path(model_input.path)
        ]
        outer = R if mesh.shape[0] == 1 else Shard(1) if batch == 1 else Shard(0)
        inner = itertools.product(*((R, Shard(1), Shard(0)) if size > 1 else (R,) for size in mesh.shape[1:]))
        layouts: list[Layout] = [(outer, *rest) for rest in inner]
        return [layout for layout in layouts if all(divides(shape, layout, mesh.shape) for shape in shapes)]

    def restriction(
        self,
        planner: RunPlanner,
        run: Run,
        restrict: Restrict,
        boundary: Layout | None,
        zigzag_axis: int | None = None,
    ) -> Restriction:
        """Return the choices that a stage has.

        Args:
            planner: the planner of the stage.
            run: the run of the stage.
            restrict: mesh -> the choices that pins allow on it.
            boundary: layout of the boundary tensors, which the model's inputs follow; None: any of `layouts`.
            zigzag_axis: index of the mesh axis on which attention in zigzag order has its sequences sharded in all
                stages. `NOT_SPLIT` of `context_parallel_order`: sequences are whole. None: any axis.
        """
        layouts = [boundary] if boundary is not None else self.layouts(planner, run.mesh, planner.micro_batch(run))
        pinned = restrict(run.mesh)

        def accepts(region: Region, strategy: Strategy) -> bool:
            if pinned is not None and not pinned.accepts(region, strategy):
                return False
            is_ordered = zigzag_axis is not None and has_zigzag_attention(region)
            if is_ordered and sequence_axes(region, strategy, run.mesh.shape) != {zigzag_axis}:
                return False
            for slot, forward, gradient in zip(region.slots, strategy.forward, strategy.gradient, strict=True):
                if is_sent(region, slot) or (is_root_input(slot) and is_boundary_path(_path(slot))):
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
    """Return the number of blocks of each part of the model, and the parts that are the chunks of a stage of this kind.

    The part between two chunks has one block, because a chunk's graph does not depend on its position. All blocks
    before the first chunk are one part, and all blocks after the last chunk are one part.
    """
    between = [part for size in chunk_sizes(kind.role, kind.blocks, kind.chunks) for part in (size, 1)][:-1]
    left = blocks - sum(between)
    which = range(0, len(between), 2)
    if kind.role == "first":
        return (*between, left), tuple(which)
    before = (left,) if kind.role == "last" else (1,)
    after = () if kind.role == "last" else (left - 1,)
    return (*before, *between, *after), tuple(1 + part for part in which)


def is_boundary_path(path: str) -> bool:
    """Return whether an argument or a result of the root module, given by its path, is a boundary tensor."""
    return path.startswith(f"{split_graph.PATH}.")


def is_root_input(slot: Slot) -> bool:
    """Return whether a slot is an argument that a stage is called with."""
    return slot.origin == "entry" and slot.source is None and slot.value.kind == "input"


def _path(slot: Slot) -> str:
    assert slot.boundary is not None
    return slot.boundary.path


def _by_samples(slot: Slot, layouts: Collection[Layout], mesh: MeshSpec) -> list[Layout]:
    """Return the layouts of a model input that match ``layouts``: sharded by samples on the same axes.

    Replicated if none of them divides the input evenly.
    """
    matching: list[Layout] = [tuple(p if p == Shard(0) else R for p in layout) for layout in layouts]
    fitting = [layout for layout in matching if divides(slot.value.shape, layout, mesh.shape)]
    return fitting or [tuple(R for _ in mesh.shape)]


def listed_blocks(planner: RunPlanner) -> tuple[str, ...]:
    """Return the FQNs of the blocks in the one list of a model that can be split into stages, in order."""
    (blocks,) = planner.model.blocks.lists.values()
    return blocks
