"""Why nothing fits: the least memory per device that would do, and the tensors in the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from cost_model.layout import MeshSpec, split_factor
from planner.assemble import Decision, decision_of
from planner.baselines import Restriction
from planner.errors import InfeasibleError
from planner.ilp import least_memory, least_memory_bound
from planner.run import Run
from planner.search import Search, without
from planner.structure import Structure

_LEAST_MEMORY_RUNS = 24
"""Up to so many runs are all solved for the least memory that would do, once nothing fits."""


def refuse(
    search: Search,
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
            run = search.run_of(mesh, count, mode)
            _, _, formulation = search.formulate(run, restrict(mesh))
            bound = None if formulation is None else least_memory_bound(formulation.problem)
            if bound is not None:
                bounds.append((bound, run))
    for bound, run in sorted(bounds, key=lambda pair: pair[0]):
        if least is not None and bound >= least[0]:
            break
        formulator, structure, formulation = search.formulate(run, restrict(run.mesh))
        while formulation is not None:
            found = least_memory(formulation.problem)
            if found is None:
                break
            decision = decision_of(formulation, found[0])
            refused = search.refused(run, formulation, decision)
            if not refused:
                if least is None or found[1] < least[0]:
                    least = found[1], structure, decision, run
                break
            formulation = without(formulator, formulation, decision, refused)
    if least is None:
        return InfeasibleError(
            "no layout of this model divides evenly over these meshes and this batch.",
            budget_bytes=search.memory_bytes,
            least_bytes=None,
            what_to_do="Choose another mesh, or a batch that the mesh divides.",
        )
    nbytes, structure, decision, run = least
    return InfeasibleError(
        budget_bytes=search.memory_bytes,
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
