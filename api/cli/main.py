"""The commands of ``shardplan``. A command imports torch and the planner only when it runs, so ``--help`` is fast.

Exit codes: 0 done; 1 verify found a difference, or shardplan failed; 2 bad input; 3 no plan fits; 4 the plan does not
run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.catalogue import add_catalogue_commands, print_versions
from api.cli.defaults import with_assumed
from api.cli.former_names import CommandsWithFormerNames
from api.cli.frameworks import For, add_framework_commands, plan_for
from api.cli.headings import CommandWithHeadings
from api.cli.options import (
    Details,
    Json,
    Model,
    NoCache,
    PlanFile,
    PlanOutput,
    Price,
    Tokens,
    takes_job_options,
)
from api.cli.pictures import add_picture_commands
from api.cli.requests import (
    CONFIGURATION_OPTIONS,
    check_model,
    names_degrees,
    plan_of,
    price_degrees,
    priced_file,
    refuse_options,
    request_of,
    what_to_price,
)
from api.cli.service import add_service_commands
from api.cli.terminal import (
    check_run_cost,
    check_writable,
    print_configuration,
    print_plan,
    reported,
    save_plan,
    terminal,
    watched,
)
from api.cli.tradeoffs import add_tradeoff_commands

if TYPE_CHECKING:
    from planner.plan.sharding_plan import ShardingPlan

CONFIGURATION = "A configuration by its degrees"
_PRICED = (
    "cluster", "batch", "seq", "mesh", "memory_gb", "phase", "micro_batches", "ac", "optimizer", "dtype",
    "reduce_dtype", "expert_imbalance", "techniques",
)  # fmt: skip
"""Job options of ``estimate``: those that the price of a planner's plan depends on."""

