"""Requests to explain the layouts of a parameter, and the checks of them that take milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.requests.model_configs import find_config
from api.requests.plan_request import digest_of, read_client_cluster
from api.requests.schemas import HuggingFaceModel, JobAnswer, Problem
from planner.errors import JobError, PlanError


class ExplanationRequest(BaseModel):
    """A plan, its model, and a parameter whose layouts are explained.

    ``plan`` is a plan document, or the id of the caller's job that made it; ``model`` may then be left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["explanation"] = "explanation"
    plan: Annotated[str, Field(max_length=64)] | dict[str, Any]
    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel | None = None
    parameter: Annotated[str, Field(min_length=1, max_length=1000)]

    def with_plan(self, plan: Mapping[str, Any], model: Any) -> ExplanationRequest:
        """Return the request with the plan of a job, and with the model of that job where it names none itself.

        Raises:
            JobError: the job planned a graph, which is no module to be traced again.
        """
        if self.model is None and isinstance(model, dict) and "graph" in model:
            advice = "Name the model, or explain the plan where the module is: planner.explain."
            raise JobError("the plan is for a traced graph.", what_to_do=advice, field="model")
        return ExplanationRequest.model_validate({**self.model_dump(), "plan": plan, "model": self.model or model})

    @property
    def plan_document(self) -> dict[str, Any]:
        """The plan, which is a document: the id of a job is replaced by its plan before the request is queued."""
        assert not isinstance(self.plan, str), self.plan
        return self.plan

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``load_model`` takes."""
        assert self.model is not None, "it was taken from the plan's job, or asked for"
        return self.model if isinstance(self.model, str) else self.model.spec


class PricedLayout(BaseModel):
    """The best plan with one layout of the parameter, and its difference to the explained plan; null without a plan."""

    aspect: Literal["stored", "computed"]
    layout: list[str]
    chosen: bool
    step_time_s: float | None
    peak_memory_bytes: int | None
    fits: bool
    difference_s: dict[str, float] | None
    collectives_difference_s: dict[str, float] | None


class ExplainedParameter(BaseModel):
    """The layouts of a parameter with their prices, as the command line's ``--json`` prints them."""

    parameter: str
    same_layouts: list[str]
    plan: dict[str, float]
    memory_bytes: int
    alternatives: list[PricedLayout]


class ExplanationJob(JobAnswer):
    """A request to explain a parameter, with its status and result."""

    kind: Literal["explanation"]
    result: ExplainedParameter | None = None
    error: Problem | None = None


def check_explanation(request: ExplanationRequest) -> None:
    """Check a client's request, whose plan is a document.

    Raises:
        PlannerError, ClusterError: the plan or the model cannot be read; the message says why.
    """
    from planner.plan.sharding_plan import ShardingPlan  # imports torch, which a server that has the schemas need not

    plan = ShardingPlan.from_dict(request.plan_document)
    plan.check_priced()
    if not plan.cluster:
        raise PlanError("the plan names no cluster to price it on.", what_to_do="Send a plan that shardplan made.")
    read_client_cluster(plan.cluster)
    find_config(request.model_spec, allow_local=False)


def explanation_fingerprint(request: ExplanationRequest) -> str:
    """Return a hash that is equal only for requests that get the same explanation."""
    return digest_of(**request.model_dump(mode="json"))
