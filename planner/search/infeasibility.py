"""The report that no plan fits: the least memory that is enough, the largest tensors, a cluster that is enough."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec, split_factor
from planner.errors import InfeasibleError
from planner.formulation.decision import Decision, decision_from_assignment
from planner.ilp.relaxation import least_memory_bound
from planner.ilp.solve import least_memory
from planner.liveness.structure import Structure
from planner.pricing.run_spec import Run
from planner.run.run_planner import RunPlanner, without_mismatched
from planner.search.worker_context import Restrict, SearchConstraints

_DOUBLINGS = 6
"""Times that the number of nodes is doubled at most, in search of a cluster that is large enough."""

_MESHES_TRIED = 4
"""Meshes to try on a larger cluster: that of one axis, and those whose inner axis is nearest in size to a node."""

_NO_GAIN = 0.95
"""If twice the devices need more than this fraction of the least memory per device, more devices do not help."""

_EXACT = 1e-4
_NEAR = 0.01
"""Relative gaps to which the least memory is solved; a report takes `_NEAR`, as `_EXACT` is up to 20 times slower."""

Larger = Callable[[ClusterSpec], tuple[Sequence[MeshSpec], Sequence[int]]]
"""Cluster -> (its meshes, the numbers of micro-batches that may be tried on it, ascending)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The decision of a run that has the lowest peak memory: ``nbytes`` per device."""

    nbytes: float
    run: Run
    structure: Structure
    decision: Decision


def infeasibility_report(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    constraints: SearchConstraints,
    larger: Larger,
) -> InfeasibleError:
    """Return the error that no plan fits. It says which memory per device, or which larger cluster, would be enough.

    Args:
        planner: the planner of the search, which found no plan.
        meshes: the meshes that were searched.
        counts: numbers of micro-batches that were searched.
        modes: checkpointing modes that were searched, the one that saves least last.
        constraints: the constraints that no plan meets.
        larger: returns the search space of a larger cluster.
    """
    least = least_memory_run(planner, meshes, counts, modes, constraints.restrict, gap=_NEAR)
    if least is None:
        return InfeasibleError(
            "no layout of this model divides evenly over these meshes and this batch.",
            budget_bytes=constraints.memory_bytes,
            least_bytes=None,
            what_to_do="Choose another mesh, or a batch that the mesh divides.",
        )
    return InfeasibleError(
        budget_bytes=constraints.memory_bytes,
        least_bytes=math.ceil(least.nbytes),
        largest_tensors=_largest_tensors(least),
        enough=_large_enough_cluster(planner, modes[-1], constraints, larger),
    )


def least_memory_run(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    restrict: Restrict,
    *,
    gap: float = _EXACT,
) -> LeastMemory | None:
    """Return the decision with the least memory over all runs, to a relative gap; None if no run has a layout."""
    runs = [planner.run_of(*each) for each in itertools.product(meshes, counts, modes)]
    return _least(planner, runs, restrict, gap=gap)[0]


def _least(
    planner: RunPlanner,
    runs: Sequence[Run],
    restrict: Restrict,
    enough_bytes: float | None = None,
    *,
    gap: float = _NEAR,
) -> tuple[LeastMemory | None, float]:
    """Return the decision with the least memory over all ``runs``, and a lower bound in bytes per device on all runs.

    The search is best first. A run's bound is first that of its structure, then that of its relaxation, and last the
    memory of its solution.

    Args:
        planner: the planner of the runs.
        runs: the runs to compare.
        restrict: mesh -> the choices that are allowed on it.
        enough_bytes: bytes per device that are enough: the first decision within them is returned, or None if there is
            no such decision. Without it the search ends at the least memory.
        gap: relative gap to which each run is solved.
    """
    numbers = itertools.count()
    heap: list[tuple[float, int, Run, LeastMemory | None]] = [
        (planner.least_memory_bytes(run), next(numbers), run, None) for run in runs
    ]
    heapq.heapify(heap)
    relaxed: set[Run] = set()
    while heap:
        bound_bytes, _, run, least = heapq.heappop(heap)
        if enough_bytes is not None and bound_bytes > enough_bytes:
            return None, bound_bytes
        if least is not None:
            return least, bound_bytes
        if run in relaxed:
            least = _least_of_run(planner, run, restrict, gap)
            if least is not None:
                if enough_bytes is not None and least.nbytes <= enough_bytes:
                    return least, bound_bytes
                heapq.heappush(heap, (least.nbytes, next(numbers), run, least))
            continue
        relaxed.add(run)
        formulation = planner.formulate(run, restrict(run.mesh)).formulation
        relaxed_bytes = None if formulation is None else least_memory_bound(formulation.problem)
        if relaxed_bytes is not None:
            heapq.heappush(heap, (relaxed_bytes, next(numbers), run, None))
    return None, math.inf


def _least_of_run(planner: RunPlanner, run: Run, restrict: Restrict, gap: float) -> LeastMemory | None:
    """Return the decision of ``run`` with the least memory that DTensor can run; None if there is none."""
    formulator, structure, formulation = planner.formulate(run, restrict(run.mesh))
    while formulation is not None:
        solution = least_memory(formulation.problem, gap)
        if solution is None:
            return None
        assignment, nbytes = solution
        decision = decision_from_assignment(formulation, assignment)
        mismatched = planner.mismatched_regions(run, formulation, decision)
        if not mismatched:
            return LeastMemory(nbytes=nbytes, run=run, structure=structure, decision=decision)
        formulation = without_mismatched(formulator, formulation, decision, mismatched)
    return None


def _large_enough_cluster(planner: RunPlanner, mode: str, constraints: SearchConstraints, larger: Larger) -> str | None:
    """Return the name of the smallest cluster that the job fits on, with 2, 4, 8, ... times the nodes; None if none.

    On each cluster the usual meshes are tried in three micro-batch sizes: the smallest, the smallest that all devices
    divide, and the largest, which accumulates gradients over the fewest micro-batches. The search ends early if twice
    the devices make little difference.

    Args:
        planner: the planner of the job on its own cluster.
        mode: the checkpointing mode that saves least.
        constraints: the constraints on every plan.
        larger: returns the search space of a larger cluster.
    """
    before, per_node = math.inf, planner.cluster.devices_per_node
    for doublings in range(1, _DOUBLINGS + 1):
        cluster = dataclasses.replace(planner.cluster, nodes=planner.cluster.nodes << doublings)
        meshes, counts = larger(cluster)
        if not counts:
            return None  # the batch does not divide over so many devices, nor over more
        larger_planner = RunPlanner(planner.model, planner.job, cluster, planner.batch, planner.clock)
        even = [count for count in counts if planner.batch // count % cluster.size == 0]
        micro_batch_counts = dict.fromkeys([counts[-1], *even[-1:], counts[0]])
        usual = sorted(meshes, key=lambda mesh: (len(mesh.shape), abs(math.log2(mesh.shape[-1] / per_node))))
        runs = [
            larger_planner.run_of(mesh, count, mode) for mesh in usual[:_MESHES_TRIED] for count in micro_batch_counts
        ]
        least, bound_bytes = _least(larger_planner, runs, constraints.restrict, constraints.memory_bytes)
        if least is not None:
            return cluster.name
        if bound_bytes > before * _NO_GAIN:
            return None
        before = bound_bytes
    return None


def _largest_tensors(least: LeastMemory) -> tuple[tuple[str, int], ...]:
    """Return the three largest tensors of a decision on one device, as (name, bytes)."""
    structure, mesh_shape = least.structure, least.run.mesh.shape
    values, names = structure.regions.graph.values, structure.regions.graph.parameters
    rows: list[tuple[str, int]] = []
    for parameter, choice in zip(structure.parameters, least.decision.stored, strict=True):
        nbytes = values[parameter.values[0]].nbytes // split_factor(choice.stored, mesh_shape)
        rows.append((names[parameter.values[0]][0], nbytes))
    for index, strategy in enumerate(least.decision.strategies):
        region = structure.representative(index)
        for position, slot in enumerate(region.slots):
            layout = strategy.forward[position]
            if slot.origin == "op" and layout is not None:
                nbytes = slot.value.nbytes // split_factor(layout, mesh_shape)
                rows.append((f"{region.fqn or '(root)'}:{slot.value.name}", nbytes))
    return tuple(sorted(rows, key=lambda row: -row[1])[:3])
