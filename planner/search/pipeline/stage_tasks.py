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
from planner.run.run_results import FormulatedRun
from planner.search.pipeline.stage_planners import PipelineRun, StagePlanners
from planner.search.pipeline.step_time import StageKind
from planner.search.worker_context import SearchConstraints, WorkerContext


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBound:
    """Lower bounds in seconds on the ``U`` (see `step_time`) of every stage of one role with ``blocks`` blocks or more.

    Attributes:
        blocks: number of blocks of the stage that was relaxed.
        index: position of this stage in its pipeline. Earlier stages hold activations of more micro-batches.
        mesh_bound: the bounds by choice; None if the stage has no layout, or its parameters do not fit.
        bounds_s: checkpointing mode -> lower bound. Modes that cannot fit at ``index`` are left out.
        capped_s: lower bound under the memory cap, without checkpointing, for stages at ``index`` or earlier. It is the
            cutoff at most.
    """

    blocks: int
    index: int
    mesh_bound: MeshBound | None = None
    bounds_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    capped_s: float = 0.0

    def bound_s(self, kind: StageKind, ac: str) -> float:
        """Return the lower bound of stages of ``kind``: 0 if nothing is known of them, infinite if they do not fit."""
        if kind.blocks < self.blocks:
            return 0.0
        if self.mesh_bound is None:
            return math.inf
        if kind.indices[0] > self.index:  # it holds fewer activations: the bounds under the cap do not apply
            return self.bounds_s.get(ac, 0.0)
        return max(self.bounds_s.get(ac, math.inf), self.capped_s if ac == "none" else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """A task that bounds a stage by its relaxation without checkpointing.

    Attributes:
        kind: the kind of the stage.
        pipeline: the pipeline of the stage; its checkpointing mode is not read.
        recompute_s: checkpointing mode -> lower bound on the seconds of recomputing one block in a step. Modes that
            cannot fit are left out.
        cutoff_s: ``U`` in seconds (see `step_time`) at or above which the stage is not wanted.
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
    """A task that relaxes a stage within the memory cap.

    Attributes:
        mesh_bound: the bounds by choice of such a stage; None: not known.
        cutoff_s: ``U`` in seconds (see `step_time`) at or above which the stage is not wanted.
    """

    kind: StageKind
    pipeline: PipelineRun
    mesh_bound: MeshBound | None
    cutoff_s: float

    def __call__(self, context: WorkerContext, constraints: SearchConstraints) -> float:
        """Return a lower bound in seconds on the stage's ``U`` (`step_time`); infinite if the stage does not fit."""
        return self.relax(context.once(StagePlanners), constraints, None)[0]

    def relax(
        self,
        stages: StagePlanners,
        constraints: SearchConstraints,
        boundary: Layout | None,
        zigzag_axis: int | None = None,
    ) -> tuple[float, FormulatedRun]:
        """Return the bound of the stage under a restriction, and the stage's program.

        ``boundary`` and ``zigzag_axis`` are arguments of `StagePlanners.restriction`.
        """
        planner = stages.planner(self.kind, len(self.pipeline.blocks_per_stage))
        run = stages.run(planner, self.kind, self.pipeline)
        restriction = stages.restriction(planner, run, constraints.restrict, boundary, zigzag_axis)
        formulated = planner.formulate(run, restriction, self.mesh_bound, self.cutoff_s)
        if formulated.formulation is None:
            return math.inf if self.mesh_bound is None else self.cutoff_s, formulated
        problem = formulated.formulation.problem
        with planner.clock.stage("solve_s"):
            try:
                # Without bounds by choice, an infinite result means that the stage does not fit: so there is no cutoff.
                cutoff_s = math.inf if self.mesh_bound is None else self.cutoff_s
                relaxed = Relaxer(problem, constraints.memory_bytes).capped(cutoff_s)
            except SolverError:  # no answer; the bound without the cap holds with the cap too
                relaxed = relax(problem)
        bound_s = math.inf if relaxed is None else relaxed.bound_s
        return bound_s if self.mesh_bound is None else min(bound_s, self.cutoff_s), formulated
