"""Tasks that bound a pipeline's stages: bound a stage in all checkpointing modes, relax a stage in one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.layouts.layout import Layout
from planner.errors import SolverError
from planner.ilp.relaxation import Relaxer, relax
from planner.run.mesh_bound import MeshBound, bound_mesh
from planner.run.run_planner import FormulatedRun
from planner.search.pipeline.stage_planners import PipelineRun, StagePlanners
from planner.search.pipeline.step_time import StageKind
from planner.search.worker_context import SearchConstraints, WorkerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBound:
    """Lower bounds on the seconds of every stage of one role with ``blocks`` or more, as one of equal stages.

    Attributes:
        blocks: of the stage that was relaxed.
        index: of that stage in its pipeline: earlier ones keep activations of more micro-batches.
        mesh_bound: None where the stage has no layout, or its parameters do not fit.
        bounds_s: checkpointing mode, of those that may fit at ``index`` -> lower bound.
        capped_s: lower bound within the memory cap without checkpointing, of the stage at ``index`` or an earlier one;
            no more than the cutoff.
    """

    blocks: int
    index: int
    mesh_bound: MeshBound | None = None
    bounds_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    capped_s: float = 0.0

    def bound_s(self, kind: StageKind, ac: str) -> float:
        """Return the lower bound of stages of ``kind``; infinite where they do not fit."""
        if kind.blocks < self.blocks:
            return 0.0
        if self.mesh_bound is None:
            return math.inf
        if kind.indices[0] > self.index:  # it keeps less: the memory cap says nothing of it
            return self.bounds_s.get(ac, 0.0)
        return max(self.bounds_s.get(ac, math.inf), self.capped_s if ac == "none" else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """Bounds a stage by its relaxation without checkpointing.

    Attributes:
        kind: of the stage.
        pipeline: that it is part of; its checkpointing mode does not matter.
        recompute_s: checkpointing mode, of those that may fit -> lower bound on recomputing a block, in seconds per
            step.
        cutoff_s: seconds from which on the stage is not wanted.
    """

    kind: StageKind
    pipeline: PipelineRun
    recompute_s: Mapping[str, float]
    cutoff_s: float

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> StageBound:
        """Return the bounds."""
        stages, kind = context.once(StagePlanners), self.kind
        planner = stages.planner(kind, len(self.pipeline.blocks_per_stage))
        run = stages.run(planner, kind, dataclasses.replace(self.pipeline, ac="none"))
        restriction = stages.restriction(planner, run, constraints.restrict, None)
        formulation = planner.formulate(run, restriction, peak="none" in self.recompute_s).formulation
        if formulation is None:
            return StageBound(blocks=kind.blocks, index=kind.indices[0])
        with planner.clock.stage("solve_s"):
            least_s = min(self.recompute_s.values(), default=0.0)
            mesh_bound = bound_mesh(run.mesh, formulation, constraints.memory_bytes, kind.blocks * least_s)
            if mesh_bound is None:
                return StageBound(blocks=kind.blocks, index=kind.indices[0])
            bounds_s = {ac: mesh_bound.with_recompute(kind.blocks * s) for ac, s in self.recompute_s.items()}
            is_wanted = bounds_s.get("none", math.inf) < self.cutoff_s < math.inf
            capped_s = mesh_bound.within_cap(self.cutoff_s) if is_wanted else 0.0
        return StageBound(
            blocks=kind.blocks,
            index=kind.indices[0],
            mesh_bound=mesh_bound.without_program(),
            bounds_s=bounds_s,
            capped_s=capped_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxStage:
    """Relaxes a stage within the memory cap.

    Attributes:
        mesh_bound: of such a stage, if known.
        cutoff_s: seconds from which on the stage is not wanted.
    """

    kind: StageKind
    pipeline: PipelineRun
    mesh_bound: MeshBound | None
    cutoff_s: float

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> float:
        """Return a lower bound on the stage's seconds, as one of equal stages; infinite where it does not fit."""
        return self.relax(context.once(StagePlanners), constraints, None)[0]

    def relax(
        self,
        stages: StagePlanners,
        constraints: SearchConstraints,
        boundary: Layout | None,
        zigzag_axis: int | None = None,
    ) -> tuple[float, FormulatedRun]:
        """Return the same, restricted as `StagePlanners.restriction` says, and the stage's program."""
        planner = stages.planner(self.kind, len(self.pipeline.blocks_per_stage))
        run = stages.run(planner, self.kind, self.pipeline)
        restriction = stages.restriction(planner, run, constraints.restrict, boundary, zigzag_axis)
        formulated = planner.formulate(run, restriction, self.mesh_bound, self.cutoff_s)
        if formulated.formulation is None:
            return math.inf if self.mesh_bound is None else self.cutoff_s, formulated
        problem = formulated.formulation.problem
        with planner.clock.stage("solve_s"):
            try:
                # Without bounds the answer has to tell what does not fit from what reaches the cutoff.
                cutoff_s = math.inf if self.mesh_bound is None else self.cutoff_s
                relaxed = Relaxer(problem, constraints.memory_bytes).capped(cutoff_s)
            except SolverError:  # no answer: a bound without the cap holds within it
                relaxed = relax(problem)
        bound_s = math.inf if relaxed is None else relaxed.bound_s
        return bound_s if self.mesh_bound is None else min(bound_s, self.cutoff_s), formulated
