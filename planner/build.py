"""`build_plan`: one model, one plan."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule
from planner.plan.checks import check_mesh
from planner.plan.job_spec import JobOptions, spec_fields, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress
from planner.run import baselines
from planner.session import PlanningSession

F = TypeVar("F", bound=Callable[..., Any])


def _shows_job_options(function: F) -> F:
    """Let ``help`` and notebooks show the fields of `JobSpec` in the place of ``**options``."""
    signature = inspect.signature(function)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.required else item.default,
            annotation=item.type,
        )
        for item in spec_fields()
    ]
    lines = "\n".join(f"        {item.name}: {item.option.help}" for item in spec_fields())
    function.__doc__ = (function.__doc__ or "").replace("        options: the fields of `JobSpec`.", lines)
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


@_shows_job_options
def build_plan(
    model: nn.Module | TracedModule,
    *,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[JobOptions],
) -> ShardingPlan:
    """Return the fastest plan for a step of ``model`` on ``cluster`` within its memory.

    Args:
        model: any module; it is not changed, and may be on the meta device. Or a result of `trace_module`.
        example_inputs: arguments of one call with the global batch (tuple or dict); None: made from a Hugging Face
            config.
        tp_plan: the expert plan for the planner "tensor-parallel"; None takes the model's own.
        progress: called with each event of the search.
        options: the fields of `JobSpec`.

    Raises:
        PlannerError: the request cannot be planned; `InfeasibleError` where nothing fits, `SolverError` where the time
            limit was reached before any plan was found.
    """
    spec = spec_of(options)
    baselines.parse_planner(spec.planner)
    cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
    mesh = MeshSpec.parse(spec.mesh) if isinstance(spec.mesh, str) else spec.mesh
    if mesh is not None:
        check_mesh(mesh, cluster)
    micro_batches = baselines.micro_batches_for(spec.planner, spec.micro_batches)
    session = PlanningSession(
        model,
        spec=dataclasses.replace(spec, cluster=cluster, micro_batches=micro_batches),
        example_inputs=example_inputs,
        tp_plan=tp_plan,
        progress=progress,
    )
    return session.plan(planner=spec.planner, mesh=mesh)
