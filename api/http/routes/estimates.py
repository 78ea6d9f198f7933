"""``/v1/estimates`` and ``/v1/plans/diff``, which need no solver and answer at once."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from api.http.auth import Caller, needs
from api.http.bodies import describes, parse, read_body
from api.http.problems import problem_responses
from api.http.routes.plans import PLANS
from api.http.service import Service, service_of
from api.render.plan_diff import diff_plans
from api.requests.plan_request import read_client_cluster
from api.requests.price_configuration import price_configuration
from api.requests.schemas import Differences, DiffRequest, EstimateRequest, PricedEstimate
from planner.errors import PlanError
from planner.plan.sharding_plan import ShardingPlan

router = APIRouter(prefix="/v1", tags=["estimates"])

Reader = Annotated[Caller, Depends(needs("read"))]


@router.post(
    "/estimates",
    response_model=PricedEstimate,
    responses=problem_responses(400, 413, 415, 422),
    openapi_extra=describes(EstimateRequest),
)
async def estimate(request: Request, caller: Reader) -> dict[str, Any]:
    """Price a parallel configuration by its degrees, from the model's dimensions only."""
    body = await read_body(request)
    return await service_of(request).large_bodies.run(request, caller.owner, body, _price, body)


@router.post(
    "/plans/diff",
    response_model=Differences,
    responses=problem_responses(400, 404, 413, 415, 422),
    openapi_extra=describes(DiffRequest),
)
async def diff(request: Request, caller: Reader) -> dict[str, Any]:
    """Compare two plans, each given as it is or by the id of the job that made it."""
    service, body = service_of(request), await read_body(request)
    return await service.large_bodies.run(request, caller.owner, body, _diff, service, caller, body)


def _price(body: bytes) -> dict[str, Any]:
    estimate_request = parse(EstimateRequest, body)
    read_client_cluster(estimate_request.cluster)
    options = estimate_request.model_dump(exclude={"model"})
    return price_configuration(estimate_request.model_spec, allow_local=False, **options).to_dict()


def _diff(service: Service, caller: Caller, body: bytes) -> dict[str, Any]:
    diff_request = parse(DiffRequest, body)
    left, right = (_plan(service, caller, value) for value in (diff_request.left, diff_request.right))
    return diff_plans(left, right).to_dict()


def _plan(service: Service, caller: Caller, value: str | dict[str, Any]) -> ShardingPlan:
    if not isinstance(value, str):
        return ShardingPlan.from_dict(value)
    job = PLANS.found(service, caller, value)
    if job.plan is None:
        raise PlanError(f"job {job.id} is {job.status} and has no plan.", what_to_do="Name one that has succeeded.")
    return ShardingPlan.from_dict(job.plan)
