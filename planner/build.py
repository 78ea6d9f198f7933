"""`build_plan`: the plan of one model in one call; `verified_plan`: a session's fastest plan that runs as planned."""

from __future__ import annotations

import dataclasses
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.auto_techniques import auto_techniques
from planner.defaults.job import ModelConfig, config_of, report, with_defaults
from planner.defaults.ranks import is_first_rank
from planner.errors import ModelError, PlanError, PlannerError, RunError, SolverError
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule
from planner.plan.checks import check_mesh
from planner.plan.job_spec import JobOptions, JobSpec, spec_fields, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import RUNNING_ON_FAKE_PROCESSES, Progress
from planner.run import baselines, gc_pause
from planner.search.worker_context import RunKey
from planner.session import PlanningSession
from planner.verification.verify_plan import verified

_MOST_FAILURES = 3
"""Plans that are tried, at most, until one runs as planned."""

_LAST_RESORTS = ("fully-sharded", "data-parallel", "fsdp-tp")
"""Baselines that are given, with a note, where the search finds no plan in time, or none that runs as planned."""

F = TypeVar("F", bound=Callable[..., Any])


def shows_job_options(function: F) -> F:
    """Return ``function`` with the fields of `JobSpec` in its docstring and signature, in place of ``**options``.

    The fields are optional: `with_defaults` gives those that `JobSpec` requires.
    """
    signature = inspect.signature(function)
    own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if item.required else item.default,
            annotation=item.type,
        )
        for item in spec_fields()
    ]
    lines = "\n".join(f"        {item.name}: {item.option.help}" for item in spec_fields())
    function.__doc__ = (function.__doc__ or "").replace("        options: the fields of `JobSpec`.", lines)
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


@shows_job_options
def build_plan(
    model: nn.Module | TracedModule,
    *,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    **options: Unpack[JobOptions],
) -> ShardingPlan:
    """Return the simplest plan for ``model`` that fits the memory and takes about the least step time.

    "About" is the tolerance of the job; 0: the plan with the least step time. A cluster, batch or sequence length that
    is left out is assumed (`planner.defaults`), printed on standard error, and written into the plan. ``mesh`` may be a
    `DeviceMesh`. Every rank of a program may call this function, which does not communicate.

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
        ClusterError: the cluster cannot be read, or the GPU here is not in the catalogue.
    """
    full, assumed = with_defaults(options, _config_of(model) if example_inputs is None else None)
    spec = spec_of(full)
    if is_first_rank():
        report(f"assumed {line}" for line in assumed)
    baselines.parse_planner(spec.planner)
    cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
    mesh = MeshSpec.parse(spec.mesh) if isinstance(spec.mesh, str) else spec.mesh
    if mesh is not None:
        check_mesh(mesh, cluster)
    micro_batches = baselines.micro_batches_for(spec.planner, spec.micro_batches)
    spec = dataclasses.replace(spec, cluster=cluster, mesh=mesh, micro_batches=micro_batches)
    plan = plan_of_spec(model, spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
    return dataclasses.replace(plan, assumed=assumed)


def _config_of(model: nn.Module | TracedModule) -> ModelConfig | None:
    """Return what the Hugging Face config of ``model`` says of its inputs; None: it has none, or is traced already.

    Raises:
        ModelError: ``model`` is no module.
    """
    if isinstance(model, TracedModule):
        return None
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is a {type(model).__name__}, not an nn.Module.",
            what_to_do='Give a module; api.requests.model_registry.load_model("gpt2").module is that of a preset.',
        )
    return config_of(model)


@contextmanager
def _for_planning() -> Iterator[None]:
    """Return a context in which new tensors are on the CPU, and DTensor does not warn of random numbers.

    Planning draws none: DTensor only propagates layouts, on a mesh without processes.
    """
    # Nothing is entered where tensors are there already: a mode slows every call of torch down.
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with device, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        yield


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
    with _for_planning():
        if spec.is_auto:
            auto = auto_techniques(model, spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
            spec = auto.spec
        session = PlanningSession(model, spec=spec, example_inputs=example_inputs, tp_plan=tp_plan, progress=progress)
        plan = verified_plan(session, planner=spec.planner, mesh=spec.mesh, tolerance=spec.tolerance)
    return plan if auto is None else auto.recorded(plan)


@gc_pause.paused()
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
    checkpointing mode. Where none of them runs, or time is up before one is found, the plan is that of a baseline, and
    a note says so.

    Args:
        session: the model, the cluster and the job.
        planner: as for `PlanningSession.plan`.
        mesh: as for `PlanningSession.plan`.
        memory_bytes: as for `PlanningSession.plan`.
        tolerance: as for `PlanningSession.plan`.

    Raises:
        PlannerError: as `PlanningSession.plan`. `RunError`: no plan was found that runs as planned.
    """
    plan: ShardingPlan | None = None
    late: SolverError | None = None
    try:
        plan = session.plan(planner=planner, mesh=mesh, memory_bytes=memory_bytes, tolerance=tolerance)
    except SolverError as error:
        if planner != "ilp":
            raise
        late = error
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
    if planner == "ilp":
        cause = late or next(iter(failures.values()))
        for name in _LAST_RESORTS:
            try:
                plan = session.plan_if_any(planner=name, mesh=mesh, memory_bytes=memory_bytes)
                if plan is not None:
                    return _with_verification(session, _as_last_resort(plan, name, cause))
            except PlannerError:
                continue
    raise _no_plan_runs(failures) if late is None else late


def _as_last_resort(plan: ShardingPlan, name: str, cause: PlannerError) -> ShardingPlan:
    """Return a baseline's plan with a note on why it is given."""
    if isinstance(cause, SolverError):
        note = f"this is the plan of {name}, as the search found none: {cause}"
    else:
        note = f"this is the plan of {name}: faster plans were found, and do not run as planned. {cause.detail}"
    return dataclasses.replace(plan, notes=(*plan.notes, note))


def _with_verification(session: PlanningSession, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` with its local modules, its verification, and the seconds that both took.

    Raises:
        PlanError: the plan does not run as planned.
    """
    if session.progress is not None:
        session.progress(RUNNING_ON_FAKE_PROCESSES)
    start = time.perf_counter()
    plan = verified(session.module, plan, session.inputs, session.with_local_modules)
    return dataclasses.replace(plan, timings={**plan.timings, "verify_s": time.perf_counter() - start})


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
