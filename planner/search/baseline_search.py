"""The best plan of each baseline that people launch: DDP, FSDP, HSDP, FSDP with tensor parallelism.

A baseline restricts the integer program to few choices (`planner.run.baselines`). Its search is a `MeshSearch` on its
own meshes, with an incumbent of its own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import SolverError
from planner.plan.estimate import BaselinePrice
from planner.run.run_results import Candidate
from planner.search.branch_and_bound import Incumbent, SearchResult, SearchSpec
from planner.search.infeasibility import least_memory_run
from planner.search.mesh_search import MeshSearch
from planner.search.mixed_checkpointing import mix_checkpointing
from planner.search.worker_context import Restrict

TRAINING = ("ddp", "fsdp", "hsdp", "fsdp-tp")
INFERENCE = ("ddp", "tp")

_LEAST_MEMORY_GAP = 0.01
"""Relative gap to which the least memory of a baseline that does not fit is solved."""

_LEAST_MEMORY_S = 1.5
"""Seconds for the least memory of a baseline that does not fit; what was found by then is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSpace:
    """The meshes of a baseline on one cluster, and how many ranks split the batch on each.

    Attributes:
        name: the baseline.
        meshes: mesh -> number of ranks that split the batch.
    """

    name: str
    meshes: tuple[tuple[MeshSpec, int], ...]

    def counts(self, batch: int, counts: Sequence[int]) -> list[tuple[MeshSpec, list[int]]]:
        """Return each mesh that splits a batch evenly, with the numbers of micro-batches for which it does.

        Args:
            batch: samples in the global batch.
            counts: numbers of micro-batches to choose from.
        """
        even = [(mesh, [c for c in counts if batch // c % ranks == 0]) for mesh, ranks in self.meshes]
        return [(mesh, divided) for mesh, divided in even if divided]


def baseline_space(name: str, cluster: ClusterSpec) -> BaselineSpace | None:
    """Return the meshes of a baseline, with axes named by what they do; None: there is none on this cluster.

    FSDP with tensor parallelism, and tensor parallelism with replicas, have a tensor-parallel axis of 2, 4, 8, ...
    ranks within a node.
    """
    size, per_node = cluster.size, cluster.devices_per_node
    if name == "ddp":
        return BaselineSpace(name=name, meshes=((_mesh(dp=size), size),))
    if name == "fsdp":
        return BaselineSpace(name=name, meshes=((_mesh(fsdp=size), size),)) if size > 1 else None
    if name == "hsdp":
        hybrid = ((_mesh(dp=cluster.nodes, fsdp=per_node), size),)
        return BaselineSpace(name=name, meshes=hybrid) if cluster.nodes > 1 < per_node else None
    splits = [1 << exponent for exponent in range(1, per_node.bit_length()) if per_node % (1 << exponent) == 0]
    if name == "fsdp-tp":
        meshes = [(_mesh(fsdp=size // tp, tp=tp), size // tp) for tp in splits if tp < size]
    else:
        meshes = [(_mesh(dp=size // tp, tp=tp) if tp < size else _mesh(tp=tp), size // tp) for tp in splits]
    return BaselineSpace(name=name, meshes=tuple(meshes)) if meshes else None


def _mesh(**axes: int) -> MeshSpec:
    return MeshSpec(axes=tuple(axes.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedBaseline:
    """A baseline with its price, and its best plan.

    Attributes:
        result: the outcome of its search; without a plan where none fits.
    """

    price: BaselinePrice
    result: SearchResult[Candidate]


def search_baselines(
    spec: SearchSpec, cluster: ClusterSpec, restriction: Callable[[str], Restrict]
) -> tuple[PricedBaseline, ...]:
    """Return the best plan of each baseline that the job's phase and the cluster have, the simplest baseline first.

    Baselines for which time was up are left out.

    Args:
        spec: the job's search. Its constraints give the memory cap alone.
        cluster: the job's cluster.
        restriction: name of a baseline -> mesh -> the choices that it allows.
    """
    names = TRAINING if spec.planner.job.training else INFERENCE
    spaces = [baseline_space(name, cluster) for name in names]
    priced = [search_baseline(spec, space, restriction) for space in spaces if space is not None]
    return tuple(baseline for baseline in priced if baseline is not None)


def search_baseline(
    spec: SearchSpec, space: BaselineSpace, restriction: Callable[[str], Restrict]
) -> PricedBaseline | None:
    """Return the best plan of a baseline at its best mesh, number of micro-batches and checkpointing.

    None where time was up before a plan was found. Where no plan fits, the price has the least memory of its runs in
    the largest and in the smallest micro-batches with the most checkpointing, to 1 %.

    Args:
        spec: the job's search. Its constraints give the memory cap alone.
        space: the meshes of the baseline.
        restriction: name of a baseline -> mesh -> the choices that it allows.
    """
    meshes = space.counts(spec.planner.batch, spec.micro_batch_counts)
    if not meshes:
        absent: SearchResult[Candidate] = SearchResult(plan=None, bound_s=math.inf, complete=True)
        return PricedBaseline(price=BaselinePrice(name=space.name, mesh=str(space.meshes[0][0])), result=absent)
    constraints = dataclasses.replace(spec.constraints, restrict=restriction(space.name))
    own = dataclasses.replace(spec, constraints=constraints, pool=spec.pool.in_this_process(), progress=None)
    try:
        result = search_even_meshes(own, meshes)
    except SolverError:
        return None
    price = _least_memory(own, space.name, meshes) if result.plan is None else _price(space.name, result.plan)
    return PricedBaseline(price=price, result=result)


def search_even_meshes(
    spec: SearchSpec, meshes: Sequence[tuple[MeshSpec, list[int]]], *, mixes: bool = True
) -> SearchResult[Candidate]:
    """Return the fastest plan on ``meshes``, each with numbers of micro-batches of its own.

    Args:
        spec: the job's search.
        meshes: each mesh with its numbers of micro-batches.
        mixes: whether plans that checkpoint some blocks less than others are tried on its mesh as well.

    Raises:
        SolverError: time was up before any plan was found.
    """
    incumbent, best = Incumbent(mip_gap=spec.planner.job.mip_gap), None
    bound_s, complete = math.inf, True
    for mesh, counts in meshes:
        search = MeshSearch(dataclasses.replace(spec, micro_batch_counts=counts), incumbent)
        result = search.best([mesh])
        bound_s, complete = min(bound_s, result.bound_s), complete and result.complete
        plan = result.plan
        if plan is not None and (best is None or plan.estimate.step_time_s < best.estimate.step_time_s):
            best = plan
            incumbent.improve(plan.estimate.step_time_s)
    result = SearchResult(plan=best, bound_s=bound_s, complete=complete)
    return result if best is None or not mixes else mix_checkpointing(spec, result, dict(meshes)[best.run.mesh])


def _price(name: str, plan: Candidate) -> BaselinePrice:
    return BaselinePrice(
        name=name,
        mesh=str(plan.run.mesh),
        step_time_s=plan.estimate.step_time_s,
        peak_memory_bytes=plan.estimate.peak_memory_bytes,
        micro_batches=plan.run.micro_batches,
        ac=plan.run.ac,
    )


def _least_memory(spec: SearchSpec, name: str, meshes: Sequence[tuple[MeshSpec, list[int]]]) -> BaselinePrice:
    """Return the price of a baseline that does not fit: its least memory, and the run that has it."""
    deadline = time.perf_counter() + _LEAST_MEMORY_S
    results = [
        least_memory_run(
            spec.planner,
            [mesh],
            sorted({counts[0], counts[-1]}),
            [spec.modes[-1]],
            spec.constraints,
            gap=_LEAST_MEMORY_GAP,
            deadline=deadline,
        )
        for mesh, counts in meshes
    ]
    found = [result.least for result in results if result.least is not None]
    least = min(found, key=lambda run: run.nbytes, default=None)
    if least is None:
        return BaselinePrice(name=name, mesh=str(meshes[0][0]))
    return BaselinePrice(
        name=name,
        mesh=str(least.run.mesh),
        peak_memory_bytes=math.ceil(least.nbytes),
        micro_batches=least.run.micro_batches,
        ac=least.run.ac,
    )
