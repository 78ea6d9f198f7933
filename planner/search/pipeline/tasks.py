"""The tasks of the walk over pipelines: a stage is bounded, a run of it relaxed, a pipeline solved."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import Layout, MeshSpec
from planner.errors import SolverError
from planner.ilp.relaxation import Relaxer, relax
from planner.plan.job import Job
from planner.pricing.run_spec import Run
from planner.regions.regions import block_of
from planner.run.compute_bound import least_recompute_s, op_seconds
from planner.run.memory_bound import least_alive_bytes, least_held_bytes, least_state_bytes, least_sums_bytes
from planner.run.mesh_bound import MeshBound, bound_mesh
from planner.run.run_planner import FormulatedRun, RunPlanner, SolvedRun
from planner.search.pipeline.interleaving import Role
from planner.search.pipeline.stage_planners import PipelineRun, PlannedPipeline, StagePlanners, listed_blocks
from planner.search.pipeline.step_time import StageKind, least_step_s, pipeline_step_s, stage_limit_s
from planner.search.worker_context import WorkerContext
from planner.strategies.context_parallel_order import zigzag_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceTime:
    """Seconds of the whole batch on one device: of a block, of what comes before and after all blocks, and of running
    a block again, by mode of checkpointing."""

    block_s: float
    first_s: float
    last_s: float
    again_s: Mapping[str, float]

    @classmethod
    def of_model(cls, search: RunPlanner, fewest: int, modes: Sequence[str]) -> SingleDeviceTime:
        """Return the work of the largest micro-batch, one of ``fewest``, unsplit: smaller ones fill a device no better.

        Args:
            modes: of checkpointing.
        """
        one, listed = MeshSpec(axes=(("dp", 1),)), set(listed_blocks(search))
        run = search.run_of(one, fewest, "none")
        batch = search.micro_batch(run)
        graph = search.model.graph_at(batch)
        blocks_s = first_s = last_s = 0.0
        seconds = op_seconds(search.model, search.op_times, run, batch)
        for op in graph.ops:
            if block_of(graph.calls[op.call].fqn) in listed:
                blocks_s += seconds.get(op.name, 0.0)
            elif blocks_s:
                last_s += seconds.get(op.name, 0.0)
            else:
                first_s += seconds.get(op.name, 0.0)
        again_s = {
            ac: least_recompute_s(search.model, search.op_times, search.run_of(one, fewest, ac), batch) / len(listed)
            for ac in modes
        }
        return cls(
            block_s=blocks_s * fewest / len(listed),
            first_s=first_s * fewest,
            last_s=last_s * fewest,
            again_s=again_s,
        )

    def of(self, kind: StageKind, ac: str) -> float:
        """Return the seconds of a stage."""
        around = {"first": self.first_s, "last": self.last_s, "middle": 0.0}[kind.role]
        return around + kind.blocks * (self.block_s + self.again_s[ac])

    def bounds(self, pipeline: PipelineRun) -> list[float]:
        """Return what each stage computes at least, as one of equals."""
        share = pipeline.passes / pipeline.micro_batches / pipeline.mesh.size
        bounds = [0.0] * len(pipeline.counts)
        for kind in pipeline.kinds:
            for index in kind.indices:
                bounds[index] = self.of(kind, pipeline.ac) * share
        return bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Bytes of one block that no stage goes below, of all its devices together, by mode of checkpointing.

    Attributes:
        batch: samples of the micro-batch that is counted.
        state_bytes: parameters and the optimizer's states; ``sums_bytes`` are gradients that add up over micro-batches.
        held_bytes: what a forward leaves for its backward; ``alive_bytes`` is all there is of it during one.
    """

    batch: int
    state_bytes: float
    sums_bytes: float
    held_bytes: Mapping[str, float]
    alive_bytes: Mapping[str, float]

    @classmethod
    def of(cls, stages: StagePlanners, batch: int, modes: Sequence[str], job: Job) -> BlockMemory:
        """Return what a block of a model takes, counted in a stage that has one."""
        role: Role = "middle" if len(listed_blocks(stages.whole)) > 2 else "first"
        kind = StageKind(role=role, blocks=1, indices=(0,))
        traced = stages.model(kind)
        listed = set(listed_blocks(stages.whole))
        held, alive, state_bytes, sums_bytes = {}, {}, 0.0, 0.0
        for ac in modes:
            structure = traced.structure(batch, traced.grouping(ac))
            held[ac], alive[ac] = least_held_bytes(structure, listed), least_alive_bytes(structure)
            state_bytes, sums_bytes = least_state_bytes(structure, job), least_sums_bytes(structure, job)
        return cls(batch=batch, state_bytes=state_bytes, sums_bytes=sums_bytes, held_bytes=held, alive_bytes=alive)

    def of_stage(self, blocks: int, run: Run, batch: int) -> float:
        """Return the bytes of a stage with so many ``blocks`` in micro-batches of ``batch`` samples, of all devices.

        A tensor grows with the batch or not at all, so that a part of the batch has that part of the bytes at least.
        """
        held, alive = self.held_bytes[run.ac], self.alive_bytes[run.ac]
        activations = run.in_flight * blocks * held + max(alive - held, 0.0)
        resting = self.state_bytes + (self.sums_bytes if run.micro_batches > 1 else 0.0)
        return blocks * resting + (activations * batch / self.batch if run.job.training else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBound:
    """What no stage of its role with ``blocks`` or more can beat, as one of equals.

    Attributes:
        index: of the stage, of those in the pipeline: earlier ones keep more.
        floor: None where the stage has no layout, or its parameters do not fit.
        bounds_s: mode of checkpointing -> seconds, of those that may fit in the place of ``index``.
        capped_s: seconds within the cap without checkpointing, as far as they are wanted, of it or an earlier stage.
    """

    blocks: int
    index: int
    floor: MeshBound | None = None
    bounds_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    capped_s: float = 0.0

    def bound_s(self, kind: StageKind, ac: str) -> float:
        """Return what no stage of ``kind`` can beat."""
        if kind.blocks < self.blocks:
            return 0.0
        if self.floor is None:
            return math.inf
        if kind.indices[0] > self.index:  # it keeps less
            return self.bounds_s.get(ac, 0.0)
        return max(self.bounds_s.get(ac, math.inf), self.capped_s if ac == "none" else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStage:
    """Find the floor of a stage at a number of micro-batches.

    Attributes:
        kind: of the stage.
        pipeline: that it is one of; its mode of checkpointing does not matter.
        again_s: mode of checkpointing, of those that may fit -> what running a block again takes at least, in seconds
            per step.
        limit_s: seconds from which on it is not wanted.
    """

    kind: StageKind
    pipeline: PipelineRun
    again_s: Mapping[str, float]
    limit_s: float

    def __call__(self, bench: WorkerContext) -> StageBound:
        """Return what bounds it."""
        stages, kind = bench.stages, self.kind
        search = stages.of(kind, len(self.pipeline.counts))
        run = stages.run(search, kind, dataclasses.replace(self.pipeline, ac="none"))
        formulation = search.formulate(run, stages.restriction(search, run, None), peak="none" in self.again_s)[2]
        if formulation is None:
            return StageBound(blocks=kind.blocks, index=kind.indices[0])
        with search.clock.stage("solve_s"):
            least_s = min(self.again_s.values(), default=0.0)
            floor = bound_mesh(run.mesh, formulation, search.memory_bytes, kind.blocks * least_s)
            if floor is None:
                return StageBound(blocks=kind.blocks, index=kind.indices[0])
            bounds_s = {ac: floor.with_work(kind.blocks * again_s) for ac, again_s in self.again_s.items()}
            is_wanted = bounds_s.get("none", math.inf) < self.limit_s < math.inf
            capped_s = floor.within_cap(self.limit_s) if is_wanted else 0.0
        return StageBound(
            blocks=kind.blocks, index=kind.indices[0], floor=floor.light(), bounds_s=bounds_s, capped_s=capped_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxStage:
    """Relax a stage within the cap on memory.

    Attributes:
        floor: of such a stage, where it is known.
        limit_s: seconds from which on it is not wanted.
    """

    kind: StageKind
    pipeline: PipelineRun
    floor: MeshBound | None
    limit_s: float

    def __call__(self, bench: WorkerContext) -> float:
        """Return what the stage cannot beat, as one of equals; infinite where it does not fit."""
        return self.within(bench.stages, None)[0]

    def within(
        self, stages: StagePlanners, layout: Layout | None, even_axis: int | None = None
    ) -> tuple[float, FormulatedRun]:
        """Return the same, restricted as `StagePlanners.restriction` says, and the stage's problem."""
        kind = self.kind
        search = stages.of(kind, len(self.pipeline.counts))
        run = stages.run(search, kind, self.pipeline)
        at_most_s = None if math.isinf(self.limit_s) else self.limit_s
        formulated = search.formulate(run, stages.restriction(search, run, layout, even_axis), self.floor, at_most_s)
        formulation = formulated[2]
        if formulation is None:
            return math.inf if self.floor is None else self.limit_s, formulated
        with search.clock.stage("solve_s"):
            try:
                # Without a floor the answer is to tell what does not fit from what is not wanted.
                wanted_s = math.inf if self.floor is None else self.limit_s
                relaxed = Relaxer(formulation.problem, search.memory_bytes).capped(wanted_s)
            except SolverError:  # ended without an answer
                relaxed = relax(formulation.problem)
        least_s = math.inf if relaxed is None else relaxed.bound_s
        return least_s if self.floor is None else min(least_s, self.limit_s), formulated


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPipeline:
    """A `PlannedPipeline` without the structures of its stages, and what none in the same layout can beat."""

    pipeline: PipelineRun
    layout: Layout
    kinds: tuple[tuple[StageKind, SolvedRun], ...]
    step_time_s: float

    def whole(self, stages: StagePlanners) -> PlannedPipeline:
        """Return it with them."""
        count = len(self.pipeline.counts)
        kinds = tuple((kind, stages.of(kind, count).candidate(priced)) for kind, priced in self.kinds)
        return PlannedPipeline(
            pipeline=self.pipeline,
            layout=self.layout,
            kinds=kinds,
            step_time_s=self.step_time_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """What came of solving a pipeline in every layout that its stages can hand tensors on in.

    Attributes:
        best: the fastest that is wanted.
        bound_s: no pipeline that was found, or whose solving broke off, is faster; infinite where there was none.
        broke_off: whether any did.
    """

    best: SolvedPipeline | None = None
    bound_s: float = math.inf
    broke_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayoutLook:
    """A layout that stages may hand tensors on in, and the most frequent kind of stage with it.

    Attributes:
        even_axis: on which all stages have sequences in an even order, as in `StagePlanners.restriction`.
        bound_s: what such a stage cannot beat, as one of equals.
        formulated: its problem.
    """

    layout: Layout
    even_axis: int | None
    bound_s: float
    formulated: FormulatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvePipeline:
    """Plan the stages of a pipeline.

    Attributes:
        bounds: what each stage cannot beat, as one of equals.
        floors: kind of stage -> its floor, of those that have one.
        at_most_s: a step that takes as long is not wanted.
        mip_gap: relative gap of the step's time at which the solver may stop.
        left_s: after so many seconds the best so far is the answer; None: it takes its time.
    """

    pipeline: PipelineRun
    bounds: tuple[float, ...]
    floors: Mapping[StageKind, MeshBound]
    at_most_s: float
    mip_gap: float
    left_s: float | None

    def __call__(self, bench: WorkerContext) -> PipelineResult:
        """Return what came of it."""
        pipeline, stages = self.pipeline, bench.stages
        deadline = None if self.left_s is None else time.perf_counter() + self.left_s
        found, at_most_s = PipelineResult(), self.at_most_s
        for look in sorted(self._looks(stages), key=lambda look: look.bound_s):
            bounds, broke_off, planned = list(self.bounds), False, None
            try:
                planned = self._planned(stages, look, bounds, at_most_s, deadline)
            except SolverError:
                # It broke off, or time was up: what it could reach is left in the gap.
                broke_off = True
            if planned is None and not broke_off:
                continue
            best = found.best
            if planned is not None and planned.step_time_s < at_most_s:
                best, at_most_s = planned, planned.step_time_s * (1.0 - self.mip_gap)
            bound_s = min(found.bound_s, least_step_s(bounds, pipeline.micro_batches, pipeline.chunks))
            found = PipelineResult(best=best, bound_s=bound_s, broke_off=found.broke_off or broke_off)
        return found

    def _looks(self, stages: StagePlanners) -> Iterator[_LayoutLook]:
        """Yield the layouts in which a stage of the most frequent kind is wanted, and fits."""
        pipeline = self.pipeline
        kind = pipeline.kinds[0]
        search = stages.of(kind, len(pipeline.counts))
        limit_s = stage_limit_s(self.bounds, kind, pipeline.micro_batches, self.at_most_s)
        relax_stage = RelaxStage(kind=kind, pipeline=pipeline, floor=self.floors.get(kind), limit_s=limit_s)
        layouts = stages.layouts(search, pipeline.mesh, search.batch // pipeline.micro_batches)
        for layout, even_axis in itertools.product(layouts, zigzag_axes(search.model.graph, pipeline.mesh.shape)):
            bound_s, formulated = relax_stage.within(stages, layout, even_axis)
            if bound_s < limit_s:
                yield _LayoutLook(layout=layout, even_axis=even_axis, bound_s=bound_s, formulated=formulated)

    def _planned(
        self,
        stages: StagePlanners,
        look: _LayoutLook,
        bounds: list[float],
        at_most_s: float,
        deadline: float | None,
    ) -> SolvedPipeline | None:
        """Return the stages' plans; None where one does not fit or is too slow. Raises ``bounds`` to what is proved."""
        pipeline = self.pipeline
        found: list[tuple[StageKind, SolvedRun]] = []
        kinds = pipeline.kinds
        tight = self.mip_gap / 2 if len(kinds) > 1 else self.mip_gap
        for kind in kinds:
            limit_s = stage_limit_s(bounds, kind, pipeline.micro_batches, at_most_s)
            if not found:
                priced = None
                if look.bound_s < limit_s:
                    priced = self._stage(stages, kind, look, limit_s, deadline, [tight], look.formulated)
            else:
                # Stages that are faster than these add their gap to the sum of all alone, not to what all wait for.
                weight = pipeline.micro_batches + (len(kinds[0].indices) - 1) / pipeline.chunks
                loose = tight * weight * pipeline.chunks / (len(kind.indices) * (len(kinds) - 1))
                slowest_s = max(priced.solution.objective_s for _, priced in found)
                priced = self._stage(stages, kind, look, limit_s, deadline, [loose, tight], None, slowest_s)
            if priced is None:
                return None
            found.append((kind, priced))
            for index in kind.indices:
                bounds[index] = max(bounds[index], priced.solution.bound_s)
        estimates = {index: priced.estimate for kind, priced in found for index in kind.indices}
        in_order = [estimates[index] for index in sorted(estimates)]
        step_s = pipeline_step_s(in_order, pipeline.micro_batches, pipeline.chunks)
        return SolvedPipeline(pipeline=pipeline, layout=look.layout, kinds=tuple(found), step_time_s=step_s)

    def _stage(
        self,
        stages: StagePlanners,
        kind: StageKind,
        look: _LayoutLook,
        limit_s: float,
        deadline: float | None,
        gaps: Sequence[float],
        formulated: FormulatedRun | None = None,
        slowest_s: float = 0.0,
    ) -> SolvedRun | None:
        """Return the plan of a stage; None where none fits or takes less than ``limit_s``.

        Args:
            gaps: to be solved to, one after the other, for as long as the stage takes more than ``slowest_s``.
            formulated: its problem, where that is there already.
        """
        search = stages.of(kind, len(self.pipeline.counts))
        run, at_most_s = stages.run(search, kind, self.pipeline), None if math.isinf(limit_s) else limit_s
        restriction = stages.restriction(search, run, look.layout, look.even_axis)
        formulated = formulated or search.formulate(run, restriction, self.floors.get(kind), at_most_s)
        priced: SolvedRun | None = None
        for gap in gaps:
            if priced is not None:
                solution = priced.solution
                if solution.objective_s <= max(slowest_s, solution.bound_s * (1.0 + gap)):
                    break
            priced = SolvedRun.of(
                search.solve(run, restriction, at_most_s, mip_gap=gap, deadline=deadline, formulated=formulated)
            )
            if priced is None:
                break
        return priced
