"""What comes of one run: its integer program, lower bounds on its step time, and a priced decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from planner.formulation.decision import Decision
from planner.formulation.formulate import Formulation, Formulator
from planner.ilp.problem import Solution
from planner.liveness.structure import Structure
from planner.plan.estimate import Estimate
from planner.pricing.run_spec import Run


class FormulatedRun(NamedTuple):
    """The integer program of a run.

    Attributes:
        formulator: builds the program, and prices decisions.
        structure: the part of the program that does not depend on the mesh.
        formulation: the program; None where some region or parameter has no choice left.
    """

    formulator: Formulator
    structure: Structure
    formulation: Formulation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A priced decision in one run.

    Attributes:
        solution: the solver's solution; None for a random decision.
    """

    run: Run
    structure: Structure
    decision: Decision
    estimate: Estimate
    solution: Solution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedRun:
    """A solved candidate without its structure, small enough to send between processes.

    The structure follows from the run.
    """

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
        uncapped_s: bound without the memory cap, in seconds. It also bounds the runs in more micro-batches with the
            same mesh and checkpointing mode.
        capped_s: bound under the memory cap, in seconds; None where no plan fits, or none that fits is below the
            cutoff.
    """

    uncapped_s: float
    capped_s: float | None = None
