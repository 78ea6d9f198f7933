"""`RunPlanner`: formulates, relaxes and solves the integer program of a run, and prices the solution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cost_model import ClusterSpec, reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.formulation.decision import Decision, decision_from_assignment
from planner.formulation.estimate import estimate, itemise
from planner.formulation.formulate import Formulation, Formulator
from planner.formulation.perturbed import perturbed_step_times_s
from planner.formulation.tie_break import break_ties
from planner.formulation.uniform import with_uniform_storage
from planner.ilp.problem import Solution
from planner.ilp.random_assignment import random_assignment
from planner.ilp.relaxation import Relaxer
from planner.ilp.solve import solve
from planner.ilp.step_cost import peak_bytes, step_time_s
from planner.liveness.structure import Structure
from planner.plan.estimate import Perturbation
from planner.plan.job import Job
from planner.plan.reshard import ReshardAfter
from planner.pricing.activation_costs import ActivationPricer
from planner.pricing.op_times import OpTimes
from planner.pricing.redistribution_costs import RedistributionPricer
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.run.baselines import Restriction
from planner.run.batch_axes import batch_axes
from planner.run.memory_bound import least_alive_bytes, least_gradient_bytes, least_saved_bytes, least_state_bytes
from planner.run.mesh_bound import MeshBound
from planner.run.model_analysis import ModelAnalysis
from planner.run.run_results import Candidate, FormulatedRun, RelaxedRun, SolvedRun
from planner.run.stage_clock import Clock, left_s
from planner.run.unsupported_ops import with_local_ops_marked
from planner.strategies.dtensor_rules import quiet_dtensor
from planner.strategies.enumerate import StrategyTable


class RunPlanner:
    """Plans the runs of one job, all from one traced model.

    Attributes:
        batch: samples in the global batch.
        reshard_after: when all FSDP groups reshard; None: each as is best.
    """

    reshard_after: ReshardAfter | None = None

    def __init__(
        self,
        model: ModelAnalysis,
        job: Job,
        cluster: ClusterSpec,
        batch: int,
        clock: Clock,
        share_with: RunPlanner | None = None,
    ) -> None:
        """Prepare to plan runs of a job.

        Args:
            model: the model to plan.
            job: the job to plan for.
            cluster: the cluster to plan on.
            batch: samples in the global batch.
            clock: adds up the seconds spent in each stage of planning.
            share_with: a planner for the same device type, whose strategies and prices are reused; None: no planner.
        """
        self.job = job
        self.clock = clock
        self.cluster, self.batch = cluster, batch
        self._table: StrategyTable = StrategyTable(model.graph.rounded) if share_with is None else share_with._table
        self.model = model if share_with is not None else with_local_ops_marked(model, self._table)
        same_cluster = share_with is not None and share_with.cluster == cluster
        self._redistribution_pricers: dict[MeshSpec, RedistributionPricer] = (
            share_with._redistribution_pricers if same_cluster and share_with else {}
        )
        self.op_times: OpTimes = (
            OpTimes(cluster.device, model.flash_attention, job.attention_kernel)
            if share_with is None
            else share_with.op_times
        )
        self._state_bytes: float | None = None
        self._sums_bytes = 0.0
        self._alive: dict[tuple[bool, Grouping], tuple[int, float, float]] = {}
        self._last: tuple[tuple[object, ...], FormulatedRun] | None = None

    @property
    def table(self) -> StrategyTable:
        """The strategies of regions, by mesh."""
        return self._table

    @property
    def memory_bytes(self) -> int:
        """The job's cap on the peak bytes per device; without one, the device's memory less the headroom."""
        return self.job.cap_bytes(self.cluster.memory_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # A worker starts without caches: it recomputes what it needs.
        bare = {"model": self.model.bare(), "clock": Clock(), "_redistribution_pricers": {}, "_alive": {}}
        return {**self.__dict__, **bare, "_last": None}

    def candidate(self, solved: SolvedRun) -> Candidate:
        """Return a solved run as a candidate, which has the structure too."""
        run = solved.run
        return Candidate(
            run=run,
            structure=self.model.structure(self.micro_batch(run), run.grouping),
            decision=solved.decision,
            estimate=solved.estimate,
            solution=solved.solution,
        )

    def renamed(self, candidate: Candidate, mesh: MeshSpec) -> Candidate:
        """Return a candidate with the axis names of ``mesh``, which has the shape of its mesh."""
        assert candidate.run.mesh.shape == mesh.shape
        run = dataclasses.replace(candidate.run, mesh=mesh)
        formulator, structure = self.formulator(run)
        price = estimate(formulator, structure, candidate.decision)
        return dataclasses.replace(candidate, run=run, structure=structure, estimate=price)

    def with_uniform_storage(self, candidate: Candidate, *, limit_s: float, memory_bytes: float) -> Candidate:
        """Return a candidate with parameters stored alike where that costs little; see `planner.formulation.uniform`.

        Args:
            limit_s: seconds that its step may take.
            memory_bytes: cap on its peak per device.
        """
        formulator, structure = self.formulator(candidate.run)

        def accepts(decision: Decision) -> bool:
            price = itemise(formulator, structure, decision).charge
            return step_time_s(price) <= limit_s and peak_bytes(price) <= memory_bytes

        decision = with_uniform_storage(formulator, structure, candidate.decision, accepts)
        if decision == candidate.decision:
            return candidate
        price = estimate(formulator, structure, decision)
        return dataclasses.replace(candidate, decision=decision, estimate=price)

    def perturbed_s(self, candidate: Candidate) -> Mapping[Perturbation, float]:
        """Return perturbation -> seconds of a step of a candidate (`planner.formulation.perturbed`)."""
        formulator, structure = self.formulator(candidate.run)
        return perturbed_step_times_s(formulator, structure, candidate.decision)

    def run_of(self, mesh: MeshSpec, micro_batches: int, ac: str, leading_blocks: int | None = None) -> Run:
        """Return the run of the job on ``mesh``.

        Args:
            mesh: the mesh of the run.
            micro_batches: number of micro-batches that the global batch is split into.
            ac: checkpointing mode.
            leading_blocks: number of first blocks in each list that have decisions of their own; None: 0.
        """
        return Run(
            job=self.job,
            cluster=self.cluster,
            mesh=mesh,
            micro_batches=micro_batches,
            ac=ac,
            grouping=self.model.grouping(ac, leading_blocks),
            batch_axes=self.batch_axes(mesh),
            reshard_after=self.reshard_after,
        )

    def batch_axes(self, mesh: MeshSpec) -> tuple[int, ...]:
        """Return the indices of the axes of ``mesh`` that split only the batch."""
        return batch_axes(mesh, self.batch, self.job.pins)

    def micro_batch(self, run: Run) -> int:
        """Return the number of samples in one micro-batch of ``run``."""
        return self.batch // run.micro_batches

    def least_memory_bytes(self, run: Run) -> float:
        """Return a lower bound on the peak bytes per device of every plan of ``run``."""
        batch = self.micro_batch(run)
        bound_batch, alive_bytes, held_bytes = self._alive.get((batch == 1, run.grouping), (0, 0.0, 0.0))
        if batch > bound_batch:
            structure = self.model.structure(batch, run.grouping)
            bound_batch, alive_bytes, held_bytes = batch, least_alive_bytes(structure), least_saved_bytes(structure)
            self._alive[batch == 1, run.grouping] = bound_batch, alive_bytes, held_bytes
            self._sums_bytes = least_gradient_bytes(structure, self.job)
        # A tensor's bytes are proportional to the batch or do not depend on it. So a fraction of the batch has at least
        # that fraction of the bytes. A batch of one sample is counted apart, because autograd may save other tensors.
        alive_bytes += (run.in_flight - 1) * held_bytes
        split = alive_bytes * batch / bound_batch if self.job.training else 0.0
        if run.micro_batches > 1:
            split += self._sums_bytes
        return split / run.mesh.size + self.least_static_bytes(run)

    def least_static_bytes(self, run: Run) -> float:
        """Return a lower bound on the bytes of parameters, optimizer states and the reserve, per device of ``run``.

        It holds for the fullest stage of a pipeline too.
        """
        if self._state_bytes is None:
            self._state_bytes = least_state_bytes(self.model.base, self.job)
        return self._state_bytes / run.mesh.size + reserve_bytes(run.cluster.device)

    def formulator(self, run: Run, *, peak: bool = True) -> tuple[Formulator, Structure]:
        """Return the formulator of the program of ``run``, and the run's structure.

        Args:
            run: the run to formulate.
            peak: whether both have the peak candidates, which the peak memory is counted from.
        """
        micro_batch = self.micro_batch(run)
        structure = self.model.structure(micro_batch, run.grouping)
        if not peak:
            structure = structure.without_peak_candidates()
        if run.mesh not in self._redistribution_pricers:
            self._redistribution_pricers[run.mesh] = RedistributionPricer(
                run.mesh, run.cluster, self.model.graph.rounded
            )
        pricer = ActivationPricer(
            run, self.model.profile(micro_batch), self._redistribution_pricers[run.mesh], self.op_times
        )
        return Formulator(structure, pricer, self._table, self.model.base), structure

    def formulate(
        self,
        run: Run,
        restriction: Restriction | None,
        mesh_bound: MeshBound | None = None,
        cutoff_s: float = math.inf,
        *,
        peak: bool = True,
    ) -> FormulatedRun:
        """Return the integer program of ``run``.

        Args:
            run: the run to formulate.
            restriction: the choices that a baseline and pins allow; None: all choices.
            mesh_bound: lower bounds on the run's mesh. Choices with a bound of ``cutoff_s`` or more are left out. None:
                all choices are in the program.
            cutoff_s: step time in seconds at or above which a plan is not wanted.
            peak: whether the program has the peak memory; otherwise it has only static memory.
        """
        key = (run, restriction, mesh_bound, cutoff_s, peak)
        if mesh_bound is not None and self._last is not None and self._last[0] == key:
            return self._last[1]  # a run is relaxed, and then solved
        is_filtered = mesh_bound is not None and math.isfinite(cutoff_s)
        with self.clock.stage("costs_s"), quiet_dtensor():
            formulator, structure = self.formulator(run, peak=peak)
            built = formulator.build(
                None if restriction is None else restriction.accepts,
                None if restriction is None else restriction.accepts_stored,
                mesh_bound.choices_below(cutoff_s) if is_filtered and mesh_bound is not None else None,
            )
        formulated = FormulatedRun(formulator, structure, built)
        if mesh_bound is not None:
            self._last = key, formulated
        return formulated

    def relax_run(
        self,
        run: Run,
        restriction: Restriction | None,
        mesh_bound: MeshBound,
        *,
        memory_bytes: float,
        cutoff_s: float = math.inf,
    ) -> RelaxedRun | None:
        """Return lower bounds on the step time of ``run``; None where no plan takes less than ``cutoff_s``."""
        formulation = self.formulate(run, restriction, mesh_bound, cutoff_s).formulation
        if formulation is None:
            return None
        with self.clock.stage("solve_s"):
            relaxer = Relaxer(formulation.problem, memory_bytes)
            try:
                uncapped = relaxer.uncapped()
            except SolverError:
                return RelaxedRun(uncapped_s=0.0, capped_s=0.0)
            if uncapped is None or uncapped.bound_s >= cutoff_s:
                return None
            try:
                capped = relaxer.capped(cutoff_s)
            except SolverError:  # no answer; the bound without the cap holds with the cap too
                return RelaxedRun(uncapped_s=uncapped.bound_s, capped_s=uncapped.bound_s)
        return RelaxedRun(uncapped_s=uncapped.bound_s, capped_s=None if capped is None else capped.bound_s)

    def solve(
        self,
        run: Run,
        restriction: Restriction | None,
        *,
        memory_bytes: float | None,
        cutoff_s: float = math.inf,
        mesh_bound: MeshBound | None = None,
        mip_gap: float | None = None,
        deadline: float | None = None,
        node_limit: int | None = None,
        least_solve_s: float = 0.0,
        formulated: FormulatedRun | None = None,
    ) -> Candidate | None:
        """Return the best decision in ``run``; None if no decision that fits in memory takes less than ``cutoff_s``.

        Args:
            run: the run to solve.
            restriction: the choices that a baseline and pins allow; None: all choices.
            memory_bytes: cap on the peak per device; None: no cap.
            cutoff_s: step time in seconds at or above which a plan is not wanted.
            mesh_bound: lower bounds on the run's mesh. Choices with a bound of ``cutoff_s`` or more are left out. None:
                all choices are in the program.
            mip_gap: relative gap at which the solver may stop; None: the job's gap.
            deadline: time of `time.perf_counter` at which the solver returns the incumbent; None: no deadline.
            node_limit: nodes of the solver's branch and bound after which it returns the incumbent; None: no limit.
            least_solve_s: seconds that the solver gets even if the deadline is nearer.
            formulated: the run's program under the same restriction; None: it is formulated here.

        Raises:
            SolverError: the solver broke off, or ran out of time, without an answer.
        """
        formulator, structure, formulation = formulated or self.formulate(run, restriction, mesh_bound, cutoff_s)
        while formulation is not None:
            with self.clock.stage("solve_s"):
                solution = solve(
                    formulation.problem,
                    memory_bytes=memory_bytes,
                    mip_gap=self.job.mip_gap if mip_gap is None else mip_gap,
                    time_limit_s=None if deadline is None else max(left_s(deadline) or 0.0, least_solve_s),
                    cutoff_s=None if math.isinf(cutoff_s) else cutoff_s,
                    node_limit=node_limit,
                )
            if solution is None:
                return None
            decision = decision_from_assignment(formulation, solution.assignment)
            mismatched = self.mismatched_regions(run, formulation, decision)
            if not mismatched:
                return self._candidate(run, formulator, structure, decision, solution, restriction)
            formulation = without_mismatched(formulator, formulation, decision, mismatched)
        return None

    def mismatched_regions(self, run: Run, formulation: Formulation, decision: Decision) -> list[int]:
        """Return the region classes (indices) whose strategy DTensor runs differently on the mesh than axis by axis."""
        with self.clock.stage("check_s"), quiet_dtensor():
            return [
                index
                for index, strategy in enumerate(decision.strategies)
                if not self._table.runs(formulation.structure.representative(index), strategy, run.mesh.shape)
            ]

    def random(self, run: Run, seed: int, restriction: Restriction | None = None) -> Candidate | None:
        """Return a random decision, whatever time and memory it takes; None if none was found."""
        if self._last is None or self._last[0] != (run,):
            self._last = (run,), self.formulate(run, restriction)
        formulator, structure, formulation = self._last[1]
        if formulation is None:
            return None

        def allowed(node: int, choice: int) -> bool:
            if node >= len(formulation.strategies):
                return True
            strategy = formulation.strategies[node][choice]
            return self._table.runs(structure.representative(node), strategy, run.mesh.shape)

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
            accepted = (None, None) if restriction is None else (restriction.accepts, restriction.accepts_stored)
            decision = break_ties(formulator, structure, decision, *accepted)
        price = estimate(formulator, structure, decision)
        return Candidate(run=run, structure=structure, decision=decision, estimate=price, solution=solution)


def without_mismatched(
    formulator: Formulator, formulation: Formulation, decision: Decision, mismatched: Sequence[int]
) -> Formulation | None:
    """Return the program without the chosen strategies of ``mismatched`` classes; None if a class has none left."""
    strategies = [
        tuple(s for s in choices if index not in mismatched or s != decision.strategies[index])
        for index, choices in enumerate(formulation.strategies)
    ]
    return formulator.with_choices(strategies, formulation.stored) if all(strategies) else None
