"""Requests from a command's options, and the plans and prices that answer them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from api.cli.terminal import watched

if TYPE_CHECKING:
    from api.requests.price_configuration import PricedConfiguration
    from api.requests.schemas import PlanRequest
    from planner.plan.sharding_plan import ShardingPlan


def request_of(**options: Any) -> PlanRequest:
    """Return the request that a command's options describe.

    Raises:
        JobError: an option has an invalid value.
    """
    from pydantic import ValidationError

    from api.requests.schemas import PlanRequest
    from cost_model.hardware.reading import close_matches
    from planner.errors import JobError
    from planner.plan.job_spec import PLANNERS, spec_fields

    try:
        return PlanRequest(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        value = options.get(field)
        if field == "planner":
            near = close_matches(str(value), PLANNERS)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            advice = f"{hint}Choose one of {', '.join(PLANNERS)}, random:SEED."
            raise JobError(f"there is no planner {value!r}.", what_to_do=advice, field=field) from error
        flag = next((item.flag for item in spec_fields() if item.name == field), f"--{field}")
        detail = f"{flag} is {value!r}: {first['msg']}."
        raise JobError(detail, what_to_do="The command's --help says what it takes.", field=field) from error


def plan_of(request: PlanRequest, *, use_cache: bool, time_limit_s: float | None = None, jobs: int = 1) -> ShardingPlan:
    """Return the plan of a request, from the user's cache if an equal request was planned before.

    Args:
        use_cache: whether the cache is read and written.
        time_limit_s: seconds for the search, which then returns its incumbent; None: no limit. The plan of a search
            that reached the limit is not cached.
        jobs: search tasks that run concurrently.
    """
    from api.requests.plan_request import check_request, fingerprint, plan_request

    check_request(request, allow_local=True)
    from api.cli.plan_cache import PlanCache

    key = fingerprint(request, allow_local=True) if use_cache else None
    cache = PlanCache.of_user()
    cached_plan = cache.get(key) if key is not None else None
    if cached_plan is not None:
        typer.echo(f"(planned before: taken from {cache.folder}; --no-cache plans again)", err=True)
        return cached_plan
    with watched() as progress:
        plan = plan_request(request, allow_local=True, progress=progress, time_limit_s=time_limit_s, jobs=jobs)
    ended = plan.solver is None or plan.solver.status != "time-limit"
    if key is not None and ended:
        try:
            cache.put(key, plan)
        except OSError as error:
            typer.echo(f"(the plan was not cached: {error})", err=True)
    return plan


def what_to_price(what: str | None, plan: Path | None, planner: str | None) -> tuple[Path | None, str | None]:
    """Return (plan file, planner's name), one of them None; ``what`` is the argument that may be either."""
    from planner.errors import JobError

    subjects = [value for value in (what, plan, planner) if value is not None]
    if len(subjects) != 1:
        advice = "Give a plan file or a planner's name after MODEL, such as fully-sharded."
        raise JobError(
            "nothing to price was given." if not subjects else "more than one thing to price was given.",
            what_to_do=advice,
        )
    if what is not None and (what.endswith(".json") or Path(what).exists()):
        return Path(what), None
    return plan, planner or what


def refuse_options(names: Sequence[str], reason: str, what_to_do: str) -> None:
    """Raise a `JobError` that names the options ``names``; do nothing if there are none."""
    from planner.errors import JobError

    if names:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        raise JobError(f"{flags}{reason}", what_to_do=what_to_do)


CONFIGURATION_OPTIONS = ("cluster", "mesh", "batch", "seq", "ac", "optimizer", "dtype")
"""Job options that a parallel configuration given by its degrees accepts."""


def names_degrees(mesh: str | None) -> bool:
    """Return whether ``mesh`` names an axis that only parallel configurations have: fsdp, pp, cp or ep."""
    names = {part.partition("=")[0].strip() for part in (mesh or "").split(",")}
    return bool(names & {"fsdp", "pp", "cp", "ep"})


def price_degrees(
    model: str, options: dict[str, Any], *, sp: bool, virtual_stages: int, schedule: str
) -> PricedConfiguration:
    """Return the price of a parallel configuration, given by its degrees."""
    from api.requests.price_configuration import price_configuration
    from planner.errors import JobError

    for needed in ("cluster", "mesh"):
        if needed not in options:
            raise JobError(f"--{needed} is missing.", what_to_do="A configuration needs --cluster and --mesh.")
    return price_configuration(model, sequence_parallel=sp, virtual_stages=virtual_stages, schedule=schedule, **options)


def check_model(model: str) -> None:
    """Raise a `ModelError` where ``model`` names nothing, before torch is imported."""
    from api.requests.model_configs import find_config

    find_config(model, allow_local=True)


def priced_file(model: str, file: Path, cluster: str | None) -> ShardingPlan:
    """Return the plan in ``file`` with a new estimate on ``cluster``; None: on the cluster that the plan names."""
    check_model(model)
    from api.requests.model_registry import load_for_plan, quiet_libraries
    from cost_model.hardware.cluster import ClusterSpec
    from planner import estimate_plan
    from planner.plan.sharding_plan import ShardingPlan
    from planner.progress import BUILDING_MODEL, PRICING

    plan = ShardingPlan.load(file)
    where = None if cluster is None else ClusterSpec.parse(cluster)
    with watched() as progress:
        progress(BUILDING_MODEL)
        source = load_for_plan(model, plan)
        progress(PRICING)
        with quiet_libraries():
            priced: ShardingPlan = estimate_plan(
                source.module, plan, example_inputs=source.example_inputs, cluster=where
            )
    return dataclasses.replace(priced, model=priced.model or model)
