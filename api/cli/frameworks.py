"""Commands for configurations of the frameworks that people launch with: ``check`` and ``export``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.options import Json, Model, PlanFile
from api.cli.terminal import check_writable, errors_terminal, reported, terminal, watched, write_output
from planner.plan.job_spec import MESH

if TYPE_CHECKING:
    from planner.plan.sharding_plan import ShardingPlan

For = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="Only plans that this framework's configuration says in full (see export --to): torch, torchtitan, ...",
        rich_help_panel=MESH,
    ),
]


def plan_for(framework: str, planner: str, plan_of: Callable[[str], ShardingPlan]) -> ShardingPlan:
    """Return the best plan that a framework's configuration says in full; ``plan_of`` plans with a planner.

    Raises:
        JobError: there is no such framework, or a planner was named too.
    """
    from api.frameworks.export import plan_within
    from planner.errors import JobError

    if planner != "ilp":
        advice = "Leave one of them out."
        raise JobError(f"--for {framework} chooses the planner, and --planner is {planner}.", what_to_do=advice)
    return plan_within(framework, plan_of)


def add_framework_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("check")(check_command)
    app.command("export")(export_command)


def check_command(
    model: Model,
    configuration: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="A file, or - for standard input: a recipe, YAML, JSON or a command line."
        ),
    ],
    cluster: Annotated[str, typer.Option(help="As for plan, such as 8x8xh100-sxm-80gb.")],
    framework: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="torchtitan, megatron, megatron-bridge, accelerate, deepspeed, transformers, vllm, "
            "torch (a script). Default: recognised.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples in the global batch, where CONFIG does not say it.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence, where CONFIG does not say it.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Price it by its degrees only, in a second; plan nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a framework's configuration for MODEL: is it legal, does it fit, how fast, and what would be better?

    Exit code 2: it is not legal. Exit code 3: it does not fit.
    """
    with reported(as_json):
        from api.frameworks.check import check

        text = _text_of(configuration)
        with watched() as progress:
            found = check(
                model,
                text,
                cluster=cluster,
                framework=framework,
                batch=batch,
                seq=seq,
                plans=not quick,
                progress=progress,
            )
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2))
        else:
            from api.render.check import show_check

            show_check(found, terminal())
    if found.faults:
        raise typer.Exit(2)
    if found.fits is False:
        raise typer.Exit(3)


def _text_of(name: str) -> str:
    """Return the text of a file, or of standard input.

    Raises:
        JobError: it cannot be read.
    """
    from planner.errors import JobError

    try:
        text: Any = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        advice = "Give the file of a configuration, or - and the configuration on standard input."
        raise JobError(f"{name} cannot be read: {reason}.", what_to_do=advice, field="configuration") from error
    return str(text)


def export_command(
    plan: PlanFile,
    framework: Annotated[
        str,
        typer.Option(
            "--to",
            help="torch (a script), torchtitan, megatron, megatron-bridge, accelerate, deepspeed, transformers, vllm.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write this file. Default: standard output.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write PLAN as a configuration of a framework, and say what of the plan it expresses, approximates or loses."""
    with reported(as_json):
        from api.frameworks.export import export_plan, step_time_of
        from api.render.export import show_rows
        from planner.plan.sharding_plan import ShardingPlan

        if output is not None:
            check_writable(output)
        loaded = ShardingPlan.load(plan)
        exported = export_plan(loaded, framework)
        with watched() as progress:
            step_s = None if exported.loses_nothing else step_time_of(exported, loaded, progress)
        if as_json:
            typer.echo(json.dumps({**exported.to_dict(), "step_time_s": step_s}, indent=2))
        else:
            show_rows(exported, loaded, step_s, errors_terminal())
        if output is not None:
            write_output(exported.text, output)
        elif not as_json:
            typer.echo(exported.text, nl=False)
