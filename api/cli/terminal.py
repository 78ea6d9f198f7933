"""Terminal output that commands share: plans, progress, files, and errors with their exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from planner.plan.sharding_plan import ShardingPlan
    from planner.progress import Progress, ProgressEvent


def print_plan(plan: ShardingPlan, *, as_json: bool) -> None:
    """Print a plan, for a person or as JSON."""
    if as_json:
        typer.echo(plan.to_json(), nl=False)
        return
    from api.render.plan import show_plan

    show_plan(plan, terminal())


def terminal() -> Any:
    """Return the console for tables on standard output, 160 columns wide if the output is piped."""
    from rich.console import Console

    # rich takes piped output as 80 columns wide, and would cut the tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


@contextmanager
def watched() -> Iterator[Progress]:
    """Yield a progress callback that shows each event on standard error, if standard error is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") if console.is_terminal else nullcontext() as status:

        def show(event: ProgressEvent) -> None:
            if status is not None:
                status.update(f"{event} ...")

        yield show


def check_writable(output: Path) -> None:
    """Raise a `JobError` where the output file cannot be written, before any work is done."""
    from planner.errors import JobError

    if output.is_dir() or not output.parent.is_dir():
        what = "is a folder" if output.is_dir() else f"cannot be written: there is no folder {output.parent}"
        raise JobError(f"--output {output} {what}.", what_to_do="Give the name of a file in a folder that exists.")


def check_folder(output: Path) -> None:
    """Create a folder for plans, before any work is done; raise a `JobError` where that fails."""
    from planner.errors import JobError

    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        detail = f"--output {output} cannot be made a folder: {error.strerror}."
        raise JobError(detail, what_to_do="Give the name of a folder, in one that exists.") from error


def save_plan(plan: ShardingPlan, output: Path) -> None:
    """Write a plan to a file; raise a `JobError` where that fails."""
    from planner.errors import JobError

    try:
        plan.save(output)
    except OSError as error:
        detail = f"--output {output} cannot be written: {error.strerror}."
        raise JobError(detail, what_to_do="Give the name of a file that may be written.") from error


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn a `UserError` of the block into a message and an exit code; any other exception is a bug, and propagates.

    The message goes to standard error; with ``--json``, problem details go to standard output as well.
    """
    from api.requests.errors import UserError, exit_code_of, problem_of

    try:
        yield
    except UserError as error:
        if as_json:
            typer.echo(json.dumps({"error": problem_of(error)}, indent=2))
        typer.echo(f"shardplan: {error}", err=True)
        raise typer.Exit(exit_code_of(error)) from None
