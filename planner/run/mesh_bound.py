"""Lower bounds on the step time of every run on a mesh: of all its runs, and of its runs with a given choice.

All bounds come from one linear relaxation: that of the run in the fewest micro-batches, without checkpointing. It
bounds every other run on the mesh for three reasons:

- More micro-batches do the same work in smaller pieces.
- A layout that divides a smaller micro-batch evenly also divides a larger one.
- Checkpointing adds work.

The reduced costs of the relaxation bound the runs with a given choice. Its memory cap counts static memory alone
(parameters and optimizer states), which all runs have. If replicated parameters exceed the cap, the relaxation shards
them and pays for their all-gathers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.layouts.layout import Layout, MeshSpec
from planner.errors import SolverError
from planner.formulation.formulate import Formulation
from planner.ilp.relaxation import Relaxer, least_static_bytes
from planner.pricing.storage_options import StorageOption
from planner.strategies.enumerate import Strategy


@dataclass(slots=True, kw_only=True, eq=False)
class MeshBound:
    """Lower bounds on the step time of every run on a mesh, in seconds.

    Attributes:
        mesh: the mesh.
        recompute_s: seconds of recomputation per step that the bounds include, as every run has at least so much.
        bound_s: bound of all runs.
        strategies: for each region class, strategy -> bound of the runs that choose it.
        stored: for each parameter class, (stored layout, axes over which its FSDP group is all-gathered; None: it is
            in no FSDP group) -> bound of the runs that choose both.
    """

    mesh: MeshSpec
    recompute_s: float
    bound_s: float
    strategies: tuple[Mapping[Strategy, float], ...]
    stored: tuple[Mapping[tuple[Layout, tuple[int, ...] | None], float], ...]
    _relaxer: Relaxer | None

    def choices_below(self, cutoff_s: float) -> ChoicesBelow:
        """Return a filter that accepts the choices with a bound below ``cutoff_s`` seconds."""
        return ChoicesBelow(mesh_bound=self, cutoff_s=cutoff_s)

    def with_recompute(self, recompute_s: float) -> float:
        """Return a lower bound in seconds on runs with at least ``recompute_s`` seconds of recomputation per step."""
        if recompute_s <= self.recompute_s:
            return self.bound_s
        assert self._relaxer is not None
        try:
            relaxed = self._relaxer.uncapped(recompute_s)
        except SolverError:
            return self.bound_s
        return self.bound_s if relaxed is None else max(relaxed.bound_s, self.bound_s)

    def within_cap(self, cutoff_s: float) -> float:
        """Return a lower bound in seconds on the step time of the relaxed run under the full memory cap.

        The result is ``cutoff_s`` at most. The cap stays in the program, so this has to be the last bound to compute.
        """
        if self._relaxer is None:
            return min(self.bound_s, cutoff_s)
        try:
            relaxed = self._relaxer.capped(cutoff_s)
        except SolverError:
            return min(self.bound_s, cutoff_s)
        return cutoff_s if relaxed is None else min(relaxed.bound_s, cutoff_s)

    def without_program(self) -> MeshBound:
        """Return a copy without the program, to send to a process. `with_recompute` fails on it."""
        return dataclasses.replace(self, _relaxer=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesBelow:
    """A `ChoiceFilter` that accepts the choices on a mesh with a bound below ``cutoff_s`` seconds."""

    mesh_bound: MeshBound
    cutoff_s: float

    def strategy(self, index: int, choice: Strategy) -> bool:
        # A variant that re-all-gathers its inputs in backward takes no less time than the one that saves them.
        plain = dataclasses.replace(choice, reallgathered=()) if choice.reallgathered else choice
        return self.mesh_bound.strategies[index].get(plain, self.mesh_bound.bound_s) < self.cutoff_s

    def stored(self, index: int, choice: StorageOption) -> bool:
        key = choice.stored, choice.fsdp_axes
        return self.mesh_bound.stored[index].get(key, self.mesh_bound.bound_s) < self.cutoff_s


def bound_mesh(
    mesh: MeshSpec, formulation: Formulation, memory_bytes: float, recompute_s: float = 0.0
) -> MeshBound | None:
    """Return the lower bounds on a mesh, from the program of its run in the fewest micro-batches.

    None where the relaxation has no solution. If the solver does not answer in time, all bounds are 0.

    Args:
        mesh: the mesh of the run.
        formulation: the program of the run in the fewest micro-batches, without checkpointing.
        memory_bytes: cap on the peak per device.
        recompute_s: seconds of recomputation per step that every run has at least.
    """
    if least_static_bytes(formulation.problem) > memory_bytes:
        return None  # the simplex would take long to prove it
    regions, parameters = len(formulation.strategies), len(formulation.stored)
    relaxer = Relaxer(formulation.problem, memory_bytes, static_bytes=memory_bytes)
    try:
        relaxed = relaxer.uncapped(recompute_s)
    except SolverError:
        no_bounds: dict[Any, float] = {}
        return MeshBound(
            mesh=mesh,
            recompute_s=math.inf,
            bound_s=0.0,
            strategies=(no_bounds,) * regions,
            stored=(no_bounds,) * parameters,
            _relaxer=None,
        )
    if relaxed is None:
        return None
    strategies = [
        dict(zip(choices, times, strict=True))
        for choices, times in zip(formulation.strategies, relaxed.choice_bounds_s[:regions], strict=True)
    ]
    stored: list[dict[tuple[Layout, tuple[int, ...] | None], float]] = []
    for choices, times in zip(formulation.stored, relaxed.choice_bounds_s[regions : regions + parameters], strict=True):
        least_s: dict[tuple[Layout, tuple[int, ...] | None], float] = {}
        for choice, time_s in zip(choices, times, strict=True):
            key = choice.stored, choice.fsdp_axes
            least_s[key] = min(least_s.get(key, math.inf), time_s)
        stored.append(least_s)
    return MeshBound(
        mesh=mesh,
        recompute_s=recompute_s,
        bound_s=relaxed.bound_s,
        strategies=tuple(strategies),
        stored=tuple(stored),
        _relaxer=relaxer,
    )
