"""The search over meshes without and with pipeline stages, over one shared incumbent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from cost_model.layouts.layout import MeshSpec
from planner.run.run_results import Candidate
from planner.search.branch_and_bound import Incumbent, SearchResult, SearchSpec, run_searches
from planner.search.heterogeneous_blocks import improve_with_heterogeneous_blocks
from planner.search.mesh_search import MeshSearch
from planner.search.pipeline.search import PipelineSearch
from planner.search.pipeline.stage_planners import PlannedPipeline


def search_meshes(
    spec: SearchSpec, meshes: Sequence[MeshSpec], *, heterogeneous_blocks: bool
) -> SearchResult[Candidate]:
    """Return the fastest plan without pipeline stages.

    Args:
        spec: the spec of the search.
        meshes: the meshes to choose from.
        heterogeneous_blocks: whether the first blocks may have decisions of their own.

    Raises:
        SolverError: time was up before any plan was found.
    """
    result = MeshSearch(spec, Incumbent(mip_gap=spec.planner.job.mip_gap)).best(meshes)
    if result.plan is None or not heterogeneous_blocks:
        return result
    return improve_with_heterogeneous_blocks(spec, result)


def search_pipelines(
    spec: SearchSpec, *, axes: int, only: tuple[int, MeshSpec] | None = None, incumbent: Incumbent | None = None
) -> SearchResult[PlannedPipeline]:
    """Return the fastest plan in pipeline stages.

    Args:
        spec: the spec of the search.
        axes: largest number of axes of a stage's mesh.
        only: the one number of stages and the mesh of a stage to search; None: all.
        incumbent: the incumbent that a pipeline has to beat; None: there is none yet.
    """
    incumbent = incumbent or Incumbent(mip_gap=spec.planner.job.mip_gap)
    return PipelineSearch(spec, incumbent, only=only, axes=axes).best()


def search_meshes_and_pipelines(
    spec: SearchSpec, meshes: Sequence[MeshSpec], *, axes: int, heterogeneous_blocks: bool
) -> tuple[SearchResult[Candidate], SearchResult[PlannedPipeline]]:
    """Return the results without and with pipeline stages. The second has a plan only if it is faster than the first.

    Args:
        spec: the spec of both searches.
        meshes: the meshes without stages to choose from.
        axes: largest number of axes of a stage's mesh.
        heterogeneous_blocks: whether the first blocks may have decisions of their own in plans without stages.

    Raises:
        SolverError: time was up before any plan was found.
    """
    mip_gap = spec.planner.job.mip_gap
    if heterogeneous_blocks:
        result = search_meshes(spec, meshes, heterogeneous_blocks=True)
        incumbent = Incumbent(mip_gap=mip_gap, finished_bound_s=result.bound_s)
        if result.plan is not None:
            incumbent.improve(result.plan.estimate.step_time_s)
        return result, search_pipelines(spec, axes=axes, incumbent=incumbent)
    incumbent = Incumbent(mip_gap=mip_gap)
    mesh_search, pipeline_search = MeshSearch(spec, incumbent), PipelineSearch(spec, incumbent, axes=axes)
    mesh_search.start(meshes)
    pipeline_search.start()
    run_searches(spec.pool, [mesh_search, pipeline_search])
    result, piped = mesh_search.result(), pipeline_search.result()
    cutoff_s = math.inf if result.plan is None else result.plan.estimate.step_time_s * (1.0 - mip_gap)
    if piped.plan is not None and piped.plan.step_time_s >= cutoff_s:
        piped = dataclasses.replace(piped, plan=None)
    return result, piped
