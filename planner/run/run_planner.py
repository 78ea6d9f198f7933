"""One run after the other: its problem is formulated, solved, checked against DTensor, and priced as the plan it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_model import ClusterSpec, reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.formulation.decision import Decision, decision_from_assignment
from planner.formulation.estimate import estimate
from planner.formulation.formulate import Formulation, Formulator
from planner.formulation.tie_break import break_ties
from planner.ilp.problem import Solution
from planner.ilp.random_assignment import random_assignment
from planner.ilp.relaxation import Relaxer
from planner.ilp.solve import solve
from planner.liveness.structure import Structure
from planner.plan.estimate import Estimate
from planner.plan.job import Job
from planner.pricing.activation_costs import ActivationPricer
from planner.pricing.op_times import OpTimes
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.regions.regions import Region
from planner.run.baselines import Restriction
from planner.run.memory_bound import least_alive_bytes, least_held_bytes, least_state_bytes, least_sums_bytes
from planner.run.mesh_bound import MeshBound
from planner.run.model_analysis import ModelAnalysis
from planner.run.pins import Pin
from planner.run.stage_clock import Clock, left_s
from planner.strategies.dtensor_rules import quiet_dtensor
from planner.strategies.enumerate import StrategyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A priced decision in one run."""

    run: Run
    structure: Structure
    decision: Decision
    estimate: Estimate
    solution: Solution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRun:
    """A candidate without the structure of its run, which follows from the rest: small enough to be sent."""

    run: Run
    decision: Decision
    estimate: Estimate
    solution: Solution

    @classmethod
    def of(cls, candidate: Candidate | None) -> SolvedRun | None:
        """Return what is to be sent of a candidate that was solved."""
        if candidate is None or candidate.solution is None:
            return None
        return cls(
            run=candidate.run,
            decision=candidate.decision,
            estimate=candidate.estimate,
            solution=candidate.solution,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedRun:
    """What relaxations say of a run.

    Attributes:
        uncapped_s: no plan takes less on this mesh, in as many micro-batches or more, whatever memory it needs.
        capped_s: no plan of the run that fits takes less; None where none fits, or none that fits is wanted.
    """

    uncapped_s: float
    capped_s: float | None = None


FormulatedRun = tuple[Formulator, Structure, Formulation | None]
"""What builds a run's problem, what of it does not depend on the mesh, and the problem; None: nothing is to choose."""


class RunPlanner:
    """One planning request: the model is traced once, and every run of it is formulated and solved from that.

    Attributes:
        batch: samples of the global batch.
        memory_bytes: the cap on the peak per device.
    """

    def __init__(
        self,
        model: ModelAnalysis,
        job: Job,
        cluster: ClusterSpec,
        batch: int,
        clock: Clock,
        beside: RunPlanner | None = None,
    ) -> None:
        """Take what is known of strategies and prices from ``beside``, where that is on the same kind of device."""
        self.model = model
        self.job = job
        self.clock = clock
        self.cluster = cluster
        self.batch = batch
        self._table: StrategyTable = StrategyTable() if beside is None else beside._table
        self.memory_bytes = job.memory_bytes or cluster.memory_bytes
        shared = beside is not None and beside.cluster == cluster
        self._redistribution_pricers: dict[MeshSpec, RedistributionPricer] = (
            beside._redistribution_pricers if shared and beside else {}
        )
        self.op_times: OpTimes = (
            OpTimes(cluster.device, model.flash_attention, job.attention_kernel) if beside is None else beside.op_times
        )
        self._state_bytes = self._sums_bytes = 0.0
        self._alive: dict[tuple[bool, Grouping], tuple[int, float, float]] = {}
        self._last_random: tuple[Run, Formulator, Structure, Formulation | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What a worker begins with; what else is remembered here follows from it.
        bare = {"model": self.model.bare(), "clock": Clock(), "_communication": {}, "_alive": {}}
        return {**self.__dict__, **bare, "_last_random": None}

    def candidate(self, priced: SolvedRun) -> Candidate:
        """Return a candidate as a whole."""
        run = priced.run
        return Candidate(
            run=run,
            structure=self.model.structure(self.micro_batch(run), run.grouping),
            decision=priced.decision,
            estimate=priced.estimate,
            solution=priced.solution,
        )

    def run_of(self, mesh: MeshSpec, micro_batches: int, ac: str, apart: int | None = None) -> Run:
        """Return the run of the job on ``mesh``.

        Args:
            apart: how many blocks at the front of each list choose apart from the rest; see `group_first_blocks`.
        """
        return Run(
            job=self.job,
            cluster=self.cluster,
            mesh=mesh,
            micro_batches=micro_batches,
            ac=ac,
            grouping=self.model.grouping(ac, apart),
            batch_axes=self.batch_axes(mesh),
        )

    def batch_axes(self, mesh: MeshSpec) -> tuple[int, ...]:
        """Return the axes of ``mesh`` for the batch alone: all but the two innermost, which keeps programs small.

        None are where they do not divide the batch, or where a parameter is pinned in computing on one of them.
        """
        outer = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1)[:-2]
        pinned = {pin.axis for pin in map(Pin.parse, self.job.pins) if pin.used}
        divides = self.batch % math.prod(mesh.shape[axis] for axis in outer) == 0
        return outer if divides and pinned.isdisjoint(mesh.names[axis] for axis in outer) else ()

    def micro_batch(self, run: Run) -> int:
        """Return the samples of one micro-batch of ``run``."""
        return self.batch // run.micro_batches

    def least_memory_bytes(self, run: Run) -> float:
        """Return bytes per device that no plan of ``run`` can go below."""
        batch = self.micro_batch(run)
        known, alive_bytes, held_bytes = self._alive.get((batch == 1, run.grouping), (0, 0.0, 0.0))
        if batch > known:
            structure = self.model.structure(batch, run.grouping)
            known, alive_bytes, held_bytes = batch, least_alive_bytes(structure), least_held_bytes(structure)
            self._alive[batch == 1, run.grouping] = known, alive_bytes, held_bytes
            self._state_bytes = least_state_bytes(structure, self.job)
            self._sums_bytes = least_sums_bytes(structure, self.job)
        # A tensor grows with the batch or not at all, so a part of the batch has that part of the bytes at least. Of a
        # single sample autograd may keep other tensors.
        alive_bytes += (run.in_flight - 1) * held_bytes
        split = self._state_bytes + (alive_bytes * batch / known if self.job.training else 0.0)
        if run.micro_batches > 1:
            split += self._sums_bytes
        return split / run.mesh.size + reserve_bytes(run.cluster.device)

    def formulator(self, run: Run, *, peak: bool = True) -> tuple[Formulator, Structure]:
        """Return what builds the problem of ``run``, with its peak or without."""
        micro_batch = self.micro_batch(run)
        structure = self.model.structure(micro_batch, run.grouping)
        if not peak:
            structure = structure.without_peak_candidates()
        if run.mesh not in self._redistribution_pricers:
            self._redistribution_pricers[run.mesh] = RedistributionPricer(run.mesh, run.cluster)
        pricer = ActivationPricer(
            run, self.model.profile(micro_batch), self._redistribution_pricers[run.mesh], self.op_times
        )
        return Formulator(structure, pricer, self._table, self.model.base), structure

    def formulate(
        self,
        run: Run,
        restriction: Restriction | None,
        floor: MeshBound | None = None,
        at_most_s: float | None = None,
        *,
        peak: bool = True,
    ) -> FormulatedRun:
        """Return the problem of ``run``, or None in its place where nothing is left to choose.

        Args:
            floor: of the run's mesh; choices that it shows to take ``at_most_s`` are left out.
            peak: whether its memory is asked about, beyond what rests.
        """
        with self.clock.stage("costs_s"), quiet_dtensor():
            formulator, structure = self.formulator(run, peak=peak)
            built = formulator.build(
                None if restriction is None else restriction.accepts,
                None if restriction is None else restriction.accepts_stored,
                None if floor is None or at_most_s is None else floor.below(at_most_s),
            )
        return formulator, structure, built

    def relax_run(
        self, run: Run, restriction: Restriction | None, floor: MeshBound, at_most_s: float | None = None
    ) -> RelaxedRun | None:
        """Return what no plan of ``run`` can beat; None where none takes less than ``at_most_s`` seconds."""
        _, _, formulation = self.formulate(run, restriction, floor, at_most_s)
        wanted = math.inf if at_most_s is None else at_most_s
        if formulation is None:
            return None
        with self.clock.stage("solve_s"):
            relaxer = Relaxer(formulation.problem, self.memory_bytes)
            uncapped = relaxer.uncapped()
            if uncapped is None or uncapped.bound_s >= wanted:
                return None
            try:
                capped = relaxer.capped(wanted)
            except SolverError:  # ended without an answer: what holds without the cap holds within it
                return RelaxedRun(uncapped_s=uncapped.bound_s, capped_s=uncapped.bound_s)
        if capped is None:
            return RelaxedRun(uncapped_s=uncapped.bound_s)
        return RelaxedRun(uncapped_s=uncapped.bound_s, capped_s=capped.bound_s)

    def solve(
        self,
        run: Run,
        restriction: Restriction | None,
        at_most_s: float | None = None,
        floor: MeshBound | None = None,
        *,
        mip_gap: float | None = None,
        deadline: float | None = None,
        steps: int | None = None,
        capped: bool = True,
        solving_s: float = 0.0,
        formulated: FormulatedRun | None = None,
    ) -> Candidate | None:
        """Return the best decision in ``run``, None where none fits or takes less than ``at_most_s`` seconds.

        Args:
            floor: of the run's mesh; choices that it shows to take ``at_most_s`` are left out.
            mip_gap: relative gap at which the solver may stop; None takes the job's.
            deadline: the best so far is returned at this time (of `time.perf_counter`).
            steps: relaxations to branch through, after which the best so far is returned; None: all it takes.
            capped: whether it has to fit.
            solving_s: the solver gets as long at least, however long formulating took.
            formulated: the problem, where it is stated already: with the same restriction.

        Raises:
            SolverError: time was up before any plan was found.
        """
        stated = formulated or self.formulate(run, restriction, floor, at_most_s)
        formulator, structure, formulation = stated
        while formulation is not None:
            with self.clock.stage("solve_s"):
                solution = solve(
                    formulation.problem,
                    memory_bytes=self.memory_bytes if capped else None,
                    mip_gap=self.job.mip_gap if mip_gap is None else mip_gap,
                    time_limit_s=None if deadline is None else max(left_s(deadline) or 0.0, solving_s),
                    cutoff_s=at_most_s,
                    node_limit=steps,
                )
            if solution is None:
                return None
            decision = decision_from_assignment(formulation, solution.assignment)
            refused = self.refused(run, formulation, decision)
            if not refused:
                return self._candidate(run, formulator, structure, decision, solution, restriction)
            formulation = without(formulator, formulation, decision, refused)
        return None

    def refused(self, run: Run, formulation: Formulation, decision: Decision) -> list[int]:
        """Return the region classes whose strategy DTensor would run otherwise on the whole mesh than axis by axis."""
        with self.clock.stage("check_s"), quiet_dtensor():
            return [
                index
                for index, strategy in enumerate(decision.strategies)
                if not self._table.runs(self._base_region(formulation.structure, index), strategy, run.mesh.shape)
            ]

    def _base_region(self, structure: Structure, index: int) -> Region:
        return self.model.base.regions[structure.representative(index).index]

    def random(self, run: Run, seed: int, restriction: Restriction | None = None) -> Candidate | None:
        """Return a random decision, whatever it costs; None where none can be found."""
        if self._last_random is None or self._last_random[0] != run:
            self._last_random = run, *self.formulate(run, restriction)
        _, formulator, structure, formulation = self._last_random
        if formulation is None:
            return None

        def allowed(node: int, choice: int) -> bool:
            if node >= len(formulation.strategies):
                return True
            return self._table.runs(
                self._base_region(structure, node), formulation.strategies[node][choice], run.mesh.shape
            )

        assignment = random_assignment(formulation.problem, seed, allowed)
        if assignment is None:
            return None
        decision = decision_from_assignment(formulation, assignment)
        return self._candidate(run, formulator, structure, decision, None)

    @staticmethod
    def _candidate(
        run: Run,
        formulator: Formulator,
        structure: Structure,
        decision: Decision,
        solution: Solution | None,
        restriction: Restriction | None = None,
    ) -> Candidate:
        if solution is not None:
            kept = (None, None) if restriction is None else (restriction.accepts, restriction.accepts_stored)
            decision = break_ties(formulator, structure, decision, *kept)
        found = estimate(formulator, structure, decision)
        return Candidate(run=run, structure=structure, decision=decision, estimate=found, solution=solution)


def without(
    formulator: Formulator, formulation: Formulation, decision: Decision, refused: Sequence[int]
) -> Formulation | None:
    """Return the problem without the strategies that were refused."""
    strategies = [
        tuple(s for s in choices if index not in refused or s != decision.strategies[index])
        for index, choices in enumerate(formulation.strategies)
    ]
    return formulator.with_choices(strategies, formulation.stored) if all(strategies) else None
