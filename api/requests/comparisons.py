"""Requests for comparisons of plans, by kind, and the checks of them that take milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from api.requests.comparison_options import NOT_OF_COMPARISONS, OF_BATCHES, check_techniques
from api.requests.plan_request import check_request, digest_of, fingerprint, read_cluster
from api.requests.schemas import JobAnswer, PlanRequest, Problem
from planner.errors import JobError

PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Comparison(BaseModel):
    """A request for plans of one job, which differ in what the kind of the comparison says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request: PlanRequest

    @property
    def plan_request(self) -> PlanRequest:
        """The job whose plans are compared."""
        return self.request


class AlternativesRequest(_Comparison):
    """The best plan, and the best plans of the ``count`` next best meshes."""

    kind: Literal["alternatives"]
    count: Annotated[int, Field(strict=True, ge=1, le=100)] = 3


class ParetoRequest(_Comparison):
    """The Pareto front of step time and peak memory."""

    kind: Literal["pareto"]


class SweepRequest(_Comparison):
    """The fastest plan for each number of devices, up to the request's cluster; the best one by ``objective``."""

    kind: Literal["sweep"]
    objective: Literal["step-time", "cost", "fewest-devices"] = "cost"
    within_s: PositiveNumber | None = None
    """Most seconds of the best plan's step."""
    devices: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=1, le=2**31)], ...] | None, Field(min_length=1, max_length=64)
    ] = None
    """Numbers of devices; null: 1, 2, 4, ... and the whole cluster."""
    price: PositiveNumber | None = None
    """Of a device for an hour, in any currency."""


class BatchesRequest(_Comparison):
    """The fastest plan of inference for batches of 1, 2, 4, ... samples; the best makes the most tokens per second.

    The request has no batch; its phase is decode where it names none.
    """

    kind: Literal["batches"]
    within_s: PositiveNumber | None = None
    """Most seconds of the best plan's step."""
    most: Annotated[int, Field(strict=True, ge=1, le=2**31)] = 4096
    """The largest batch that is tried."""

    @model_validator(mode="before")
    @classmethod
    def _in_decode(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("request"), Mapping):
            return {**values, "request": {"phase": "decode", **values["request"]}}
        return values

    @property
    def plan_request(self) -> PlanRequest:
        """The job, at the smallest batch."""
        return self.request.model_copy(update={"batch": 1})


Comparison = AlternativesRequest | ParetoRequest | SweepRequest | BatchesRequest


class ComparisonRequest(RootModel[Annotated[Comparison, Field(discriminator="kind")]]):
    """A comparison of plans: ``kind`` says which, ``request`` the job, and the other members are the kind's own."""


class ComparedPlan(BaseModel):
    """One row of a comparison, as the command line's ``--json`` prints it, with its plan.

    Without a plan its figures are null; ``fits`` is then false, or null where the time was up before any was found.
    Rows of batches also have ``batch`` and ``items_per_s_per_device``.
    """

    model_config = ConfigDict(extra="allow")

    cluster: str
    devices: int
    fits: bool | None
    mesh: str | None
    micro_batches: int | None
    ac: str | None
    step_time_s: float | None
    peak_memory_bytes: int | None
    device_s: float | None
    gap: float | None
    status: str | None
    price: float | None
    best: bool
    plan: dict[str, Any] | None


class ComparisonJob(JobAnswer):
    """A comparison with its status, and its rows in ``result``."""

    kind: Literal["alternatives", "pareto", "sweep", "batches"]
    result: list[ComparedPlan] | None = None
    error: Problem | None = None


def check_comparison(comparison: Comparison) -> None:
    """Check a client's comparison, so that most mistakes are reported before a job is queued.

    Raises:
        PlannerError, ClusterError, LayoutError: it cannot be made; the message says why.
    """
    request = comparison.plan_request
    _check_options(comparison)
    check_techniques(request.spec.techniques)
    check_request(request, allow_local=False)
    if isinstance(comparison, SweepRequest) and comparison.devices is not None:
        from planner.tradeoffs import part_of

        cluster = read_cluster(request, allow_local=False)
        for count in comparison.devices:
            part_of(cluster, count)


def _check_options(comparison: Comparison) -> None:
    """Raise a `JobError` that names an option of the request that its kind of comparison does not take."""
    request, kind = comparison.request, comparison.kind
    if isinstance(comparison, BatchesRequest):
        refused = set(PlanRequest.model_fields) - {"model", *OF_BATCHES}
        if request.spec.phase == "training":
            advice = "Choose prefill or decode; for training, sweep compares numbers of devices."
            raise JobError("batches are compared for inference.", what_to_do=advice, field="phase")
        if request.graph is not None:
            advice = "Name a preset or a Hugging Face config."
            raise JobError("batches are not compared for a graph, which is a training step's.", what_to_do=advice)
    else:
        refused = set(NOT_OF_COMPARISONS[comparison.kind])
    for name, field in PlanRequest.model_fields.items():
        value = getattr(request, name)
        if name in refused and value != field.default:
            advice = f"Leave {name} out."
            raise JobError(f"{name} is {value!r}: {kind} does not take it.", what_to_do=advice, field=name)


def comparison_fingerprint(comparison: Comparison) -> str:
    """Return a hash that is equal only for comparisons that get the same rows."""
    own = comparison.model_dump(mode="json", exclude={"request"})
    return digest_of(comparison=own, request=fingerprint(comparison.plan_request, allow_local=False))
