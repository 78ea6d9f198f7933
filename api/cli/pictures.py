"""Commands that draw a plan: ``report``, one HTML file or figures, and ``trace``, for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import PlanFile
from api.cli.terminal import check_folder, check_writable, reported, write_output

ReportOutput = Annotated[
    Path, typer.Option("--output", "-o", help="Write this file; with png or svg, the figures into this folder.")
]
TraceOutput = Annotated[Path, typer.Option("--output", "-o", help="Write this file.")]


def add_picture_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("report")(report_command)
    app.command("trace")(trace_command)


def report_command(
    plan: PlanFile,
    output: ReportOutput,
    format_: Annotated[str, typer.Option("--format", help="html, png or svg.")] = "html",
) -> None:
    """Draw PLAN: one HTML file that opens without a server, or its figures as PNG or SVG."""
    with reported(as_json=False):
        from planner.errors import JobError

        if format_ not in ("html", "png", "svg"):
            raise JobError(f"--format is {format_!r}.", what_to_do="Choose one of html, png, svg.", field="format")
        if format_ == "html":
            check_writable(output)
        else:
            check_folder(output)
        from planner.plan.sharding_plan import ShardingPlan

        loaded = ShardingPlan.load(plan)
        if format_ == "html":
            from api.view.report import report_html

            write_output(report_html(loaded), output)
        else:
            from api.view.figures import write_figures

            for file in write_figures(loaded, output, format_):
                typer.echo(f"(written to {file})", err=True)


def trace_command(
    plan: PlanFile,
    output: TraceOutput,
    ranks: Annotated[
        str, typer.Option(help="Ranks of a pipeline whose stages are shown, such as 0,8. Default: all stages.")
    ] = "",
) -> None:
    """Write the predicted step of PLAN as Chrome trace events, which https://ui.perfetto.dev opens."""
    with reported(as_json=False):
        check_writable(output)
        from api.view.trace import chrome_trace
        from planner.errors import JobError
        from planner.plan.sharding_plan import ShardingPlan

        try:
            numbers = [int(rank) for rank in ranks.split(",") if rank]
        except ValueError as error:
            advice = "Give numbers with commas between them, such as 0,8."
            raise JobError(f"--ranks is {ranks!r}.", what_to_do=advice, field="ranks") from error
        write_output(json.dumps(chrome_trace(ShardingPlan.load(plan), ranks=numbers)), output)
