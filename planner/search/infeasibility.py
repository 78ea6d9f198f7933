"""Why nothing fits: the least memory per device that would do, the tensors in the way, the devices that would do."""

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
from planner.run.baselines import Restriction
from planner.run.run_planner import RunPlanner, without

_DOUBLINGS = 6
"""Up to 64 times the nodes are tried."""

_MESHES_TRIED = 4
"""Of a larger cluster: all devices in a row, and those whose inner axis is nearest to a node."""

_LITTLE = 0.95
"""Of the least memory on half the devices: where it is more, devices are not what is missing."""

_EXACT = 1e-4
_NEAR = 0.01
"""By how much less memory might do than a refusal says: the last percent takes up to twenty times as long."""

Restrict = Callable[[MeshSpec], Restriction | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The decision of a run that needs the least memory."""

    nbytes: float
    run: Run
    structure: Structure
    decision: Decision


def infeasibility_report(
    search: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    restrict: Restrict,
    larger: Callable[[ClusterSpec], tuple[Sequence[MeshSpec], Sequence[int]]],
) -> InfeasibleError:
    """Return the error that says what would do: the least memory per device over all runs, and what takes it up.

    Args:
        meshes, counts, modes, restrict: of the search that found nothing.
        larger: the meshes of another cluster, and the numbers of micro-batches that may be tried on it.
    """
    least = least_memory_run(search, meshes, counts, modes, restrict, gap=_NEAR)
    if least is None:
        return InfeasibleError(
            "no layout of this model divides evenly over these meshes and this batch.",
            budget_bytes=search.memory_bytes,
            least_bytes=None,
            what_to_do="Choose another mesh, or a batch that the mesh divides.",
        )
    return InfeasibleError(
        budget_bytes=search.memory_bytes,
        least_bytes=math.ceil(least.nbytes),
        largest_tensors=_largest(least),
        enough=_enough(search, modes[-1], restrict, larger),
    )


def least_memory_run(
    search: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    restrict: Restrict,
    *,
    gap: float = _EXACT,
) -> LeastMemory | None:
    """Return what needs the least memory of all runs, to within a relative gap; None where there is no layout."""
    runs = [search.run_of(*each) for each in itertools.product(meshes, counts, modes)]
    return _least(search, runs, restrict, gap=gap)[0]


def _least(
    search: RunPlanner,
    runs: Sequence[Run],
    restrict: Restrict,
    enough_bytes: float | None = None,
    *,
    gap: float = _NEAR,
) -> tuple[LeastMemory | None, float]:
    """Return what needs the least memory of all ``runs``, and the bytes that none of them goes below.

    With ``enough_bytes`` it is the first that is found to need no more, and None where all need more.

    What has the lowest bound goes next: at first that of the structure, then the relaxation's, then what was found.
    """
    numbers = itertools.count()
    heap: list[tuple[float, int, Run, LeastMemory | None]] = [
        (search.least_memory_bytes(run), next(numbers), run, None) for run in runs
    ]
    heapq.heapify(heap)
    relaxed: set[Run] = set()
    while heap:
        least_bytes, _, run, found = heapq.heappop(heap)
        if enough_bytes is not None and least_bytes > enough_bytes:
            return None, least_bytes
        if found is not None:
            return found, least_bytes
        if run in relaxed:
            found = _least_of(search, run, restrict, gap)
            if found is not None:
                if enough_bytes is not None and found.nbytes <= enough_bytes:
                    return found, least_bytes
                heapq.heappush(heap, (found.nbytes, next(numbers), run, found))
            continue
        relaxed.add(run)
        formulation = search.formulate(run, restrict(run.mesh))[2]
        bound = None if formulation is None else least_memory_bound(formulation.problem)
        if bound is not None:
            heapq.heappush(heap, (bound, next(numbers), run, None))
    return None, math.inf


def _least_of(search: RunPlanner, run: Run, restrict: Restrict, gap: float) -> LeastMemory | None:
    """Return the decision that needs the least memory of those that DTensor runs; None where there is none."""
    formulator, structure, formulation = search.formulate(run, restrict(run.mesh))
    while formulation is not None:
        found = least_memory(formulation.problem, gap)
        if found is None:
            return None
        decision = decision_from_assignment(formulation, found[0])
        refused = search.refused(run, formulation, decision)
        if not refused:
            return LeastMemory(nbytes=found[1], run=run, structure=structure, decision=decision)
        formulation = without(formulator, formulation, decision, refused)
    return None


def _enough(
    search: RunPlanner,
    mode: str,
    restrict: Restrict,
    larger: Callable[[ClusterSpec], tuple[Sequence[MeshSpec], Sequence[int]]],
) -> str | None:
    """Return the smallest cluster seen to hold the job, its nodes doubled again and again; None where none was.

    Tried are the meshes that people take, in the smallest micro-batches, the smallest that all devices together divide,
    and the largest: the whole batch at once accumulates no gradients. Where twice the devices make little difference,
    more of them are not tried.

    Args:
        mode: of checkpointing, that which keeps least.
    """
    before, per_node = math.inf, search.cluster.devices_per_node
    for doublings in range(1, _DOUBLINGS + 1):
        cluster = dataclasses.replace(search.cluster, nodes=search.cluster.nodes << doublings)
        meshes, counts = larger(cluster)
        if not counts:
            return None  # the batch does not divide over so many devices, nor over more
        there = RunPlanner(search.model, search.job, cluster, search.batch, search.clock)
        even = [count for count in counts if search.batch // count % cluster.size == 0]
        tried = dict.fromkeys([counts[-1], *even[-1:], counts[0]])
        usual = sorted(meshes, key=lambda mesh: (len(mesh.shape), abs(math.log2(mesh.shape[-1] / per_node))))
        runs = [there.run_of(mesh, count, mode) for mesh in usual[:_MESHES_TRIED] for count in tried]
        least, least_bytes = _least(there, runs, restrict, search.memory_bytes)
        if least is not None:
            return cluster.name
        if least_bytes > before * _LITTLE:
            return None
        before = least_bytes
    return None


def _largest(least: LeastMemory) -> tuple[tuple[str, int], ...]:
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
