"""The search over the pipelines of a job (`space`): an instance of `branch_and_bound`.

A node is one pipeline: number of stages, mesh of a stage, micro-batches, checkpointing mode, split of the blocks. Its
first bound is its compute, perfectly split, with the idle time of 1F1B, interleaved or not. Expanding a node first
bounds its stages, one after the other (`bound_order`). A stage's bound holds in every pipeline that has such a stage.
So it is computed once, and all these pipelines wait for it. After the last bound, expanding the node solves its stages.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from cost_model import reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.progress import IncumbentFound, RunSolving, StageBounding, StageRelaxing
from planner.search.branch_and_bound import (
    BranchAndBound,
    Expansion,
    Incumbent,
    SearchResult,
    SearchSpec,
    run_searches,
)
from planner.search.pipeline.block_memory import BlockMemory
from planner.search.pipeline.bound_order import (
    UNIFORM_BLOCKS,
    BoundingStep,
    StageKey,
    bounding_steps,
    in_one_chunk,
    shared_cutoff_s,
)
from planner.search.pipeline.single_device_time import SingleDeviceTime
from planner.search.pipeline.solve_pipeline import PipelineResult, SolvedPipeline, SolvePipeline
from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun, PlannedPipeline, StagePlanners
from planner.search.pipeline.stage_tasks import BoundStage, RelaxStage, StageBound
from planner.search.pipeline.step_time import StageKind, least_step_s, stage_cutoff_s

_FIRST_PLAN_GAP = 0.1
"""Relative gap to which the first plan is solved, which only has to prune nodes."""

_WIDE = 8
"""Most ranks of a stage's mesh without its first axis, in the pipelines that are searched first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineNode:
    """A pipeline that is not solved yet.

    Attributes:
        bounds: for each stage, a lower bound in seconds on its ``U`` (see `step_time`).
        steps_done: number of bounding steps that have raised the bounds.
        is_tried: whether the pipeline was solved for a first plan, and may have a faster one.
    """

    pipeline: PipelineRun
    bounds: tuple[float, ...]
    steps_done: int = 0
    is_tried: bool = False

    @property
    def bound_s(self) -> float:
        return least_step_s(self.bounds, self.pipeline.micro_batches, self.pipeline.chunks)

    @property
    def mesh(self) -> MeshSpec:
        return self.pipeline.whole_mesh

    def with_bound(self, kind: StageKind, bound_s: float) -> _PipelineNode:
        """Return the node with the bounds of stages of ``kind`` raised."""
        bounds = (max(b, bound_s) if index in kind.indices else b for index, b in enumerate(self.bounds))
        return dataclasses.replace(self, bounds=tuple(bounds))


