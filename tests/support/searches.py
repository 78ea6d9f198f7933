"""Searches of a test: their spec, without progress and without a deadline."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.layouts.layout import MeshSpec
from planner.run.run_planner import RunPlanner
from planner.search.branch_and_bound import Incumbent, SearchSpec
from planner.search.pipeline.search import PipelineSearch
from planner.search.task_pool import Pool
from planner.search.worker_context import SearchConstraints, WorkerContext


def unrestricted(mesh: MeshSpec) -> None:
    return None


def constraints_of(memory_bytes: int) -> SearchConstraints:
    return SearchConstraints(memory_bytes=memory_bytes, restrict=unrestricted)


def spec_of(
    planner: RunPlanner, counts: Sequence[int], modes: Sequence[str], memory_bytes: int | None = None
) -> SearchSpec:
    context = WorkerContext(planner)
    return SearchSpec(
        context=context,
        micro_batch_counts=counts,
        modes=modes,
        constraints=constraints_of(planner.memory_bytes if memory_bytes is None else memory_bytes),
        pool=Pool(context),
    )


def pipeline_search(
    spec: SearchSpec, *, only: tuple[int, MeshSpec] | None = None, axes: int = 2, cutoff_s: float = float("inf")
) -> PipelineSearch:
    incumbent = Incumbent(mip_gap=spec.planner.job.mip_gap, cutoff_s=cutoff_s)
    return PipelineSearch(spec, incumbent, only=only, axes=axes)
