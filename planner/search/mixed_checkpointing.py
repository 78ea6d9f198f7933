"""Mixed checkpointing: a faster plan of a baseline in which the first blocks are checkpointed more than the others.

The search over meshes checkpoints all blocks alike. That often leaves memory free, but less than all blocks need in the
next lighter mode. The backward begins with the last blocks, so these are the ones to save more of.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import SolverError
from planner.plan.job import Checkpointing
from planner.pricing.run_spec import Run
from planner.run.run_results import Candidate
from planner.search.branch_and_bound import SearchResult, SearchSpec
from planner.search.mesh_tasks import compute_bound_s

_WORTHWHILE = 0.01
"""Fraction of the step time that mixed checkpointing has to save."""

_RESOLUTION = 16
"""The number of lightly checkpointed blocks is found to within the length of the longest list divided by this."""


_MOST_PROGRAMS = 6
"""Integer programs that are solved for one baseline at most."""


def mix_checkpointing(
    spec: SearchSpec, result: SearchResult[Candidate], counts: Sequence[int]
) -> SearchResult[Candidate]:
    """Return ``result``, with a faster plan on its mesh if one checkpoints some blocks less than others.

    The bound stays that of plans that checkpoint all blocks alike.

    Args:
        spec: the spec of the search that returned ``result``.
        result: a result, with or without a plan.
        counts: numbers of micro-batches that the mesh of the plan allows.
    """
    if result.plan is None or len(spec.modes) == 1:
        return result
    return dataclasses.replace(result, plan=_Mixing(spec, result.plan, counts).best())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixture:
    """Runs that differ in how many of the last blocks of each list are checkpointed in the lighter mode.

    Attributes:
        most: most blocks in the lighter mode that may fit.
        bound_s: lower bound in seconds on the step time with so many.
    """

    micro_batches: int
    heavier: str
    lighter: str
    most: int
    bound_s: float


class _Mixing:
    def __init__(self, spec: SearchSpec, plan: Candidate, counts: Sequence[int]) -> None:
        self._spec, self._planner, self._counts = spec, spec.planner, counts
        self._mesh, self._first, self._best = plan.run.mesh, plan, plan
        self._beyond_compute_s: dict[int, float] = {plan.run.micro_batches: self._beyond_compute(plan)}
        self._programs = 0
        self._length = max((len(blocks) for blocks in self._planner.model.blocks.lists.values()), default=0)

    def best(self) -> Candidate:
        """Return the fastest plan that was found.

        A plan that waits for communication longer than it computes stays as it is: nobody would launch it.
        """
        if self._beyond_compute(self._first) > self._first.estimate.step_time_s / 2:
            return self._first
        for mixture in sorted(self._mixtures(), key=lambda each: each.bound_s):
            self._find_most(mixture)
        return self._best

    def _beyond_compute(self, plan: Candidate) -> float:
        """Return the seconds of a step beyond its compute, which checkpointing hardly changes."""
        return plan.estimate.step_time_s - compute_bound_s(self._planner, plan.run)

    def _may_gain(self, mixture: _Mixture) -> bool:
        """Return whether a plan is expected below the cutoff, by the plans found in as many micro-batches."""
        return mixture.bound_s + self._beyond_compute_s.get(mixture.micro_batches, 0.0) < self._cutoff_s

    @property
    def _cutoff_s(self) -> float:
        share = _WORTHWHILE if self._best is self._first else 0.0
        return self._best.estimate.step_time_s * (1.0 - share)

    def _mixtures(self) -> Iterator[_Mixture]:
        """Yield what may fit by the bounds on memory in closed form, which are linear in the number of blocks.

        Mixtures that compute as much as the first plan, in as many micro-batches or more, are left out.
        """
        cap, first = self._spec.constraints.memory_bytes, self._first.run
        modes = [mode for mode in ("full", "selective", "none") if mode in self._spec.modes]
        pairs = tuple(itertools.combinations(modes, 2))
        for count, (heavier, lighter) in itertools.product(self._counts, pairs):
            if count >= first.micro_batches and modes.index(lighter) <= modes.index(first.ac):
                continue
            least, needed = (
                self._planner.least_memory_bytes(self._planner.run_of(self._mesh, count, mode))
                for mode in (heavier, lighter)
            )
            room = 1.0 if needed <= cap else (cap - least) / (needed - least)
            most = min(int(room * self._length), self._length - 1)
            if least <= cap and most > 0:
                run = self._run(count, heavier, lighter, most)
                bound_s = compute_bound_s(self._planner, run)
                yield _Mixture(micro_batches=count, heavier=heavier, lighter=lighter, most=most, bound_s=bound_s)

    def _run(self, count: int, heavier: str, lighter: str, light_blocks: int) -> Run:
        ac = Checkpointing(heavier, self._length - light_blocks, lighter)
        return self._planner.run_of(self._mesh, count, str(ac))

    def _find_most(self, mixture: _Mixture) -> None:
        """Find about the most blocks in the lighter mode that fit, by bisection, and keep the fastest plan."""
        fits, too_many = 0, mixture.most + 1
        while too_many - fits > max(1, self._length // _RESOLUTION) and self._may_gain(mixture):
            if self._spec.is_over or self._programs == _MOST_PROGRAMS:
                return
            self._programs += 1
            middle = (fits + too_many) // 2
            plan = self._solved(self._run(mixture.micro_batches, mixture.heavier, mixture.lighter, middle))
            if plan is None:
                too_many = middle
                continue
            fits = middle
            self._beyond_compute_s[mixture.micro_batches] = self._beyond_compute(plan)
            if plan.estimate.step_time_s < self._cutoff_s:
                self._best = plan

    def _solved(self, run: Run) -> Candidate | None:
        """Return the best plan of a run; None where none fits, or the solver has no answer."""
        constraints = self._spec.constraints
        if not constraints.allows(run):
            return None
        try:
            return self._planner.solve(
                run,
                constraints.restrict(run.mesh),
                memory_bytes=constraints.memory_bytes,
                deadline=self._spec.deadline,
            )
        except SolverError:
            return None
