"""Commands that compare plans: ``alternatives``, ``pareto``, ``sweep`` and ``batches``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.cli.headings import CommandWithHeadings
from api.cli.options import Folder, Json, Model, takes_job_options
from api.cli.requests import request_of
from api.cli.terminal import check_folder, reported, save_plan, terminal, watched
from api.requests.comparison_options import NOT_OF_COMPARISONS, OF_BATCHES, check_techniques

if TYPE_CHECKING:
    from api.render.tradeoff_rows import TradeoffRow
    from api.requests.plan_request import OpenedRequest
    from planner.progress import Progress

Within = Annotated[float | None, typer.Option(help="Seconds that a step of the best may take.")]


def add_tradeoff_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("alternatives", cls=CommandWithHeadings)(alternatives_command)
    app.command("pareto", cls=CommandWithHeadings)(pareto_command)
    app.command("sweep", cls=CommandWithHeadings)(sweep_command)
    app.command("batches", cls=CommandWithHeadings)(batches_command)


@takes_job_options(without=NOT_OF_COMPARISONS["alternatives"])
def alternatives_command(
    model: Model,
    options: dict[str, Any],
    count: Annotated[int, typer.Option(min=1, max=100, help="How many other meshes.")] = 3,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Show the best plan for MODEL and the best plans of the meshes that come next."""
    time_limit_s = options.pop("time_limit_s")
    with reported(as_json), watched() as progress:
        request = _opened(progress, output, model=model, **options)
        from api.render.tradeoff_rows import alternative_rows

        _show(alternative_rows(request, count, time_limit_s), output, as_json=as_json)


@takes_job_options(without=NOT_OF_COMPARISONS["pareto"])
def pareto_command(model: Model, options: dict[str, Any], output: Folder = None, as_json: Json = False) -> None:
    """Show what a step of MODEL takes within less and less memory, down to the least that does.

    --time-limit is for the search of each plan.
    """
    time_limit_s = options.pop("time_limit_s")
    with reported(as_json), watched() as progress:
        request = _opened(progress, output, model=model, **options)
        from api.render.tradeoff_rows import pareto_rows

        _show(pareto_rows(request, options["mesh"], time_limit_s), output, as_json=as_json)


@takes_job_options(without=NOT_OF_COMPARISONS["sweep"])
def sweep_command(
    model: Model,
    options: dict[str, Any],
    objective: Annotated[
        Literal["step-time", "cost", "fewest-devices"],
        typer.Option(help="What makes a number of devices the best: cost is device time per step."),
    ] = "cost",
    within: Within = None,
    devices: Annotated[
        str | None, typer.Option(help="Numbers of devices, such as 3,6,12. Default: 1, 2, 4, ...")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of a device for an hour, in any currency.")] = None,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Plan MODEL on 1, 2, 4, ... (or other) numbers of devices of a cluster, the largest, and say which is best.

    --time-limit is for the search of each plan.
    """
    time_limit_s = options.pop("time_limit_s")
    with reported(as_json), watched() as progress:
        counts = None if devices is None else _counts(devices)
        request = _opened(progress, output, model=model, **options)
        from api.render.tradeoff_rows import sweep_rows

        rows = sweep_rows(request, objective, within_s=within, price=price, time_limit_s=time_limit_s, counts=counts)
        _show(rows, output, as_json=as_json)


@takes_job_options(only=OF_BATCHES, defaults={"phase": "decode"})
def batches_command(
    model: Model,
    options: dict[str, Any],
    within: Within = None,
    most: Annotated[int, typer.Option(min=1, help="The largest batch that is tried.")] = 4096,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Plan inference with MODEL at batches of 1, 2, 4, ... and say which makes the most tokens per second.

    --time-limit is for the search of each plan.
    """
    time_limit_s = options.pop("time_limit_s")
    with reported(as_json), watched() as progress:
        request = _opened(progress, output, model=model, batch=1, **options)
        from api.render.tradeoff_rows import batch_rows

        rows = batch_rows(request, options["mesh"], most=most, within_s=within, time_limit_s=time_limit_s)
        _show(rows, output, as_json=as_json)


def _counts(text: str) -> list[int]:
    """Return the numbers in ``text``, such as "3,6,12".

    Raises:
        JobError: ``text`` is no list of whole numbers above 0.
    """
    from planner.errors import JobError

    counts = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() and int(item) > 0 for item in counts):
        raise JobError(f"--devices is {text!r}.", what_to_do="Give whole numbers, such as 3,6,12.", field="devices")
    return [int(item) for item in counts]


def _opened(progress: Progress, output: Path | None, **options: Any) -> OpenedRequest:
    """Return the request with its model loaded; create the folder ``output`` for the plans first."""
    if output is not None:
        check_folder(output)
    request = request_of(**options)
    check_techniques(request.techniques)
    from api.requests.plan_request import opened_request

    return opened_request(request, allow_local=True, progress=progress)


def _show(rows: list[TradeoffRow], output: Path | None, *, as_json: bool) -> None:
    """Save the plans of the rows, and print the rows."""
    if output is not None:
        for number, row in enumerate(rows, 1):
            if row.plan is not None:
                save_plan(row.plan, output / f"{number}.json")
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    from api.render.tradeoffs import show_tradeoffs

    show_tradeoffs(rows, terminal())
