"""`build_plan`: the plan of one model, in one call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.auto_techniques import plan_with_auto_techniques
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule
from planner.plan.checks import check_mesh
from planner.plan.job_spec import JobOptions, JobSpec, spec_fields, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import Progress
from planner.run import baselines
from planner.session import PlanningSession

F = TypeVar("F", bound=Callable[..., Any])


def _shows_job_options(function: F) -> F:
    """Return ``function`` with the fields of `JobSpec` in its docstring and signature, in place of ``**options``."""
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
    """Return the plan with the least step time for ``model`` that fits the memory of the devices of ``cluster``.

    Args:
        model: a module, which is not changed and may be on the meta device; or the result of `trace_module`.
        example_inputs: arguments (tuple) or keyword arguments (dict) of one model call with the global batch. None: the
            model's Hugging Face config gives them.
        tp_plan: FQN pattern of modules -> tensor-parallel style, for the planner "tensor-parallel". None: the plan that
            the model carries.
        progress: called with each event of the search.
        options: the fields of `JobSpec`.

    Raises:
        PlannerError: the request cannot be planned. `InfeasibleError`: no plan fits the memory. `SolverError`: the time
            limit came before any plan was found.
    """
    spec = spec_of(options)
    baselines.parse_planner(spec.planner)
    cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
    mesh = MeshSpec.parse(spec.mesh) if isinstance(spec.mesh, str) else spec.mesh
    if mesh is not None:
        check_mesh(mesh, cluster)
    micro_batches = baselines.micro_batches_for(spec.planner, spec.micro_batches)
    spec = dataclasses.replace(spec, cluster=cluster, mesh=mesh, micro_batches=micro_batches)
    return plan_of_spec(model, spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)


def plan_of_spec(
    model: nn.Module | TracedModule,
    spec: JobSpec,
    *,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ShardingPlan:
    """Return the plan of ``spec``, with the planner, mesh and techniques that it names; see `build_plan`."""
    if spec.is_auto:
        return plan_with_auto_techniques(model, spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
    session = PlanningSession(model, spec=spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
    return session.plan(planner=spec.planner, mesh=spec.mesh)
