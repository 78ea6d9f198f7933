"""The report that no plan fits: the least memory that is enough, the largest tensors, a cluster that is enough."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cost_model import ClusterSpec, reserve_bytes
from cost_model.layouts.layout import MeshSpec, split_factor
from planner.errors import InfeasibleError
from planner.run.run_planner import RunPlanner
from planner.search.least_memory import NEAR, LeastMemory, LeastMemoryResult, LeastMemorySearch, all_runs
from planner.search.worker_context import SearchConstraints

_ANSWER_S = 3.0
"""Seconds that a refusal may take, from the start of tracing. What is not proved by then is reported as a bound."""

_LEAST_S = 1.5
"""Seconds for the least memory, if tracing and the search took most of `_ANSWER_S`."""

_CHECK_S = 2.0
"""Seconds for `find_infeasible`, which is in vain if a plan fits after all."""

_TIGHT = 0.7
"""If the least bound in closed form is above this fraction of the cap, it is worth a relaxation whether a plan fits."""

_UNDECIDED = 0.03
"""If time is up, the least memory that was found is above the cap by more than `NEAR`, to which it was solved, and its
bound is within this fraction of it, no plan is searched for. Whether one fits is not proved, and the search for it can
take minutes."""

_DOUBLINGS = 6
"""Times that the number of nodes is doubled at most, in search of a cluster that is large enough."""

_MESHES_TRIED = 4
"""Meshes to try on a larger cluster: that of one axis, and those whose inner axis is nearest in size to a node."""

_NO_GAIN = 0.95
"""If twice the devices need more than this fraction of the least memory per device, more devices do not help."""

Larger = Callable[[ClusterSpec], tuple[Sequence[MeshSpec], Sequence[int]]]
"""Cluster -> (its meshes, the numbers of micro-batches that may be tried on it, ascending)."""


def infeasibility_report(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    constraints: SearchConstraints,
    larger: Larger,
    *,
    started: float,
    known: LeastMemoryResult | None = None,
) -> InfeasibleError | None:
    """Return the error that no plan fits. It says which memory per device, or which larger cluster, would be enough.

    None: no run has a layout, whatever its memory.

    Args:
        planner: the planner of the search, which found no plan.
        meshes: the meshes that were searched.
        counts: numbers of micro-batches that were searched.
        modes: checkpointing modes that were searched, the one that saves least last.
        constraints: the constraints that no plan meets.
        larger: returns the search space of a larger cluster.
        started: time of `time.perf_counter` at which the request came.
        known: the least memory, as `find_infeasible` returns it; None: not known.
    """
    deadline = _deadline(planner, started)
    result = known if known is not None and known.least is not None else None
    if result is None:
        result = least_memory_run(planner, meshes, counts, modes, constraints, gap=NEAR, deadline=deadline)
    if result.least is None and math.isinf(result.bound_bytes):
        return None
    # Where the search proved that no plan fits, the cap is a bound too.
    is_proved = known is None or known.bound_bytes > constraints.memory_bytes
    bound_bytes = max(math.floor(result.bound_bytes), constraints.memory_bytes if is_proved else 0)
    least = result.least
    # Without a proof the time is spent.
    enough = _large_enough_cluster(planner, modes[-1], constraints, larger, deadline if is_proved else 0.0)
    return InfeasibleError(
        budget_bytes=constraints.memory_bytes,
        least_bytes=None if least is None else math.ceil(least.nbytes),
        bound_bytes=None if result.is_within(NEAR) and is_proved else bound_bytes,
        largest_tensors=() if least is None else _largest_tensors(least),
        enough=enough.name,
        remedies=_remedies(planner, counts, modes, more_devices=enough.may_help and enough.name is None),
    )


def find_infeasible(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    constraints: SearchConstraints,
    *,
    has_pipelines: bool,
) -> LeastMemoryResult | None:
    """Return the least memory where it is quickly shown that no plan fits, or hardly any; None where a plan may fit.

    The proof is a bound in closed form, or, where this is near the cap, a short search for the least memory. The result
    is of that search; without one it is a bound alone. If the job may have pipeline stages (``has_pipelines``), only
    the bound on parameters and optimizer states is a proof.

    When time is up, the least memory found may be above the cap and its bound, by a few per cent, below it. That is no
    proof, and is returned too (`_UNDECIDED`).
    """
    cap = constraints.memory_bytes
    some_run = planner.run_of(meshes[0], counts[0], modes[-1])
    static_bytes = planner.least_static_bytes(some_run)
    if static_bytes > cap:
        return LeastMemoryResult(least=None, bound_bytes=static_bytes)
    if has_pipelines:
        return None
    # Runs of large micro-batches come first: the search needs their structures anyway.
    runs = all_runs(planner, meshes[:1], counts, modes[::-1])
    lowest_bytes = math.inf
    for run in runs:
        lowest_bytes = min(lowest_bytes, planner.least_memory_bytes(run))
        if lowest_bytes <= cap * _TIGHT:
            return None
    if lowest_bytes > cap:
        return LeastMemoryResult(least=None, bound_bytes=lowest_bytes)
    deadline = time.perf_counter() + _CHECK_S
    search = LeastMemorySearch(planner, constraints.restrict, gap=NEAR, deadline=deadline)
    result = search.run(all_runs(planner, meshes, counts, modes), enough_bytes=cap)
    is_late = time.perf_counter() >= deadline
    is_above = result.least is not None and result.least.nbytes * (1.0 - NEAR) > cap
    is_undecided = is_above and is_late and result.is_within(_UNDECIDED)
    return result if result.bound_bytes > cap or is_undecided else None


def _deadline(planner: RunPlanner, started: float) -> float:
    """Return the time of `time.perf_counter` by which a refusal of a request from ``started`` should be answered."""
    answer_s = _ANSWER_S - planner.clock.spent.get("trace_s", 0.0)
    return max(started + answer_s, time.perf_counter() + _LEAST_S)


def least_memory_run(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    modes: Sequence[str],
    constraints: SearchConstraints,
    *,
    gap: float,
    deadline: float | None = None,
) -> LeastMemoryResult:
    """Return the decision with the least memory over all runs of a search space, to a relative gap."""
    search = LeastMemorySearch(planner, constraints.restrict, gap=gap, deadline=deadline)
    return search.run(all_runs(planner, meshes, counts, modes))


class _LargerCluster(NamedTuple):
    """The outcome of the search for a larger cluster.

    Attributes:
        name: the smallest cluster on which a plan was found to fit; None: none was found.
        may_help: False where more devices were found to change little.
    """

    name: str | None
    may_help: bool


def _large_enough_cluster(
    planner: RunPlanner, mode: str, constraints: SearchConstraints, larger: Larger, deadline: float
) -> _LargerCluster:
    """Return the smallest cluster that the job fits on, with 2, 4, 8, ... times the nodes.

    On each cluster the usual meshes are tried in three micro-batch sizes: the smallest, the smallest that all devices
    divide, and the largest, which accumulates gradients over the fewest micro-batches. The search ends early if twice
    the devices make little difference.

    Args:
        planner: the planner of the job on its own cluster.
        mode: the checkpointing mode that saves least.
        constraints: the constraints on every plan.
        larger: returns the search space of a larger cluster.
        deadline: time of `time.perf_counter` at which the search ends without a cluster.
    """
    if reserve_bytes(planner.cluster.device) > constraints.memory_bytes:
        return _LargerCluster(None, may_help=False)
    before, per_node = math.inf, planner.cluster.devices_per_node
    for doublings in range(1, _DOUBLINGS + 1):
        if time.perf_counter() >= deadline:
            break
        cluster = dataclasses.replace(planner.cluster, nodes=planner.cluster.nodes << doublings)
        meshes, counts = larger(cluster)
        if not counts:
            return _LargerCluster(None, may_help=False)  # the batch does not divide over so many devices, nor over more
        larger_planner = RunPlanner(
            planner.model, planner.job, cluster, planner.batch, planner.clock, share_with=planner
        )
        even = [count for count in counts if planner.batch // count % cluster.size == 0]
        micro_batch_counts = dict.fromkeys([counts[-1], *even[-1:], counts[0]])
        usual = sorted(meshes, key=lambda mesh: (len(mesh.shape), abs(math.log2(mesh.shape[-1] / per_node))))
        runs = all_runs(larger_planner, usual[:_MESHES_TRIED], list(micro_batch_counts), [mode])
        search = LeastMemorySearch(larger_planner, constraints.restrict, gap=NEAR, deadline=deadline)
        result = search.run(runs, enough_bytes=constraints.memory_bytes)
        if result.least is not None and result.least.nbytes <= constraints.memory_bytes:
            return _LargerCluster(cluster.name, may_help=True)
        if result.bound_bytes > before * _NO_GAIN:
            return _LargerCluster(None, may_help=False)
        before = result.bound_bytes
    return _LargerCluster(None, may_help=True)


def _remedies(planner: RunPlanner, counts: Sequence[int], modes: Sequence[str], *, more_devices: bool) -> list[str]:
    """Return what the job does not use yet and may need less memory with, for the error's advice."""
    job = planner.job
    remedies = ["more devices"] if more_devices else []
    if job.training and job.micro_batches is not None and counts[-1] < planner.batch:
        remedies.append("more micro-batches (--micro-batches)")
    if job.training and "full" not in modes and planner.model.blocks.lists:
        remedies.append("activation checkpointing (--ac full)")
    return remedies


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
