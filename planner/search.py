"""The outer search: meshes, numbers of micro-batches and modes of checkpointing, each run formulated and solved.

Lower bounds come first, so that what cannot win is not solved.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cost_model import ClusterSpec, reserve_bytes
from cost_model.layout import Layout, MeshSpec, split_factor
from planner.assemble import Decision, decision_of
from planner.baselines import Restriction
from planner.candidates import TracedModel, least_compute_s, least_memory_bytes
from planner.communication import Communication
from planner.costs import Pricer
from planner.errors import InfeasibleError
from planner.estimate import estimate
from planner.formulate import Formulation, Formulator
from planner.ilp import least_memory, least_memory_bound, relax, solve
from planner.job import Job
from planner.op_times import OpTimes
from planner.parameter_costs import StoredChoice
from planner.polish import polish
from planner.problem import Solution
from planner.random_assignment import random_assignment
from planner.regions import Region
from planner.report import Estimate
from planner.run import Run
from planner.strategies.enumerate import Strategy, StrategyTable
from planner.structure import Structure

Progress = Callable[[str], None]

_LEAST_MEMORY_RUNS = 24
"""Up to so many runs are all solved for the least memory that would do, once nothing fits."""

_PATIENCE = 2
"""Larger numbers of micro-batches in a row that are slower, after which no larger one is tried."""

STATE_BYTES_PER_PARAMETER = 4
"""A floor for lower bounds: no optimizer and dtype of ours keeps less than one float32 or two bf16 values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A priced decision in one run."""

    run: Run
    structure: Structure
    decision: Decision
    estimate: Estimate
    solution: Solution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Floor:
    """What no run on a mesh can beat, in all and with any one choice.

    Attributes:
        strategies: by region class, what a run with a strategy takes at least.
        stored: by parameter class, the same for a stored layout and the axis over which it is gathered with its block.
    """

    mesh: MeshSpec
    bound_s: float
    strategies: tuple[Mapping[Strategy, float], ...]
    stored: tuple[Mapping[tuple[Layout, int | None], float], ...]

    @classmethod
    def none(cls, mesh: MeshSpec) -> _Floor:
        """Return the floor of a mesh of which nothing is known."""
        return cls(mesh=mesh, bound_s=0.0, strategies=(), stored=())

    def below(self, time_s: float) -> _Promising:
        """Return which choices could be part of a run that takes less than ``time_s``."""
        return _Promising(floor=self, time_s=time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promising:
    """The choices of a mesh that could be part of a run that takes less than ``time_s``."""

    floor: _Floor
    time_s: float

    def strategy(self, index: int, choice: Strategy) -> bool:
        return self.floor.strategies[index].get(choice, self.floor.bound_s) < self.time_s

    def stored(self, index: int, choice: StoredChoice) -> bool:
        key = choice.stored, choice.gathered_over
        return self.floor.stored[index].get(key, self.floor.bound_s) < self.time_s


@dataclass(slots=True)
class Clock:
    """Seconds spent in each stage of planning."""

    spent: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, started: float) -> None:
        self.spent[stage] = self.spent.get(stage, 0.0) + time.perf_counter() - started


class Search:
    """One planning request: the model is traced once, and every run of it is formulated and solved from that."""

    def __init__(self, traced: TracedModel, job: Job, cluster: ClusterSpec, batch: int, clock: Clock) -> None:
        self._traced = traced
        self._job = job
        self._cluster = cluster
        self._batch = batch
        self._clock = clock
        self._table = StrategyTable()
        self._memory_bytes = job.memory_bytes or cluster.device.memory_bytes
        self._communication: dict[MeshSpec, Communication] = {}
        self._op_times = OpTimes(cluster.device, traced.flash_attention)
        self._last_random: tuple[Run, Formulator, Structure, Formulation | None] | None = None

    @property
    def memory_bytes(self) -> int:
        """The cap on the peak per device."""
        return self._memory_bytes

    def run_of(self, mesh: MeshSpec, micro_batches: int, ac: str) -> Run:
        """Return the run of the job on ``mesh``."""
        return Run(job=self._job, cluster=self._cluster, mesh=mesh, micro_batches=micro_batches, ac=ac)

    def formulator(self, run: Run) -> tuple[Formulator, Structure]:
        """Return what builds the problem of ``run``."""
        micro_batch = self._batch // run.micro_batches
        structure = self._traced.structure(micro_batch, run.ac)
        if run.mesh not in self._communication:
            self._communication[run.mesh] = Communication(run.mesh, run.cluster)
        pricer = Pricer(run, self._traced.profile(micro_batch), self._communication[run.mesh], self._op_times)
        return Formulator(structure, pricer, self._table, self._traced.base), structure

    def formulate(
        self, run: Run, restriction: Restriction | None, floor: _Floor | None = None, at_most_s: float | None = None
    ) -> tuple[Formulator, Structure, Formulation | None]:
        """Return the problem of ``run``, or None in its place where nothing is left to choose.

        Args:
            floor: of the run's mesh; choices that it shows to take ``at_most_s`` are left out.
        """
        started = time.perf_counter()
        formulator, structure = self.formulator(run)
        built = formulator.build(
            None if restriction is None else restriction.accepts,
            None if restriction is None else restriction.accepts_stored,
            None if floor is None or at_most_s is None else floor.below(at_most_s),
        )
        self._clock.add("costs_s", started)
        return formulator, structure, built

    def solve(
        self,
        run: Run,
        restriction: Restriction | None,
        at_most_s: float | None = None,
        floor: _Floor | None = None,
        *,
        capped: bool = True,
    ) -> Candidate | None:
        """Return the best decision in ``run``, None where none fits or takes less than ``at_most_s`` seconds.

        Args:
            capped: whether it has to fit.
        """
        formulator, structure, formulation = self.formulate(run, restriction, floor, at_most_s)
        while formulation is not None:
            started = time.perf_counter()
            solution = solve(
                formulation.problem,
                memory_bytes=self._memory_bytes if capped else None,
                mip_gap=self._job.mip_gap,
                at_most_s=at_most_s,
            )
            self._clock.add("solve_s", started)
            if solution is None:
                return None
            decision = decision_of(formulation, solution.assignment)
            refused = self._refused(run, formulation, decision)
            if not refused:
                return self._candidate(run, formulator, structure, decision, solution)
            formulation = _without(formulator, formulation, decision, refused)
        return None

    def _refused(self, run: Run, formulation: Formulation, decision: Decision) -> list[int]:
        """Return the region classes whose strategy DTensor would run otherwise on the whole mesh than axis by axis."""
        started = time.perf_counter()
        refused = [
            index for index, strategy in enumerate(decision.strategies)
            if not self._table.runs(self._base_region(formulation.structure, index), strategy, run.mesh.shape)
        ]  # fmt: skip
        self._clock.add("check_s", started)
        return refused

    def _base_region(self, structure: Structure, index: int) -> Region:
        return self._traced.base.regions[structure.representative(index).index]

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
        decision = decision_of(formulation, assignment)
        return self._candidate(run, formulator, structure, decision, None)

    def best(
        self,
        meshes: Sequence[MeshSpec],
        counts: Sequence[int],
        modes: Sequence[str],
        restrict: Callable[[MeshSpec], Restriction | None],
        progress: Progress | None,
    ) -> Candidate | None:
        """Return the fastest candidate over all runs, None where none fits.

        Every mesh is first bounded by the relaxation without a memory cap, in one micro-batch and without
        checkpointing: no run on that mesh can be faster, and none with a certain choice than that choice's bound.
        (Smaller micro-batches do the same work in more and smaller pieces, and layouts that divide them divide the
        larger ones; checkpointing adds work.) The most promising mesh goes first; from the first plan that fits on,
        only choices that could be part of a faster one are left.
        """
        if len(meshes) == len(counts) == len(modes) == 1:
            floor = _Floor.none(meshes[0])  # one run has nothing to be compared with
            return self._best_on(floor, counts, modes[0], restrict(meshes[0]), None, progress)
        floors: list[_Floor] = []
        for mesh in meshes:
            if progress is not None:
                progress(f"bounding mesh {mesh}")
            bound = self._floor(mesh, counts, restrict(mesh))
            if bound is not None:
                floors.append(bound)
        best: Candidate | None = None
        for floor in sorted(floors, key=lambda floor: floor.bound_s):
            for ac in modes:
                best = self._best_on(floor, counts, ac, restrict(floor.mesh), best, progress)
        return best

    def _floor(self, mesh: MeshSpec, counts: Sequence[int], restriction: Restriction | None) -> _Floor | None:
        """Return what no run on ``mesh`` can beat; None where nothing divides evenly."""
        _, _, formulation = self.formulate(self.run_of(mesh, counts[0], "none"), restriction)
        if formulation is None:
            return None
        started = time.perf_counter()
        relaxed = relax(formulation.problem)
        self._clock.add("solve_s", started)
        if relaxed is None:
            return None
        regions = len(formulation.strategies)
        strategies = [
            dict(zip(choices, times, strict=True))
            for choices, times in zip(formulation.strategies, relaxed.at_least_s[:regions], strict=True)
        ]
        stored: list[dict[tuple[Layout, int | None], float]] = []
        for choices, times in zip(formulation.stored, relaxed.at_least_s[regions:-1], strict=True):
            least: dict[tuple[Layout, int | None], float] = {}
            for choice, time_s in zip(choices, times, strict=True):
                key = choice.stored, choice.gathered_over
                least[key] = min(least.get(key, math.inf), time_s)
            stored.append(least)
        return _Floor(mesh=mesh, bound_s=relaxed.bound_s, strategies=tuple(strategies), stored=tuple(stored))

    @staticmethod
    def _candidate(
        run: Run, formulator: Formulator, structure: Structure, decision: Decision, solution: Solution | None
    ) -> Candidate:
        if solution is not None:
            decision = polish(formulator, structure, decision)
        found = estimate(formulator, structure, decision)
        return Candidate(run=run, structure=structure, decision=decision, estimate=found, solution=solution)

    def _best_on(
        self,
        floor: _Floor,
        counts: Sequence[int],
        ac: str,
        restriction: Restriction | None,
        best: Candidate | None,
        progress: Progress | None,
    ) -> Candidate | None:
        """Return the better of ``best`` and what a mesh gives: the fewest micro-batches that fit, or more of them.

        More are tried until they have not paid `_PATIENCE` times in a row.
        """
        worse, found = 0, False
        for count in counts:
            run = self.run_of(floor.mesh, count, ac)
            micro_batch = self._batch // count
            least = least_memory_bytes(self._traced, run, micro_batch, STATE_BYTES_PER_PARAMETER)
            if least + reserve_bytes(self._cluster.device) > self._memory_bytes:
                continue
            at_most_s = None if best is None else best.estimate.step_time_s * (1.0 - self._job.mip_gap)
            if at_most_s is not None:
                least_s = max(floor.bound_s, least_compute_s(self._traced, self._op_times, run, micro_batch))
                if least_s >= at_most_s:
                    break
            if progress is not None:
                progress(f"solving mesh {floor.mesh}, {count} micro-batches, checkpointing {ac}")
            candidate = self.solve(run, restriction, at_most_s, floor)
            if candidate is not None:
                best, worse, found = candidate, 0, True
            elif found:
                # What fits in fewer micro-batches fits in these: they are slower.
                worse += 1
            if worse == _PATIENCE:
                break
        return best

    def refuse(
        self,
        meshes: Sequence[MeshSpec],
        counts: Sequence[int],
        modes: Sequence[str],
        restrict: Callable[[MeshSpec], Restriction | None],
    ) -> InfeasibleError:
        """Return the error that says what would do: the least memory per device over all runs, and what takes it up."""
        least: tuple[float, Structure, Decision, Run] | None = None
        # Where there is much to try, the mode that keeps least stands for the others.
        tried = modes if len(meshes) * len(counts) * len(modes) <= _LEAST_MEMORY_RUNS else modes[-1:]
        bounds: list[tuple[float, Run]] = []
        for mesh in meshes:
            for count, mode in itertools.product(counts, tried):
                run = self.run_of(mesh, count, mode)
                _, _, formulation = self.formulate(run, restrict(mesh))
                bound = None if formulation is None else least_memory_bound(formulation.problem)
                if bound is not None:
                    bounds.append((bound, run))
        for bound, run in sorted(bounds, key=lambda pair: pair[0]):
            if least is not None and bound >= least[0]:
                break
            formulator, structure, formulation = self.formulate(run, restrict(run.mesh))
            while formulation is not None:
                found = least_memory(formulation.problem)
                if found is None:
                    break
                decision = decision_of(formulation, found[0])
                refused = self._refused(run, formulation, decision)
                if not refused:
                    if least is None or found[1] < least[0]:
                        least = found[1], structure, decision, run
                    break
                formulation = _without(formulator, formulation, decision, refused)
        if least is None:
            return InfeasibleError(
                "no layout of this model divides evenly over these meshes and this batch.",
                budget_bytes=self._memory_bytes,
                least_bytes=None,
                what_to_do="Choose another mesh, or a batch that the mesh divides.",
            )
        nbytes, structure, decision, run = least
        return InfeasibleError(
            budget_bytes=self._memory_bytes,
            least_bytes=int(-(-nbytes // 1)),
            largest_tensors=_largest(structure, decision, run),
        )


def _largest(structure: Structure, decision: Decision, run: Run) -> tuple[tuple[str, int], ...]:
    values = structure.regions.graph.values
    rows: list[tuple[str, int]] = []
    for parameter, choice in zip(structure.parameters, decision.stored, strict=True):
        value = values[parameter.values[0]]
        rows.append(
            (
                structure.regions.graph.parameters[parameter.values[0]][0],
                value.nbytes // split_factor(choice.stored, run.mesh.shape),
            )
        )
    for index, strategy in enumerate(decision.strategies):
        region = structure.representative(index)
        for position, slot in enumerate(region.slots):
            layout = strategy.forward[position]
            if slot.origin == "op" and layout is not None:
                rows.append(
                    (
                        f"{region.fqn or '(root)'}:{slot.value.name}",
                        slot.value.nbytes // split_factor(layout, run.mesh.shape),
                    )
                )
    return tuple(sorted(rows, key=lambda row: -row[1])[:3])


def _without(
    formulator: Formulator, formulation: Formulation, decision: Decision, refused: Sequence[int]
) -> Formulation | None:
    """Return the problem without the strategies that were refused."""
    strategies = [
        tuple(s for s in choices if index not in refused or s != decision.strategies[index])
        for index, choices in enumerate(formulation.strategies)
    ]
    return formulator.of(strategies, formulation.stored) if all(strategies) else None
