"""The plan of a request, and the checks before it, for the command line and the server's workers alike."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.requests.faults import check_all
from api.requests.model_configs import find_config
from api.requests.schemas import PlanRequest
from api.requests.traced_graphs import check_graph, graph_identity, load_graph
from cost_model.hardware.cluster import FILE_SUFFIXES, ClusterError, ClusterSpec
from planner.errors import JobError, PlanMismatchError
from planner.progress import BUILDING_MODEL, READING_GRAPH, Progress

if TYPE_CHECKING:
    from torch import nn

    from api.requests.model_registry import ModelSource
    from executor.verify import VerifyReport
    from planner.explanation import Explanation
    from planner.graph.example_inputs import GivenInputs
    from planner.graph.trace_module import TracedModule
    from planner.plan.job_spec import JobSpec
    from planner.plan.sharding_plan import ShardingPlan
    from planner.session import PlanningSession


MOST_DEVICES = 2**17
"""The most devices of a client's cluster: more than any cluster has. Meshes are tried for each divisor."""

_PACKAGES = ("api", "cost_model", "executor", "planner")
_DEPENDENCIES = ("torch", "transformers", "pulp", "highspy", "networkx", "numpy")


def plan_request(
    request: PlanRequest,
    *,
    allow_local: bool,
    progress: Progress | None = None,
    time_limit_s: float | None = None,
    jobs: int = 1,
) -> ShardingPlan:
    """Return the plan that ``request`` asks for.

    Args:
        allow_local: whether the request may name files and Python functions of this machine; False for a client's.
        progress: called with each event of planning.
        time_limit_s: most seconds for the search, which then returns its incumbent; the request may allow fewer. None:
            no limit.
        jobs: search tasks that run concurrently; see `planner.build_plan`.

    Raises:
        PlannerError, ClusterError, LayoutError: the request cannot be planned; the message says why and what to do.
    """
    from api.requests.model_registry import quiet_libraries

    context = opened_request(request, allow_local=allow_local, progress=progress)
    with quiet_libraries():
        from planner.build import plan_of_spec

        plan = plan_of_spec(
            context.model,
            context.searched(time_limit_s, jobs),
            example_inputs=context.example_inputs,
            tp_plan=context.tp_plan,
            progress=context.progress,
        )
        return context.noted(plan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRequest:
    """A request with its model loaded and its cluster read.

    Attributes:
        model: the module, or the graph that a client traced.
        cluster: the request's cluster.
        spec: the request's job, with this cluster.
        example_inputs: arguments of one call with the global batch; None: made from the model's config.
        tp_plan: the model's Hugging Face `tp_plan`, for the planner "tensor-parallel"; None where it has none.
        progress: called with each event of planning.
        notes: for the user, on how the request was read.
        name: the user's name for the model; None: the request gives the model itself.
        shares_time: whether the searches of a session have one time limit together.
    """

    model: nn.Module | TracedModule
    cluster: ClusterSpec
    spec: JobSpec
    example_inputs: GivenInputs = None
    tp_plan: Mapping[str, str] | None = None
    progress: Progress | None = None
    notes: tuple[str, ...] = ()
    name: str | None = None
    shares_time: bool = False

    def searched(self, time_limit_s: float | None, jobs: int) -> JobSpec:
        """Return the request's job, whose search takes at most ``time_limit_s`` and the request's own time limit."""
        limits = [limit for limit in (time_limit_s, self.spec.time_limit_s) if limit is not None]
        return dataclasses.replace(self.spec, time_limit_s=min(limits, default=None), jobs=jobs)

    def session(self, *, time_limit_s: float | None = None, jobs: int = 1) -> PlanningSession:
        """Return the planning session of the request.

        Args:
            time_limit_s: most seconds for each search (or for all: ``shares_time``), which then returns its incumbent;
                the request may allow fewer. None: no limit.
            jobs: search tasks that run concurrently.
        """
        from api.requests.shared_time import SharedTimeSession
        from planner.session import PlanningSession

        kind = SharedTimeSession if self.shares_time else PlanningSession
        return kind(
            self.model,
            spec=self.searched(time_limit_s, jobs),
            example_inputs=self.example_inputs,
            tp_plan=self.tp_plan,
            progress=self.progress,
        )

    def noted(self, plan: ShardingPlan) -> ShardingPlan:
        """Return ``plan`` with the model's name, and with the request's notes before its own."""
        return dataclasses.replace(plan, model=self.name, notes=(*self.notes, *plan.notes))


def opened_request(request: PlanRequest, *, allow_local: bool, progress: Progress | None = None) -> OpenedRequest:
    """Return ``request`` with its model loaded and its cluster read.

    Raises:
        PlannerError, ClusterError, LayoutError: as `plan_request`.
    """
    check_request(request, allow_local=allow_local)
    from api.requests.model_registry import load_model
    from planner.run.baselines import micro_batches_for

    report = progress or (lambda event: None)
    cluster = read_cluster(request, allow_local=allow_local)
    spec = request.spec
    micro_batches = micro_batches_for(spec.planner, spec.micro_batches)
    spec = dataclasses.replace(spec, cluster=cluster, micro_batches=micro_batches)
    if request.graph is not None:
        report(READING_GRAPH)
        return OpenedRequest(model=load_graph(request.graph), cluster=cluster, spec=spec, progress=progress)
    report(BUILDING_MODEL)
    source = load_model(request.model_spec, batch=spec.batch, seq=spec.seq, allow_local=allow_local)
    if source.example_inputs is None:
        needed = ("batch", "seq") if source.takes_seq else ("batch",)
        _require_none([name for name in needed if getattr(spec, name) is None])
    return OpenedRequest(
        model=source.module,
        cluster=cluster,
        spec=dataclasses.replace(spec, seq=source.seq),
        example_inputs=source.example_inputs,
        tp_plan=source.tp_plan,
        progress=progress,
        notes=tuple(source.notes),
        name=source.name if isinstance(request.model_spec, str) else None,
    )


def verification(source: ModelSource, plan: ShardingPlan) -> VerifyReport:
    """Run ``plan`` on fake processes; return the comparison of the collectives that ran with the plan's estimate.

    Raises:
        PlanError: the plan is for another model, mesh or batch, or has no estimate. `RunError`: it does not run.
    """
    from api.requests.model_registry import quiet_libraries
    from executor.verify import verify
    from planner.graph.example_inputs import inputs_from_config, meta_inputs
    from planner.plan.fingerprint import model_fingerprint
    from planner.verification.verify_plan import micro_batch_arguments

    # The executor checks this too, but only after the plan's keys, which match nothing in another model.
    actual = model_fingerprint(source.module)
    expected = plan.fingerprint.get("model", actual)
    if actual != expected:
        detail = f"the plan was made for another model than {source.name}."
        advice = "Name the model that the plan is for, or plan this one."
        raise PlanMismatchError(detail, subject="model", expected=expected, found=actual, what_to_do=advice)
    if source.example_inputs is None:
        inputs = inputs_from_config(source.module, batch=plan.job.batch, seq=plan.job.seq, phase=plan.job.phase)
    else:
        inputs = meta_inputs(source.example_inputs)
    with quiet_libraries():
        return verify(source.module, plan, example_inputs=micro_batch_arguments(plan, inputs))


def explanation(model: str, file: Path, parameter: str, progress: Progress) -> Explanation:
    """Return what every layout of ``parameter`` would cost in the plan in ``file``, which is for ``model``.

    Raises:
        PlannerError: the plan cannot be read, is for another model, or the model has no such parameter.
    """
    from planner.plan.sharding_plan import ShardingPlan

    return explained(model, ShardingPlan.load(file), parameter, allow_local=True, progress=progress)


def explained(
    model: str | Mapping[str, Any], plan: ShardingPlan, parameter: str, *, allow_local: bool, progress: Progress
) -> Explanation:
    """Return what every layout of ``parameter`` would cost in ``plan``, which is for ``model``.

    Args:
        allow_local: whether ``model`` may name files and Python functions of this machine; False for a client's.

    Raises:
        PlannerError: the plan is for another model, or the model has no such parameter.
    """
    from api.requests.model_registry import load_for_plan, quiet_libraries
    from planner.explanation import explain

    progress(BUILDING_MODEL)
    source = load_for_plan(model, plan, allow_local=allow_local)
    with quiet_libraries():
        return explain(source.module, plan, parameter, example_inputs=source.example_inputs, progress=progress)


def check_request(request: PlanRequest, *, allow_local: bool) -> None:
    """Check all that can be checked in milliseconds, so that most mistakes are reported before a job is queued.

    Mistakes in the cluster, the model and the job are found before torch is imported, and are reported together.

    Raises:
        PlannerError, ClusterError, LayoutError: as ``plan_request`` would.
    """
    check_all(
        functools.partial(read_cluster, request, allow_local=allow_local),
        functools.partial(_check_model, request, allow_local=allow_local),
        functools.partial(_check_job, request),
        functools.partial(_check_mesh, request, allow_local=allow_local),
    )
    check_all(
        functools.partial(_check_techniques, request, allow_local=allow_local),
        functools.partial(_check_graph, request),
    )


def _check_model(request: PlanRequest, *, allow_local: bool) -> None:
    """Raise an error where there is no such model, or the request lacks what its example inputs are made from."""
    config = None if request.graph is not None else find_config(request.model_spec, allow_local=allow_local)
    if config is None:  # a graph and a factory have example inputs, or say later what they lack
        return
    missing = [name for name in ("batch", "seq") if getattr(request, name) is None]
    if "seq" in missing:
        from api.requests.model_registry import full_config  # imports torch

        takes_seq = full_config(config)[1]
        missing = [name for name in missing if takes_seq or name != "seq"]
    _require_none(missing)


def _check_job(request: PlanRequest) -> None:
    from planner.plan.job import job_of

    spec = request.spec
    job_of(spec, batch=spec.batch, flash_attention=None)


def _check_techniques(request: PlanRequest, *, allow_local: bool) -> None:
    from planner.plan.techniques import check_techniques

    spec, cluster = request.spec, read_cluster(request, allow_local=allow_local)
    check_techniques(spec.techniques, executable_only=spec.executable_only, device=cluster.device, dtype=spec.dtype)


def _check_mesh(request: PlanRequest, *, allow_local: bool) -> None:
    mesh: str | None = getattr(request, "mesh")  # noqa: B009 - a field of `JobSpec`
    if mesh is None:
        return
    from cost_model.layouts.layout import MeshSpec
    from planner.plan.checks import check_mesh

    parsed = MeshSpec.parse(mesh)
    with contextlib.suppress(ClusterError):  # which is a fault of its own
        check_mesh(parsed, read_cluster(request, allow_local=allow_local))


def _check_graph(request: PlanRequest) -> None:
    if request.graph is not None:
        check_graph(request, request.graph)


def read_cluster(request: PlanRequest, *, allow_local: bool) -> ClusterSpec:
    """Return the request's cluster, which may name files only with ``allow_local``.

    Raises:
        ClusterError: the cluster cannot be read.
    """
    cluster = request.cluster_text
    return ClusterSpec.parse(cluster) if allow_local else read_client_cluster(cluster)


def read_client_cluster(cluster: str | Mapping[str, Any]) -> ClusterSpec:
    """Return a client's cluster, which may name no files: a server does not read its own files for a client.

    Raises:
        ClusterError: the cluster cannot be read, names files, or has more than ``MOST_DEVICES`` devices.
    """
    advice = "a server reads no files of its own for a client; give the figures themselves, as an object"
    if isinstance(cluster, str):
        if cluster.strip().lower().endswith(FILE_SUFFIXES):
            raise ClusterError(advice)
    else:
        sweeps = cluster.get("sweeps", ())
        for item in sweeps if isinstance(sweeps, (list, tuple)) else (sweeps,):
            if not isinstance(item, dict) or "file" in item:
                raise ClusterError(f"cluster.sweeps names a file: {advice}")
    spec = ClusterSpec.parse(cluster)
    if spec.size > MOST_DEVICES:
        raise ClusterError(f"a server plans for at most {MOST_DEVICES} devices")
    return spec


def fingerprint(request: PlanRequest, *, allow_local: bool) -> str | None:
    """Return a hash that is equal only for requests that get the same plan; None for a factory, whose code is unknown.

    The hash covers the meaning of the request rather than its text (a file's contents, a cluster's figures), the code
    of shardplan, and the versions of the libraries that plans depend on.
    """
    model = _identity(request, allow_local=allow_local)
    if model is None:
        return None
    rest = request.model_dump(mode="json", exclude={"model", "cluster"})
    return digest_of(model=model, cluster=read_cluster(request, allow_local=allow_local).to_dict(), **rest)


def digest_of(**data: Any) -> str:
    """Return a hash of JSON data, of the code of shardplan and of the versions of the libraries under it."""
    return hashlib.sha256(json.dumps({**data, "code": _code_digest()}, sort_keys=True).encode()).hexdigest()


def _identity(request: PlanRequest, *, allow_local: bool) -> dict[str, Any] | None:
    """Return the data that identify the request's model; None for a factory."""
    if request.graph is not None:
        return graph_identity(request.graph)
    config = find_config(request.model_spec, allow_local=allow_local)
    return (
        None
        if config is None
        else {"name": config.name, "fused_projections": config.fused_projections, **config.values}
    )


def _require_none(missing: Sequence[str]) -> None:
    """Raise a `JobError` that names the fields that are missing; do nothing if there are none."""
    if missing:
        detail = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
        raise JobError(detail, what_to_do=f"Give {' and '.join(f'--{name}' for name in missing)}.", field=missing[0])


@functools.cache
def _code_digest() -> str:
    """Return a hash of the planner's code and libraries, so that no plan of older code answers a request."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in {".py", ".toml", ".json"}:
                digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    for name in _DEPENDENCIES:
        try:
            digest.update(f"{name}={metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{name}=none".encode())
    return digest.hexdigest()
