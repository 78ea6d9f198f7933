"""``/v1/estimates`` and ``/v1/plans/diff``, which need no solver and answer at once."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from api.http.auth import Caller, needs
from api.http.bodies import as_text, describes, read_body
from api.http.problems import problem_responses
from api.http.routes.named_plans import named_plans
from api.http.service import service_of
from api.requests.schemas import Differences, DiffRequest, EstimateRequest, PricedEstimate

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
    priced: dict[str, Any] = await service_of(request).work.run(
        request, caller.owner, "estimate", len(body), body=as_text(body)
    )
    return priced


@router.post(
    "/plans/diff",
    response_model=Differences,
    responses=problem_responses(400, 404, 413, 415, 422),
    openapi_extra=describes(DiffRequest),
)
async def diff(request: Request, caller: Reader) -> dict[str, Any]:
    """Compare two plans, each given as it is or by the id of the job that made it."""
    service, body = service_of(request), await read_body(request)
    plans = await run_in_threadpool(named_plans, service, caller, body, "left", "right")
    nbytes = len(body) + sum(len(named["plan"] or "") for named in plans.values())
    differences: dict[str, Any] = await service.work.run(
        request, caller.owner, "diff", nbytes, body=as_text(body), plans=plans
    )
    return differences
