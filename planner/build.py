"""`build_plan`: the plan of one model in one call; `verified_plan`: a session's fastest plan that runs as planned."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.auto_techniques import auto_techniques
from planner.errors import PlanError, RunError
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule
from planner.plan.checks import check_mesh
from planner.plan.job_spec import JobOptions, JobSpec, spec_fields, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import RUNNING_ON_FAKE_PROCESSES, Progress
from planner.run import baselines, gc_pause
from planner.search.worker_context import RunKey
from planner.session import PlanningSession
from planner.verification.verify_plan import verification_of

_MOST_FAILURES = 3
"""Plans that are tried, at most, until one runs as planned."""

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
    """Return the simplest plan for ``model`` that fits the memory and takes about the least step time.

    "About" is the tolerance of the job; 0: the plan with the least step time.

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
            limit came before any plan was found. `RunError`: no plan was found that runs as planned.
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
    """Return the verified plan of ``spec``, with the planner, mesh and techniques that it names; see `build_plan`."""
    auto = None
    if spec.is_auto:
        auto = auto_techniques(model, spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
        spec = auto.spec
    session = PlanningSession(model, spec=spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
    plan = verified_plan(session, planner=spec.planner, mesh=spec.mesh, tolerance=spec.tolerance)
    return plan if auto is None else auto.recorded(plan)


def verified_plan(
    session: PlanningSession,
    *,
    planner: str = "ilp",
    mesh: str | MeshSpec | None = None,
    memory_bytes: int | None = None,
    tolerance: float | None = None,
) -> ShardingPlan:
    """Return the plan of `PlanningSession.plan`, or the next best that runs as planned, with its verification.

    A plan that does not run as planned is left out, with all plans on its mesh in its number of micro-batches and
    checkpointing mode.

    Args:
        session: the model, the cluster and the job.
        planner: as for `PlanningSession.plan`.
        mesh: as for `PlanningSession.plan`.
        memory_bytes: as for `PlanningSession.plan`.
        tolerance: as for `PlanningSession.plan`.

    Raises:
        PlannerError: as `PlanningSession.plan`. `RunError`: no plan was found that runs as planned.
    """
    plan: ShardingPlan | None = session.plan(planner=planner, mesh=mesh, memory_bytes=memory_bytes, tolerance=tolerance)
    failures: dict[RunKey, PlanError] = {}
    while plan is not None:
        try:
            return _with_verification(session, plan)
        except PlanError as error:
            failures[plan.mesh.shape, plan.micro_batches, str(plan.job.ac)] = error
        if len(failures) == _MOST_FAILURES:
            break
        plan = session.plan_if_any(
            planner=planner,
            mesh=mesh,
            memory_bytes=memory_bytes,
            tolerance=tolerance,
            excluded=frozenset(failures),
        )
    raise _no_plan_runs(failures)


def _with_verification(session: PlanningSession, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with its verification, and the seconds that it took.

    Raises:
        PlanError: the plan does not run as planned.
    """
    if session.progress is not None:
        session.progress(RUNNING_ON_FAKE_PROCESSES)
    start = time.perf_counter()
    with gc_pause.paused():
        verification = verification_of(session.module, plan, session.inputs)
    timings = {**plan.timings, "verify_s": time.perf_counter() - start}
    return dataclasses.replace(plan, verification=verification, timings=timings)


def _no_plan_runs(failures: Mapping[RunKey, PlanError]) -> RunError:
    (shape, micro_batches, ac), first = next(iter(failures.items()))
    mesh = " x ".join(map(str, shape))
    tried = "the only plan does" if len(failures) == 1 else f"{len(failures)} plans were tried, and none does"
    return RunError(
        f"no plan was found that runs as planned: {tried}. On the mesh {mesh}, {micro_batches} micro-batches, "
        f"checkpointing {ac}: {first.detail}",
        what_to_do="Give another mesh, batch or number of micro-batches, and please report this.",
        module=first.module if isinstance(first, RunError) else None,
        op=first.op if isinstance(first, RunError) else None,
    )