class PipelineSearch(BranchAndBound[_PipelineNode]):
    """The search over the pipelines of a job. Its model can be split into stages (`split_graph.obstacle`)."""

    def __init__(
        self, spec: SearchSpec, incumbent: Incumbent, *, only: tuple[int, MeshSpec] | None = None, axes: int = 2
    ) -> None:
        """Prepare to search.

        Args:
            spec: the spec of the search, with the planner of the whole model.
            incumbent: the incumbent, shared with searches that run together with this one.
            only: the one number of stages and the mesh of a stage to search; None: all.
            axes: largest number of axes of a stage's mesh.
        """
        super().__init__(spec, incumbent)
        self._planner = spec.planner
        self.stages = spec.context.once(StagePlanners)
        self._times = SingleDeviceTime.of_model(spec.planner, spec.micro_batch_counts[0], spec.modes)
        self.space = PipelineSpace(
            spec.planner, self._times, self.stages.clusters, only, axes, self.stages.may_have_ends_alone
        )
        self._best: SolvedPipeline | None = None
        self._stage_bounds: dict[StageKey, StageBound | float] = {}
        self._block_memory: dict[bool, BlockMemory] = {}

    def best(self) -> SearchResult[PlannedPipeline]:
        """Return the fastest pipeline below the cutoff."""
        self.start()
        run_searches(self.spec.pool, [self])
        return self.result()

    def start(self) -> None:
        """Look for a first plan among the likely pipelines, then push all other pipelines."""
        likely, other_nodes = self.likely_first(list(self.roots()))
        for node in likely:
            self.push(node)
        self.spec.pool.run(lambda: self.pick() if self._best is None else None, self.done, self.spec.constraints)
        for node in other_nodes:
            self.push(node)
        self.has_all_roots = True

    def result(self) -> SearchResult[PlannedPipeline]:
        """Return the outcome once the search has ended."""
        self.close_open_nodes()
        return SearchResult(
            plan=None if self._best is None else self._best.planned(self.stages),
            bound_s=self.bound_s,
            complete=self.is_complete,
            meshes=tuple(self.mesh_report(mesh) for mesh in self.meshes),
        )

    # --- the roots -----------------------------------------------------------------------------------------------

    def roots(self) -> Iterator[_PipelineNode]:
        """Yield every pipeline with its first bound."""
        for pipeline in self.space.pipelines(self.spec.micro_batch_counts, self.spec.modes):
            yield _PipelineNode(pipeline=pipeline, bounds=tuple(self._times.bounds_s(pipeline)))

    def likely_first(self, nodes: Sequence[_PipelineNode]) -> tuple[list[_PipelineNode], list[_PipelineNode]]:
        """Return (likely pipelines, all other pipelines). One likely pipeline is solved first, to prune other nodes.

        Likely pipelines have the widest inner mesh up to `_WIDE` ranks, checkpoint most, which fits most often, and
        split samples evenly. Meshes that are for interleaved stages only are unlikely: they have the largest programs.
        """
        sizes = [math.prod(node.pipeline.mesh.shape[1:]) if self._is_usual(node) else 0 for node in nodes]
        widest = max((size for size in sizes if size <= _WIDE), default=0)
        likely, other_nodes = list[_PipelineNode](), list[_PipelineNode]()
        for node, size in zip(nodes, sizes, strict=True):
            is_likely = 0 < size == widest and node.pipeline.ac == self.spec.modes[-1]
            (likely if is_likely else other_nodes).append(node)
        return likely, other_nodes

    def _is_usual(self, node: _PipelineNode) -> bool:
        mesh = node.pipeline.mesh
        return self.space.splits_samples(mesh, node.pipeline.micro_batches) and self.space.has_single_chunks(mesh)

    # --- what expands a node -------------------------------------------------------------------------------------

    def expand(self, node: _PipelineNode) -> Expansion[_PipelineNode] | None:
        """Return the task that bounds the next stage of a pipeline or solves the pipeline; None if it needs no task."""
        if not node.steps_done and not self._may_fit(node.pipeline):
            self.record(node.mesh).close(math.inf)
            return None
        step = self._next_step(node)
        if step is None:
            return Expansion(node=node, key=id(node), state_task=functools.partial(self._solve, node))
        if step.key in self._stage_bounds:
            self._push_raised(node, step)
            return None
        if step.in_all_modes and step.is_shared:
            node, in_fewer = self._after_fewer_micro_batches(node, step)
            if node.bound_s >= self.incumbent.cutoff_s:
                self.record(node.mesh).close(node.bound_s)
                return None
            step = in_fewer or step
        return Expansion(node=node, key=step.key, state_task=functools.partial(self._bound, node, step))

    def _next_step(self, node: _PipelineNode) -> BoundingStep | None:
        """Return the next bounding step; None if no step is left."""
        return next(itertools.islice(bounding_steps(self.space, node.pipeline), node.steps_done, None), None)

    def _after_fewer_micro_batches(
        self, node: _PipelineNode, step: BoundingStep
    ) -> tuple[_PipelineNode, BoundingStep | None]:
        """Return the node with bounds from fewer micro-batches, and a step that has to be done before ``step``.

        More micro-batches do the same work in smaller pieces. So a bound of the stage in fewer micro-batches also
        bounds the stage of ``step`` (see `mesh_bound`). If such a bound is not known yet, and the pipeline in fewer
        micro-batches may be wanted itself, the second result is the step that computes it; otherwise it is None.
        """
        pipeline, kind, stages = node.pipeline, step.bounded, len(node.pipeline.blocks_per_stage)
        if self._planner.batch == pipeline.micro_batches:  # a single sample is split in other ways
            return node, None
        # A layout that divides a micro-batch evenly also divides a multiple of it.
        counts = self.spec.micro_batch_counts
        for count in (c for c in counts if c < pipeline.micro_batches and pipeline.micro_batches % c == 0):
            in_fewer = dataclasses.replace(step, pipeline=dataclasses.replace(step.pipeline, micro_batches=count))
            fewer = dataclasses.replace(
                pipeline, micro_batches=count, chunks=pipeline.chunks if count % stages == 0 else 1
            )
            stage_bound = self._stage_bounds.get(in_fewer.key)
            if isinstance(stage_bound, StageBound):
                is_long_enough = kind.blocks >= stage_bound.blocks
                bound_s = stage_bound.bounds_s.get(pipeline.ac, 0.0) if is_long_enough else 0.0
                more_idle = (pipeline.passes / pipeline.micro_batches) / (in_fewer.pipeline.passes / count)
                node = node.with_bound(kind, bound_s * more_idle)
            elif self._may_be_wanted(node, fewer):
                return node, in_fewer
        return node, None

    def _may_be_wanted(self, node: _PipelineNode, fewer: PipelineRun) -> bool:
        """Return whether ``fewer``, the pipeline of ``node`` in fewer micro-batches, may fit below the cutoff."""
        pipeline = node.pipeline
        less_idle = (fewer.passes / fewer.micro_batches) / (pipeline.passes / pipeline.micro_batches)
        bounds = [bound * less_idle for bound in node.bounds]
        return (
            self.space.splits_samples(fewer.mesh, fewer.micro_batches)
            and least_step_s(bounds, fewer.micro_batches, fewer.chunks) < self.incumbent.cutoff_s
            and self._may_fit(fewer)
        )

    def _bound(self, node: _PipelineNode, step: BoundingStep) -> BoundStage | RelaxStage:
        """Return the task of a bounding step."""
        pipeline, mesh = step.pipeline, str(step.pipeline.whole_mesh)
        if not step.in_all_modes:
            stage_bound = self._stage_bound(step)
            self.report(
                lambda state: StageRelaxing(
                    mesh=mesh, micro_batches=pipeline.micro_batches, ac=pipeline.ac, state=state
                )
            )
            return RelaxStage(
                kind=step.kind,
                pipeline=pipeline,
                mesh_bound=None if stage_bound is None else stage_bound.mesh_bound,
                cutoff_s=self._stage_cutoff_s(step, node.bounds),
            )
        self.report(lambda state: StageBounding(mesh=mesh, micro_batches=pipeline.micro_batches, state=state))
        share = pipeline.passes / pipeline.micro_batches / pipeline.mesh.size
        # One task bounds all checkpointing modes. Its bound within the memory cap is for no checkpointing.
        first_mode = dataclasses.replace(step, pipeline=dataclasses.replace(pipeline, ac=self.spec.modes[0]))
        recompute_s = self._times.recompute_s
        may_fit = [ac for ac in recompute_s if self._stage_may_fit(step.kind, dataclasses.replace(pipeline, ac=ac))]
        return BoundStage(
            kind=step.kind,
            pipeline=first_mode.pipeline,
            recompute_s={ac: recompute_s[ac] * share for ac in may_fit},
            cutoff_s=self._stage_cutoff_s(first_mode, self._times.bounds_s(first_mode.pipeline)),
        )

    def _stage_cutoff_s(self, step: BoundingStep, bounds: Sequence[float]) -> float:
        """Return the ``U`` in seconds at or above which a stage is not wanted, given the bounds of all stages."""
        if step.is_shared:
            return shared_cutoff_s(self.space, self._times, step, self.incumbent.cutoff_s)
        return stage_cutoff_s(bounds, step.kind, step.pipeline.micro_batches, self.incumbent.cutoff_s)

    def _stage_bound(self, step: BoundingStep) -> StageBound | None:
        """Return a bound that holds choice by choice for the stage that ``step`` relaxes; None if none is known."""
        kind, pipeline = step.kind, step.pipeline
        bounding = pipeline if pipeline.chunks > 1 else in_one_chunk(self.space, pipeline)
        stage_bound = self._stage_bounds.get(dataclasses.replace(step, in_all_modes=True, pipeline=bounding).key)
        if not isinstance(stage_bound, StageBound) or pipeline.ac not in stage_bound.bounds_s:
            return None
        # Stages with fewer than `UNIFORM_BLOCKS` blocks have other choices, so bounds by choice do not carry over.
        is_uniform = kind.chunks == 1 and UNIFORM_BLOCKS <= stage_bound.blocks <= kind.blocks
        return stage_bound if stage_bound.blocks == kind.blocks or is_uniform else None

    def _may_fit(self, pipeline: PipelineRun) -> bool:
        """Return whether the lower bounds on the memory of all stages are within the cap."""
        return all(self._stage_may_fit(kind, pipeline) for kind in pipeline.kinds)

    def _stage_may_fit(self, kind: StageKind, pipeline: PipelineRun) -> bool:
        batch = self._planner.batch // pipeline.micro_batches
        if (batch == 1) not in self._block_memory:  # for a single sample autograd may save other tensors
            measured_batch = 1 if batch == 1 else self._planner.batch // self.spec.micro_batch_counts[0]
            self._block_memory[batch == 1] = BlockMemory.of_model(
                self.stages, measured_batch, self.spec.modes, self._planner.job
            )
        run = self.stages.run(self._planner, kind, pipeline)
        bytes_per_device = self._block_memory[batch == 1].of_stage(kind.blocks, run, batch) / run.mesh.size
        return bytes_per_device + reserve_bytes(run.cluster.device) <= self.spec.constraints.memory_bytes

    def _solve(self, node: _PipelineNode) -> SolvePipeline:
        """Return the task that solves a pipeline."""
        pipeline = node.pipeline
        self.report(
            lambda state: RunSolving(
                mesh=str(node.mesh), micro_batches=pipeline.micro_batches, ac=pipeline.ac, state=state
            )
        )
        own = (step for step in bounding_steps(self.space, pipeline) if not step.in_all_modes and not step.is_shared)
        stage_bounds = {step.kind: self._stage_bound(step) for step in own}
        needs_exact = node.is_tried or self._best is not None
        return SolvePipeline(
            pipeline=pipeline,
            bounds=node.bounds,
            mesh_bounds={
                k: b.mesh_bound for k, b in stage_bounds.items() if b is not None and b.mesh_bound is not None
            },
            cutoff_s=self.incumbent.cutoff_s,
            mip_gap=self._planner.job.mip_gap if needs_exact else _FIRST_PLAN_GAP,
            left_s=self.spec.left_s,
        )

    # --- what follows from its result ----------------------------------------------------------------------------

    def take_result(
        self, node: _PipelineNode, key: Hashable, task: object, result: StageBound | float | PipelineResult
    ) -> None:
        """Push a pipeline with raised bounds, or record its plan."""
        if isinstance(result, PipelineResult):
            assert isinstance(task, SolvePipeline)
            self._close_pipeline(node, task, result)
            return
        assert isinstance(key, tuple)
        self._stage_bounds[key] = result
        step = self._next_step(node)
        if step is not None and step.key == key:
            self._push_raised(node, step)
        else:  # the node waited for a bound in fewer micro-batches
            self.push(node)

    def _push_raised(self, node: _PipelineNode, step: BoundingStep) -> None:
        """Push a pipeline with its bound raised by a step, or close it if its bound reaches the cutoff."""
        pipeline, stage_bound = node.pipeline, self._stage_bounds[step.key]
        bound_s = stage_bound.bound_s(step.bounded, pipeline.ac) if isinstance(stage_bound, StageBound) else stage_bound
        bound_s *= pipeline.passes / step.pipeline.passes  # a stage in one chunk idles longer
        raised = dataclasses.replace(node.with_bound(step.bounded, bound_s), steps_done=node.steps_done + 1)
        if raised.bound_s < self.incumbent.cutoff_s:
            self.push(raised)
        else:
            self.record(raised.mesh).close(raised.bound_s)

    def _close_pipeline(self, node: _PipelineNode, task: SolvePipeline, result: PipelineResult) -> None:
        """Record the outcome of solving a pipeline, and take its plan if it is below the cutoff."""
        record, best = self.record(node.mesh), result.best
        record.close(min(result.bound_s, task.cutoff_s))
        is_best = False
        if best is not None:
            record.best_s = min(record.best_s, best.step_time_s)
            if best.step_time_s < self.incumbent.cutoff_s:
                self._best = best
                is_best = self.incumbent.improve(best.step_time_s)
        if task.mip_gap > self._planner.job.mip_gap and result.bound_s < self.incumbent.cutoff_s and not self.is_over:
            self.push(dataclasses.replace(node, is_tried=True))
        else:
            self.gave_up |= result.gave_up and self.is_over
            self.close(result.bound_s)
        if is_best:
            self.report(lambda state: IncumbentFound(mesh=str(node.mesh), state=state))