app = typer.Typer(
    cls=CommandsWithFormerNames,
    help="Decide how a PyTorch model is split over a GPU cluster, before the cluster is touched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def shardplan(
    version: Annotated[
        bool, typer.Option("--version", callback=print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Decide how a PyTorch model is split over a GPU cluster, before the cluster is touched."""


@app.command("plan", cls=CommandWithHeadings)
@takes_job_options(defaults={"cluster": None})
def plan_command(
    model: Model,
    options: dict[str, Any],
    output: PlanOutput = None,
    framework: For = None,
    details: Details = False,
    tokens: Tokens = None,
    price: Price = None,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Plan how MODEL is trained, or run, on a cluster.

    A cluster, batch or sequence length that is left out is assumed, and printed.
    """
    with reported(as_json):
        check_run_cost(tokens, price)
        if output is not None:
            check_writable(output)
        limits = {name: options.pop(name) for name in ("time_limit_s", "jobs")}
        options, assumed = with_assumed(model, options)

        def plan_with(planner: str) -> ShardingPlan:
            request = request_of(model=model, **{**options, "planner": planner})
            return plan_of(request, use_cache=not no_cache, **limits)

        planner = options["planner"]
        plan = plan_with(planner) if framework is None else plan_for(framework, planner, plan_with)
        plan = dataclasses.replace(plan, assumed=assumed)
        if output is not None:
            save_plan(plan, output)
        print_plan(plan, as_json=as_json, details=details, tokens=tokens, price=price, file=output)


@app.command("show")
def show_command(
    plan: PlanFile, details: Details = False, tokens: Tokens = None, price: Price = None, as_json: Json = False
) -> None:
    """Show what a plan does, what it costs and how good it is."""
    with reported(as_json):
        check_run_cost(tokens, price)
        from planner.plan.sharding_plan import ShardingPlan

        loaded = ShardingPlan.load(plan)
        print_plan(loaded, as_json=as_json, details=details, tokens=tokens, price=price, file=plan)


@app.command("estimate", cls=CommandWithHeadings)
@takes_job_options(only=_PRICED, optional=True)
def estimate_command(
    model: Model,
    options: dict[str, Any],
    what: Annotated[
        str | None,
        typer.Argument(metavar="[PLAN|PLANNER]", help="A plan file, or a planner's name such as fsdp."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file; the same as giving it after MODEL.")] = None,
    planner: Annotated[str | None, typer.Option(help="A planner's name; the same as giving it after MODEL.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples per rank and micro-batch.", rich_help_panel=CONFIGURATION)
    ] = None,
    sp: Annotated[
        bool, typer.Option("--sp", help="Megatron's sequence parallelism.", rich_help_panel=CONFIGURATION)
    ] = False,
    virtual_stages: Annotated[
        int, typer.Option(help="Model chunks per pipeline rank.", rich_help_panel=CONFIGURATION)
    ] = 1,
    schedule: Annotated[
        str, typer.Option(help="Of the pipeline: gpipe, 1f1b, ...", rich_help_panel=CONFIGURATION)
    ] = "1f1b",
    details: Details = False,
    tokens: Tokens = None,
    price: Price = None,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Price a plan file, a planner's plan by name, or a parallel configuration by its degrees, for MODEL.

    A configuration is a mesh of dp, fsdp, tp, pp, cp, ep and a --micro-batch: what Megatron or torchtitan would run,
    priced from the model's dimensions, whether or not the executor can run it.
    """
    with reported(as_json):
        from planner.errors import JobError

        check_run_cost(tokens, price)
        is_configuration = micro_batch is not None or names_degrees(options.get("mesh"))
        if what is None and plan is None and planner is None and is_configuration:
            refuse_options(
                [name for name in options if name not in CONFIGURATION_OPTIONS],
                ": for plans, not for a configuration by its degrees.",
                "Leave it out; a configuration's micro-batch is --micro-batch.",
            )
            if micro_batch is not None:
                options["micro_batch"] = micro_batch
            priced_degrees = price_degrees(model, options, sp=sp, virtual_stages=virtual_stages, schedule=schedule)
            print_configuration(priced_degrees, as_json=as_json, tokens=tokens, price=price)
            return
        file, name = what_to_price(what, plan, planner)
        if file is not None:
            cluster = options.pop("cluster", None)
            refuse_options(
                [*options, *(["no_cache"] if no_cache else [])],
                " cannot be given with a plan file.",
                "The plan says those; leave them out.",
            )
            priced = priced_file(model, file, cluster)
        else:
            if "cluster" not in options:
                raise JobError("--cluster is missing.", what_to_do="Give one, such as --cluster 2x8xh100-sxm-80gb.")
            priced = plan_of(request_of(model=model, planner=name, **options), use_cache=not no_cache)
        print_plan(priced, as_json=as_json, details=details, tokens=tokens, price=price, file=file)


@app.command("verify")
def verify_command(model: Model, plan: PlanFile, as_json: Json = False) -> None:
    """Run PLAN for MODEL on fake processes and compare its collectives with the plan's.

    Exit code 1: they differ. Exit code 4: the plan does not run.
    """
    with reported(as_json):
        check_model(model)
        from api.requests.model_registry import load_for_plan
        from planner.plan.sharding_plan import ShardingPlan
        from planner.progress import BUILDING_MODEL, RUNNING_ON_FAKE_PROCESSES

        loaded = ShardingPlan.load(plan)
        with watched() as progress:
            progress(BUILDING_MODEL)
            source = load_for_plan(model, loaded)
            progress(RUNNING_ON_FAKE_PROCESSES)
            from api.requests.plan_request import verification

            report = verification(source, loaded).to_dict()
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            from api.render.plan import show_verification

            show_verification(report, terminal())
    if not report["equal"]:
        raise typer.Exit(1)


@app.command("diff")
def diff_command(plan: PlanFile, other: PlanFile, as_json: Json = False) -> None:
    """Compare two plan files: how they run, what a step costs, and where their layouts differ."""
    with reported(as_json):
        from api.render.plan_diff import diff_plans
        from planner.plan.sharding_plan import ShardingPlan

        differences = diff_plans(ShardingPlan.load(plan), ShardingPlan.load(other))
        if as_json:
            typer.echo(json.dumps(differences.to_dict(), indent=2))
        else:
            from api.render.diff import show_diff

            show_diff(differences, terminal())


@app.command("explain")
def explain_command(
    model: Model,
    plan: PlanFile,
    parameter: Annotated[str, typer.Argument(metavar="FQN", help="A parameter, such as lm_head.weight.")],
    as_json: Json = False,
) -> None:
    """Show what every other layout of a parameter would cost, with all other layouts planned again."""
    with reported(as_json):
        check_model(model)
        from api.requests.plan_request import explanation

        with watched() as progress:
            result = explanation(model, plan, parameter, progress)
        from api.render.explanation import explanation_dict, show_explanation

        if as_json:
            typer.echo(json.dumps(explanation_dict(result), indent=2))
        else:
            show_explanation(result, terminal())


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the cluster to this YAML file.")],
    backend: Annotated[str | None, typer.Option(help="nccl (where there is a GPU) or gloo.")] = None,
) -> None:
    """Measure this cluster and write the file that describes it; start it with torchrun."""
    with reported(as_json=False):
        from api.cli.calibration import calibrate

        check_writable(output)
        description = calibrate(output, backend=backend)
        if description is not None:
            typer.echo(description, nl=False)
            typer.echo(f"(written to {output}: give it as --cluster {output})", err=True)


add_framework_commands(app)
add_picture_commands(app)
add_tradeoff_commands(app)
add_catalogue_commands(app)
add_service_commands(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="shardplan")
