"""What relaxing or solving one run gives: bounds on its step time, or a priced decision."""

from __future__ import annotations

from dataclasses import dataclass

from planner.formulation.decision import Decision
from planner.ilp.problem import Solution
from planner.liveness.structure import Structure
from planner.plan.estimate import Estimate
from planner.pricing.run_spec import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A priced decision in one run.

    Attributes:
        solution: the solver's; None for a random decision.
    """

    run: Run
    structure: Structure
    decision: Decision
    estimate: Estimate
    solution: Solution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRun:
    """A solved candidate without its structure, which follows from the run: small enough to send between processes."""

    run: Run
    decision: Decision
    estimate: Estimate
    solution: Solution

    @classmethod
    def from_candidate(cls, candidate: Candidate | None) -> SolvedRun | None:
        """Return the solved run of a candidate; None for no candidate, or one that was not solved."""
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
    """Lower bounds on the step time of a run, from its relaxation.

    Attributes:
        uncapped_s: without the memory cap. It also bounds runs in more micro-batches on the same mesh.
        capped_s: within the memory cap; None where nothing fits, or nothing that fits is below the cutoff.
    """

    uncapped_s: float
    capped_s: float | None = None
