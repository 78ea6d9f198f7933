"""Terminal output that commands share: plans, progress, files, and errors with their exit codes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from api.requests.price_configuration import PricedConfiguration
    from planner.plan.sharding_plan import ShardingPlan
    from planner.progress import Progress, ProgressEvent, SearchState

REPORT_EVERY_S = 10.0
"""Seconds between two lines of progress where standard error is no terminal."""


def print_plan(
    plan: ShardingPlan,
    *,
    as_json: bool,
    details: bool = False,
    tokens: float | None = None,
    price: float | None = None,
    file: Path | None = None,
) -> None:
    """Print a plan, for a person or as JSON.

    Args:
        plan: the plan.
        as_json: whether to print its JSON, and nothing else.
        details: whether to print collectives, other meshes, timings and all notes as well.
        tokens, price: a training run whose days and price are printed; see `RunCost`.
        file: the plan's file; None: it is not saved.
    """
    if as_json:
        typer.echo(plan.to_json(), nl=False)
        return
    from api.render.plan import show_plan
    from api.requests.run_cost import RunCost

    name = None if file is None else str(file)
    show_plan(plan, terminal(), details=details, cost=RunCost.of(tokens, price), file=name)


def print_configuration(
    priced: PricedConfiguration, *, as_json: bool, tokens: float | None = None, price: float | None = None
) -> None:
    """Print the price of a configuration, for a person or as JSON; ``tokens``, ``price``: as for `print_plan`."""
    if as_json:
        typer.echo(json.dumps(priced.to_dict(), indent=2))
        return
    from api.render.configuration import show_configuration
    from api.requests.run_cost import RunCost

    show_configuration(priced, terminal(), RunCost.of(tokens, price))


def check_run_cost(tokens: float | None, price: float | None) -> None:
    """Raise a `JobError` where ``--tokens`` and ``--price`` describe no run, before any work is done."""
    from api.requests.run_cost import RunCost

    RunCost.of(tokens, price)


def terminal() -> Any:
    """Return the console for tables on standard output, 160 columns wide if the output is piped."""
    from rich.console import Console

    # rich takes piped output as 80 columns wide, and would cut the tables.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def errors_terminal() -> Any:
    """Return the console for tables on standard error."""
    from rich.console import Console

    return Console(highlight=False, stderr=True, width=160)


@contextmanager
def watched(every_s: float = REPORT_EVERY_S) -> Iterator[Progress]:
    """Yield a progress callback that shows planning on standard error.

    On a terminal it shows each event. Elsewhere it prints a line every ``every_s`` seconds, and nothing before.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda event: status.update(f"{event} ...")
        return
    lines = ProgressLines()
    stopped = threading.Event()

    def report() -> None:
        while not stopped.wait(every_s):
            typer.echo(lines.line(), err=True)

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield lines.take
    finally:
        stopped.set()
        reporter.join()


class ProgressLines:
    """The state of planning as one line: elapsed time, what runs, incumbent and bound."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._action = "starting"
        self._state: SearchState | None = None

    def take(self, event: ProgressEvent) -> None:
        """Take an event as the current state."""
        subject = getattr(event, "subject", None)
        inner = getattr(event, "event", event)
        action = getattr(inner, "action", None) or str(inner)
        self._action = action if subject is None else f"{subject}: {action}"
        self._state = getattr(inner, "state", self._state)

    def line(self) -> str:
        """Return the current state as text."""
        state = self._state
        best_s, bound_s = (None, None) if state is None else (state.step_time_s, state.bound_s)
        parts = [f"{self._clock() - self._begin:.0f} s", self._action]
        parts += [] if best_s is None else [f"best {best_s:.3g} s"]
        parts += [] if bound_s is None else [f"none below {bound_s:.3g} s"]
        parts += [] if state is None or state.gap is None else [f"gap {state.gap:.1%}"]
        return f"({'; '.join(parts)})"


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


def write_output(text: str, output: Path) -> None:
    """Write a whole file, or on an error nothing; raise a `JobError` where that fails."""
    from planner.errors import JobError
    from planner.plan.file import write_atomically

    try:
        write_atomically(text, output)
    except OSError as error:
        detail = f"--output {output} cannot be written: {error.strerror}."
        raise JobError(detail, what_to_do="Give the name of a file that may be written.") from error
    typer.echo(f"(written to {output})", err=True)


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn a `UserError` of the block into a message and an exit code; any other exception is a bug, and propagates.

    The message goes to standard error; with ``--json``, problem details go to standard output as well.
    """
    from api.requests.errors import UserError, error_data, exit_code_of

    try:
        yield
    except UserError as error:
        if as_json:
            typer.echo(json.dumps({"error": error_data(error)}, indent=2))
        typer.echo(f"shardplan: {error}", err=True)
        raise typer.Exit(exit_code_of(error)) from None
