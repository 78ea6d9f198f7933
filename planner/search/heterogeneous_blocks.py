"""Heterogeneous blocks: a faster plan in which the first blocks have layouts or checkpointing of their own.

In the search over meshes equal blocks share their decisions, which keeps the integer programs small. Under a memory cap
all of them are then checkpointed, or stored sharded, although a part of them would be enough. This module solves the
best run again with separate decisions for its first k blocks. It accepts only plans that are faster than the incumbent.
Mostly the relaxation of a program already shows that there are none.
"""

from __future__ import annotations

import dataclasses

from planner.errors import SolverError
from planner.plan.job import Checkpointing
from planner.progress import IncumbentFound, RunSolving, SearchState
from planner.run.run_results import Candidate
from planner.search.branch_and_bound import SearchResult, SearchSpec

_WORTHWHILE = 0.005
"""Fraction of the incumbent's step time that a plan with heterogeneous blocks has to save."""

_NODE_LIMIT = 48
"""Nodes of the solver's branch and bound in each program. They give most of the gain, and one plan on all machines."""

_RAISED_NODE_LIMIT = 4 * _NODE_LIMIT
"""Nodes when the best program is solved once more, if its relaxation leaves room for a faster plan."""

_RESOLUTION = 4
"""The number of checkpointed blocks is found to within the length of the longest list divided by this."""


def improve_with_heterogeneous_blocks(spec: SearchSpec, result: SearchResult[Candidate]) -> SearchResult[Candidate]:
    """Return ``result``, with a faster plan if separate decisions for the first blocks give one.

    Args:
        spec: the spec of the search that returned ``result``.
        result: a result that has a plan.
    """
    assert result.plan is not None
    return _Improvement(spec, result, result.plan).best()


class _Improvement:
    def __init__(self, spec: SearchSpec, result: SearchResult[Candidate], candidate: Candidate) -> None:
        self._spec, self._planner = spec, spec.planner
        self._first, self._best = candidate, candidate
        self._result, self._bound_s, self._complete = result, result.bound_s, result.complete
        self._length = max((len(blocks) for blocks in self._planner.model.blocks.lists.values()), default=0)

    def best(self) -> SearchResult[Candidate]:
        """Return the result after the variants of the run are tried.

        The number of checkpointed blocks varies only if the search chose the checkpointing mode.
        """
        if self._length < 2 or not self._complete:
            return self._result
        if len(self._spec.modes) > 1 and self._best.run.ac in ("selective", "full"):
            self._checkpoint_fewer()
        if self._best is self._first:
            self._lay_out_apart()  # otherwise the checkpointed blocks have decisions of their own already
        return dataclasses.replace(self._result, plan=self._best, bound_s=self._bound_s, complete=self._complete)

    @property
    def _may_gain(self) -> bool:
        """Whether the relaxation leaves room for a faster plan. The relaxation may mix the layouts of equal blocks.

        Plans in which only the first or the last block differs may be faster still. The relaxation charges
        communication that one of these blocks alone waits for to all blocks.
        """
        solution = self._best.solution
        assert solution is not None
        return solution.root_s is None or solution.root_s < solution.objective_s * (1.0 - _WORTHWHILE)

    def _checkpoint_fewer(self) -> None:
        """Find a small number of checkpointed blocks with which a faster plan fits, by bisection."""
        mode, (fewer, enough) = self._best.run.ac, (0, self._length)
        while enough - fewer > max(1, self._length // _RESOLUTION):
            count = (fewer + enough) // 2
            if self._improves(str(Checkpointing(mode, count)), None):
                enough = count
            else:
                fewer = count

    def _lay_out_apart(self) -> None:
        """Try separate decisions for the first k blocks: one, all but one, a half, a quarter, three quarters.

        Then other k around the best of these are tried, in halving steps.
        """
        n, tried, best = self._length, set[int](), 0
        for count in (1, n - 1, n // 2, n // 4, n - n // 4):
            if self._is_worth_trying(count, tried) and self._improves(self._best.run.ac, count):
                best = count
        step = n // 8 if best else 0
        while step:
            for count in (best - step, best + step):
                if self._is_worth_trying(count, tried) and self._improves(self._best.run.ac, count):
                    best = count
            step //= 2
        if best and self._may_gain:
            self._improves(self._best.run.ac, best, _RAISED_NODE_LIMIT)

    def _is_worth_trying(self, count: int, tried: set[int]) -> bool:
        """Return whether a number of leading blocks is new and may give a faster plan. Add it to ``tried`` if so."""
        if count in tried or not 0 < count < self._length:
            return False
        if count not in (1, self._length - 1) and not self._may_gain:
            return False
        tried.add(count)
        return True

    def _improves(self, ac: str, leading_blocks: int | None, node_limit: int = _NODE_LIMIT) -> bool:
        """Solve a variant of the best run. Return whether its plan is faster, and keep the plan if so.

        Args:
            ac: checkpointing mode of the variant.
            leading_blocks: number of first blocks in each list that have decisions of their own; None: 0.
            node_limit: nodes of the solver's branch and bound. With a raised limit the best run itself may be solved
                again.
        """
        best_run = self._best.run
        run = self._planner.run_of(best_run.mesh, best_run.micro_batches, ac, leading_blocks)
        if (run.grouping == best_run.grouping and node_limit == _NODE_LIMIT) or not self._complete:
            return False
        if not self._spec.constraints.allows(run):
            return False
        if self._spec.progress is not None:
            solving = RunSolving(
                mesh=str(run.mesh),
                micro_batches=run.micro_batches,
                ac=run.ac,
                leading_blocks=leading_blocks,
                state=self._state,
            )
            self._spec.progress(solving)
        constraints = self._spec.constraints
        try:
            candidate = self._planner.solve(
                run,
                constraints.restrict(run.mesh),
                memory_bytes=constraints.memory_bytes,
                cutoff_s=self._best.estimate.step_time_s * (1.0 - _WORTHWHILE),
                deadline=self._spec.deadline,
                node_limit=node_limit,
            )
        except SolverError:
            candidate = None  # the solver gave no answer: this variant is left out
        self._complete = not self._spec.is_over
        if candidate is None or candidate.solution is None:
            return False
        self._keep(candidate)
        return True

    @property
    def _state(self) -> SearchState:
        return SearchState(step_time_s=self._best.estimate.step_time_s, bound_s=self._bound_s)

    def _keep(self, candidate: Candidate) -> None:
        solution = candidate.solution
        assert solution is not None
        self._best = candidate
        # Only a few of the plans with heterogeneous blocks are tried, so the relaxation is the bound of all of them.
        bound_s = solution.bound_s if solution.root_s is None else solution.root_s
        self._bound_s = min(self._bound_s, bound_s)
        if self._spec.progress is not None:
            self._spec.progress(IncumbentFound(mesh=str(candidate.run.mesh), state=self._state))
