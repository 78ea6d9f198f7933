"""The task that plans the stages of a pipeline, with every layout that their boundary tensors can have."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import Layout
from planner.errors import SolverError
from planner.run.mesh_bound import MeshBound
from planner.run.run_results import FormulatedRun, SolvedRun
from planner.search.pipeline.stage_planners import PipelineRun, PlannedPipeline, StagePlanners
from planner.search.pipeline.stage_tasks import RelaxStage
from planner.search.pipeline.step_time import StageKind, least_step_s, pipeline_step_s, stage_cutoff_s
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.strategies.context_parallel_order import zigzag_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPipeline:
    """A `PlannedPipeline` without the structures of its stages: small enough to send between processes."""

    pipeline: PipelineRun
    boundary: Layout
    kinds: tuple[tuple[StageKind, SolvedRun], ...]
    step_time_s: float

    def planned(self, stages: StagePlanners) -> PlannedPipeline:
        """Return the planned pipeline, with the structures of its stages."""
        count = len(self.pipeline.blocks_per_stage)
        return PlannedPipeline(
            pipeline=self.pipeline,
            boundary=self.boundary,
            kinds=tuple((kind, stages.planner(kind, count).candidate(solved)) for kind, solved in self.kinds),
            step_time_s=self.step_time_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """The outcome of solving a pipeline with every layout of its boundary tensors.

    Attributes:
        best: the fastest solution below the cutoff; None if there is none.
        bound_s: lower bound in seconds on the step time, over the layouts of the tensors that stages send. Layouts that
            do not fit, or cannot be below the cutoff, are left out; infinite if all are.
        gave_up: whether a solver gave no answer.
    """

    best: SolvedPipeline | None = None
    bound_s: float = math.inf
    gave_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _RelaxedBoundary:
    """A layout of the boundary tensors, with the relaxation of the most frequent kind of stage under it.

    Attributes:
        zigzag_axis: the axis on which all stages shard sequences in zigzag order, as in `StagePlanners.restriction`.
        bound_s: lower bound in seconds on the ``U`` of the stage (see `step_time`).
        formulated: the program of the stage.
    """

    layout: Layout
    zigzag_axis: int | None
    bound_s: float
    formulated: FormulatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvePipeline:
    """A task that plans the stages of a pipeline.

    Attributes:
        bounds: for each stage, a lower bound in seconds on its ``U`` (see `step_time`).
        mesh_bounds: kind of stage -> lower bounds by choice, for the kinds whose bounds are known.
        cutoff_s: step time in seconds at or above which the pipeline is not wanted.
        mip_gap: relative gap of the step time at which the solver may stop.
        left_s: seconds after which the solver returns its incumbent; None: no limit.
    """

    pipeline: PipelineRun
    bounds: tuple[float, ...]
    mesh_bounds: Mapping[StageKind, MeshBound]
    cutoff_s: float
    mip_gap: float
    left_s: float | None

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> PipelineResult:
        """Return the outcome."""
        stages = context.once(StagePlanners)
        deadline = None if self.left_s is None else time.perf_counter() + self.left_s
        return StageSolver(self, stages, constraints, deadline).solve()


class StageSolver:
    """Solves the stages of one pipeline, under each boundary layout."""

    def __init__(
        self, task: SolvePipeline, stages: StagePlanners, constraints: SearchConstraints, deadline: float | None
    ) -> None:
        self._task, self._pipeline = task, task.pipeline
        self._stages, self._constraints, self._deadline = stages, constraints, deadline

    def solve(self) -> PipelineResult:
        """Return the fastest solution below the cutoff over all layouts of the boundary tensors, and a lower bound.

        Boundary tensors are sent from one stage to the next. Their layouts are tried in the order of lower bounds.
        """
        pipeline, cutoff_s = self._pipeline, self._task.cutoff_s
        best, bound_s, gave_up = None, math.inf, False
        for boundary in sorted(self.relaxed_boundaries(), key=lambda boundary: boundary.bound_s):
            bounds, solved = list(self._task.bounds), None
            try:
                solved = self.solve_stages(boundary, bounds, cutoff_s)
                if solved is None:
                    continue
            except SolverError:  # the solver gave no answer: the bounds so far are still valid
                gave_up = True
            if solved is not None and solved.step_time_s < cutoff_s:
                best, cutoff_s = solved, solved.step_time_s * (1.0 - self._task.mip_gap)
            bound_s = min(bound_s, least_step_s(bounds, pipeline.micro_batches, pipeline.chunks))
        return PipelineResult(best=best, bound_s=bound_s, gave_up=gave_up)

    def relaxed_boundaries(self) -> Iterator[_RelaxedBoundary]:
        """Yield the boundary layouts under which a stage of the most frequent kind fits and is below the cutoff."""
        pipeline, kind = self._pipeline, self._pipeline.kinds[0]
        planner = self._stages.planner(kind, len(pipeline.blocks_per_stage))
        cutoff_s = stage_cutoff_s(self._task.bounds, kind, pipeline.micro_batches, self._task.cutoff_s)
        task = RelaxStage(kind=kind, pipeline=pipeline, mesh_bound=self._task.mesh_bounds.get(kind), cutoff_s=cutoff_s)
        layouts = self._stages.layouts(planner, pipeline.mesh, planner.batch // pipeline.micro_batches)
        axes = zigzag_axes(planner.model.graph, pipeline.mesh.shape)
        for layout, zigzag_axis in itertools.product(layouts, axes):
            bound_s, formulated = task.relax(self._stages, self._constraints, layout, zigzag_axis)
            if bound_s < cutoff_s:
                yield _RelaxedBoundary(layout=layout, zigzag_axis=zigzag_axis, bound_s=bound_s, formulated=formulated)

    def solve_stages(self, boundary: _RelaxedBoundary, bounds: list[float], cutoff_s: float) -> SolvedPipeline | None:
        """Return the plans of all stages; None if one of them does not fit or is too slow.

        Args:
            boundary: the layout of the boundary tensors.
            bounds: for each stage, a lower bound in seconds on its ``U``. Raised in place to the proved bounds.
            cutoff_s: step time in seconds at or above which the pipeline is not wanted.
        """
        pipeline = self._pipeline
        solutions: list[tuple[StageKind, SolvedRun]] = []
        kinds, mip_gap = pipeline.kinds, self._task.mip_gap
        tight = mip_gap / 2 if len(kinds) > 1 else mip_gap
        for kind in kinds:
            kind_cutoff_s = stage_cutoff_s(bounds, kind, pipeline.micro_batches, cutoff_s)
            solved = None
            if solutions:
                # A stage that is not the slowest gets a looser gap: it delays the step once, not in every micro-batch.
                weight = pipeline.micro_batches + (len(kinds[0].indices) - 1) / pipeline.chunks
                loose = tight * weight * pipeline.chunks / (len(kind.indices) * (len(kinds) - 1))
                slowest_s = max(solution.solution.objective_s for _, solution in solutions)
                solved = self._solve_stage(kind, boundary, kind_cutoff_s, [loose, tight], None, slowest_s)
            elif boundary.bound_s < kind_cutoff_s:
                solved = self._solve_stage(kind, boundary, kind_cutoff_s, [tight], boundary.formulated)
            if solved is None:
                return None
            solutions.append((kind, solved))
            for index in kind.indices:
                bounds[index] = max(bounds[index], solved.solution.bound_s)
        estimates = {index: solved.estimate for kind, solved in solutions for index in kind.indices}
        in_order = [estimates[index] for index in sorted(estimates)]
        step_s = pipeline_step_s(in_order, pipeline.micro_batches, pipeline.chunks)
        return SolvedPipeline(pipeline=pipeline, boundary=boundary.layout, kinds=tuple(solutions), step_time_s=step_s)

    def _solve_stage(
        self,
        kind: StageKind,
        boundary: _RelaxedBoundary,
        cutoff_s: float,
        gaps: Sequence[float],
        formulated: FormulatedRun | None = None,
        slowest_s: float = 0.0,
    ) -> SolvedRun | None:
        """Return the plan of a stage; None if no plan that fits is below ``cutoff_s``.

        Args:
            kind: the kind of the stage.
            boundary: the layout of the boundary tensors.
            cutoff_s: ``U`` in seconds at or above which the stage is not wanted.
            gaps: relative gaps to solve to, in order. The next one is solved to only if the stage takes more than
                ``slowest_s`` and its gap is still larger.
            formulated: the stage's program; None: it is formulated here.
            slowest_s: ``U`` in seconds of the slowest stage so far.
        """
        planner = self._stages.planner(kind, len(self._pipeline.blocks_per_stage))
        run = self._stages.run(planner, kind, self._pipeline)
        restriction = self._stages.restriction(
            planner, run, self._constraints.restrict, boundary.layout, boundary.zigzag_axis
        )
        formulated = formulated or planner.formulate(run, restriction, self._task.mesh_bounds.get(kind), cutoff_s)
        solved: SolvedRun | None = None
        for gap in gaps:
            if solved is not None:
                solution = solved.solution
                if solution.objective_s <= max(slowest_s, solution.bound_s * (1.0 + gap)):
                    break
            candidate = planner.solve(
                run,
                restriction,
                memory_bytes=self._constraints.memory_bytes,
                cutoff_s=cutoff_s,
                mip_gap=gap,
                deadline=self._deadline,
                formulated=formulated,
            )
            solved = SolvedRun.from_candidate(candidate)
            if solved is None:
                break
        return solved
