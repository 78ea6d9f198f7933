"""Schemas of requests, for the command line and HTTP alike, and of HTTP responses."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from api.requests.cluster_schema import ClusterObject, ClusterText
from api.requests.model_configs import asks_for_fused_projections
from planner.plan.former_names import with_current_names
from planner.plan.job_spec import JobSpec, SpecField, spec_fields
from planner.plan.techniques import TechniqueFlags, technique_names, with_technique_list

JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
JobKind = Literal["plan", "alternatives", "pareto", "sweep", "batches", "explanation", "check"]
JOB_KINDS: tuple[JobKind, ...] = get_args(JobKind)


class _Request(BaseModel):
    """A client's request, whose fields may also have their former names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, values: Any) -> Any:
        return with_current_names(values) if isinstance(values, Mapping) else values


class HuggingFaceModel(_Request):
    """A model given as the contents of its Hugging Face ``config.json``: data only, no code of the client's is run."""

    hf_config: dict[str, Any]
    fused_projections: bool = False
    """Whether projections that read one tensor are fused into one linear layer (``+fused-projections`` in a name)."""

    @property
    def spec(self) -> dict[str, Any]:
        """The model in the form that ``load_model`` and ``price_configuration`` take."""
        return {"hf_config": self.hf_config, "fused_projections": self.fused_projections}


class TracedGraph(_Request):
    """A model that the client traced, given as its graph of ops: no code, no weights (docs/reference/graph-format.md).

    ``graph`` is what ``planner.wire.codec.write_graph`` returns: ``{"format": "shardplan-graph", "zlib": "..."}``, or
    the same document without compression.
    """

    graph: dict[str, Any]


class _PlanRequest(TechniqueFlags, _Request):
    """A plan to be made. The names are those of the command line's options."""

    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel | TracedGraph
    """A preset's name, a Hugging Face config, or a graph that the client traced.

    The command line also takes paths and ``package.module:factory``.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_technique_list(cls, values: Any) -> Any:
        # Techniques may be one text, a list of texts, or fields of their own (``fused_ops: true``).
        if not isinstance(values, Mapping):
            return values
        values = with_technique_list(values)
        if "techniques" in values:
            values["techniques"] = technique_names(values["techniques"])
        return values

    @property
    def spec(self) -> JobSpec:
        """The request's job: all fields but the model. A model with fused projections makes them a technique."""
        values = {item.name: getattr(self, item.name) for item in _fields_of_requests()}
        if asks_for_fused_projections(None if isinstance(self.model, TracedGraph) else self.model_spec):
            values["techniques"] = (*values["techniques"], "fused-projections")
        return JobSpec(**values)

    @property
    def cluster_text(self) -> str | dict[str, Any]:
        """The cluster as it was given."""
        cluster: str | dict[str, Any] = getattr(self, "cluster")  # noqa: B009 - a field of `JobSpec`
        return cluster

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``load_model`` takes; a traced graph raises a TypeError."""
        if isinstance(self.model, TracedGraph):
            raise TypeError("a graph is no model to be loaded")
        if isinstance(self.model, str):
            return self.model
        return self.model.spec

    @property
    def graph(self) -> dict[str, Any] | None:
        """The graph that the client traced, None where it names a model."""
        return self.model.graph if isinstance(self.model, TracedGraph) else None


def _fields_of_requests() -> list[SpecField]:
    """Return the fields of `JobSpec` that a request has. The command line's own time limit is no part of a request."""
    return [item for item in spec_fields() if item.option.in_requests or item.name == "time_limit_s"]


def _limited(type_: Any, limits: Mapping[str, Any]) -> Any:
    """Return ``type_`` with pydantic's constraints on its value, which may also be None."""
    if not limits:
        return type_
    kinds = get_args(type_) if get_origin(type_) in {Union, UnionType} else (type_,)
    return functools.reduce(operator.or_, [_constrained(kind, limits) for kind in kinds])


def _constrained(kind: Any, limits: Mapping[str, Any]) -> Any:
    """Return ``kind`` with pydantic's constraints; numbers are finite, and the only objects are clusters."""
    if kind == dict[str, Any]:
        return ClusterObject
    finite = {"allow_inf_nan": False} if kind is float else {}
    return Annotated[kind, Field(**{**limits, **finite})] if kind in {int, float, str} else kind


def _request_field(item: SpecField) -> tuple[Any, Any]:
    """Return a field of `JobSpec` as pydantic's `create_model` takes it."""
    limits, item_limits = item.option.limits, item.option.item_limits
    if get_origin(item.type) is tuple:
        item_type = _limited(get_args(item.type)[0], item_limits)
        type_: Any = Annotated[tuple[item_type, ...], Field(**limits)]  # type: ignore[valid-type]
    else:
        type_ = _limited(item.text_type, limits)
    return type_, Field(... if item.required else item.default, description=item.option.help)


if TYPE_CHECKING:

    class PlanRequest(_PlanRequest):
        """Its other fields are those of `JobSpec`; code reads them from ``spec``."""

        def __init__(self, **fields: Any) -> None: ...
else:
    PlanRequest = create_model(
        "PlanRequest",
        __base__=_PlanRequest,
        __doc__=_PlanRequest.__doc__,
        **{item.name: _request_field(item) for item in _fields_of_requests()},
    )


class Problem(BaseModel):
    """An error as problem details (RFC 9457); further members carry its data, such as ``least_bytes``."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class JobAnswer(BaseModel):
    """A request with its status; its result is in a member of its own.

    A job that waits has a ``position``, 1 for the one that runs next, and where known the seconds until it runs. A job
    that is searched again has its earlier result while it waits and runs.
    """

    id: str
    status: JobStatus
    position: int | None = None
    expected_wait_s: float | None = None


class PlanJob(JobAnswer):
    """A request with its status and result. ``plan`` follows the published ``planner/plan/plan.schema.json``."""

    kind: Literal["plan"] = "plan"
    plan: dict[str, Any] | None = None
    error: Problem | None = None


class JobSummary(BaseModel):
    """A job in a list. Times are in seconds since 1970; ``label`` is its model and cluster, ``error`` a title."""

    id: str
    kind: JobKind
    status: JobStatus
    label: str
    queued_at: float
    started_at: float | None
    finished_at: float | None
    error: str | None


class JobPage(BaseModel):
    """Some jobs, the newest first; ``next`` is the ``before`` of the next page, null at the end."""

    jobs: list[JobSummary]
    next: int | None


class EstimateRequest(_Request):
    """A parallel configuration to be priced. The names are those of the command line's options."""

    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel
    cluster: ClusterText | ClusterObject
    mesh: Annotated[str, Field(min_length=1, max_length=200)]
    """``dp=2,fsdp=8,tp=4,pp=2,cp=1,ep=1``; what is left out is 1."""
    micro_batch: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    """Samples per rank and micro-batch."""
    batch: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    """Samples in the global batch; without it one micro-batch for each data-parallel rank."""
    seq: Annotated[int, Field(strict=True, ge=1, le=2**24)] = 4096
    ac: Annotated[str, Field(max_length=50)] = "none"
    sequence_parallel: bool = False
    virtual_stages: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    schedule: Annotated[str, Field(max_length=50)] = "1f1b"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Annotated[str, Field(max_length=50)] = "adamw"
    compiled: bool = True

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``price_configuration`` takes."""
        if isinstance(self.model, str):
            return self.model
        return self.model.spec


class PricedEstimate(BaseModel):
    """The price of a step of a configuration, in seconds and bytes, by part."""

    model: str
    cluster: str
    parameters: int
    step_time_s: float
    parts_s: dict[str, float]
    tokens_per_s_per_device: float
    model_flops_share: float
    fits: bool
    memory_bytes: dict[str, float | str]
    timeline_bytes: dict[str, float]


class DiffRequest(BaseModel):
    """Two plans to compare, each as a plan document or as the id of its job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    left: Annotated[str, Field(max_length=64)] | dict[str, Any]
    right: Annotated[str, Field(max_length=64)] | dict[str, Any]


class Difference(BaseModel):
    """One difference between two plans; null where a plan has no such value."""

    field: str
    key: str
    left: Any
    right: Any


class Differences(BaseModel):
    """Where two plans differ."""

    equal: bool
    settings: list[Difference]
    seconds: list[Difference]
    bytes: list[Difference]
    layouts: list[Difference]


class DeviceSummary(BaseModel):
    """A device that a cluster can be made of, with its usual links."""

    name: str
    kind: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    intra_node: str
    inter_node: str


class DeviceList(BaseModel):
    """The devices that are known."""

    devices: list[DeviceSummary]


class ModelSummary(BaseModel):
    """A model that can be named; ``max_seq`` is its longest sequence in tokens, null where its config states none."""

    name: str
    model_type: str
    max_seq: int | None


class ModelList(BaseModel):
    """The models that are known."""

    models: list[ModelSummary]


class Health(BaseModel):
    """The server's liveness and version."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(BaseModel):
    """Whether jobs are accepted, and which database stores them."""

    status: Literal["ready"] = "ready"
    database: Literal["sqlite", "postgresql"]
