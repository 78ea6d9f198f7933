"""The command line. It imports nothing heavy before a command needs it, so that ``shardplan --help`` answers at once.

Exit codes: 0 done; 1 verify found a difference (or we failed); 2 bad input; 3 no plan fits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.former_names import CommandsWithFormerNames
from api.cli.options import (
    Ac,
    AsyncTp,
    Attention,
    Axes,
    Batch,
    Cluster,
    DataAxes,
    Dtype,
    ExecutableOnly,
    FusedOps,
    HeterogeneousBlocks,
    Jobs,
    Json,
    MemoryGb,
    Mesh,
    MicroBatches,
    Model,
    NoCache,
    Optimizer,
    Phase,
    Pins,
    PlanFile,
    Planner,
    Reallgather,
    ReduceDtype,
    Seq,
    TimeLimit,
    ZigzagOrder,
)
from api.cli.requests import names_degrees, plan_of, price_degrees, priced_file, request_of, what_to_price
from api.cli.service import add_service_commands
from api.cli.terminal import check_writable, print_plan, reported, save_plan, terminal, watched
from api.cli.tradeoffs import add_tradeoff_commands

app = typer.Typer(
    cls=CommandsWithFormerNames,
    help="Decide how a PyTorch model is split over a GPU cluster, before the cluster is touched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Cluster,
    phase: Phase = "training",
    mesh: Mesh = None,
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    planner: Planner = "ilp",
    pin: Pins = None,
    data_axis: DataAxes = None,
    axes: Axes = 2,
    heterogeneous_blocks: HeterogeneousBlocks = False,
    executable_only: ExecutableOnly = True,
    async_tp: AsyncTp = False,
    reallgather: Reallgather = False,
    fused_ops: FusedOps = False,
    zigzag: ZigzagOrder = False,
    attention_kernel: Attention = None,
    time_limit: TimeLimit = None,
    jobs: Jobs = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Plan how MODEL is trained, or run, on a cluster."""
    with reported(as_json):
        if output is not None:
            check_writable(output)
        request = request_of(
            model=model,
            cluster=cluster,
            phase=phase,
            mesh=mesh,
            batch=batch,
            seq=seq,
            micro_batches=micro_batches,
            ac=ac,
            memory_gb=memory_gb,
            optimizer=optimizer,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            planner=planner,
            pins=tuple(pin or ()),
            data_axes=tuple(data_axis or ()),
            axes=axes,
            heterogeneous_blocks=heterogeneous_blocks,
            executable_only=executable_only,
            async_tp=async_tp,
            reallgather=reallgather,
            fused_ops=fused_ops,
            zigzag=zigzag,
            attention_kernel=attention_kernel,
        )
        found = plan_of(request, use_cache=not no_cache, time_limit_s=time_limit, jobs=jobs)
        if output is not None:
            save_plan(found, output)
        print_plan(found, as_json=as_json)


@app.command("show")
def show_command(plan: PlanFile, as_json: Json = False) -> None:
    """Show what a plan does, what it costs and how good it is."""
    with reported(as_json):
        from planner.plan.sharding_plan import ShardingPlan

        print_plan(ShardingPlan.load(plan), as_json=as_json)


@app.command("estimate")
def estimate_command(
    model: Model,
    what: Annotated[
        str | None,
        typer.Argument(metavar="[PLAN|PLANNER]", help="A plan file, or a planner's name such as fully-sharded."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file; the same as giving it after MODEL.")] = None,
    planner: Annotated[str | None, typer.Option(help="A planner's name; the same as giving it after MODEL.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="As for plan; for a plan file, its own cluster where left out.")
    ] = None,
    phase: Annotated[str | None, typer.Option(help="training (the default), prefill or decode.")] = None,
    mesh: Mesh = None,
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Annotated[str | None, typer.Option(help="Such as adamw (the default) or sgd.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 (the default), fp16 or fp32.")] = None,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="In which gradients are reduced: fp32 (the default), bf16 or fp16.")
    ] = None,
    fused_ops: Annotated[
        bool | None, typer.Option("--fused-ops", help="As for plan; with a planner's name alone.")
    ] = None,
    reallgather: Annotated[bool | None, typer.Option("--reallgather", help="As for plan; likewise.")] = None,
    zigzag: Annotated[bool | None, typer.Option("--zigzag", help="As for plan; likewise.")] = None,
    attention_kernel: Attention = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per rank and micro-batch (a configuration).")] = None,
    sp: Annotated[bool, typer.Option("--sp", help="Megatron's sequence parallelism (a configuration).")] = False,
    virtual_stages: Annotated[int, typer.Option(help="Model chunks per pipeline rank (a configuration).")] = 1,
    schedule: Annotated[str, typer.Option(help="Of the pipeline: gpipe, 1f1b, ... (a configuration).")] = "1f1b",
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Price a plan file, a planner's plan by name, or a parallel configuration by its degrees, for MODEL.

    A configuration is a mesh of dp, fsdp, tp, pp, cp, ep and a --micro-batch: what Megatron or torchtitan would run,
    priced from the model's dimensions alone, whether or not the executor can run it.
    """
    with reported(as_json):
        from planner.errors import JobError

        if what is None and plan is None and planner is None and (micro_batch is not None or names_degrees(mesh)):
            for_plans = {
                "--micro-batches": micro_batches,
                "--memory-gb": memory_gb,
                "--phase": phase,
                "--reduce-dtype": reduce_dtype,
                "--fused-ops": fused_ops,
                "--reallgather": reallgather,
                "--zigzag": zigzag,
                "--attention-kernel": attention_kernel,
            }
            wrong = [option for option, value in for_plans.items() if value is not None]
            if wrong:
                raise JobError(
                    f"{', '.join(wrong)}: for plans, not for a configuration by its degrees.",
                    what_to_do="Leave it out; a configuration's micro-batch is --micro-batch.",
                )
            configuration: dict[str, Any] = {
                "cluster": cluster,
                "mesh": mesh,
                "micro_batch": micro_batch,
                "batch": batch,
                "seq": seq,
                "ac": ac,
                "optimizer": optimizer,
                "dtype": dtype,
            }
            price_degrees(
                model,
                {key: value for key, value in configuration.items() if value is not None},
                sp=sp,
                virtual_stages=virtual_stages,
                schedule=schedule,
                as_json=as_json,
            )
            return
        file, name = what_to_price(what, plan, planner)
        options = {
            "phase": phase,
            "mesh": mesh,
            "batch": batch,
            "seq": seq,
            "micro_batches": micro_batches,
            "ac": ac,
            "memory_gb": memory_gb,
            "optimizer": optimizer,
            "dtype": dtype,
            "reduce_dtype": reduce_dtype,
            "fused_ops": fused_ops,
            "reallgather": reallgather,
            "zigzag": zigzag,
            "attention_kernel": attention_kernel,
        }
        given = {key: value for key, value in options.items() if value is not None}
        if file is not None:
            if given or no_cache:
                names = ", ".join(f"--{key.replace('_', '-')}" for key in [*given, *(["no_cache"] if no_cache else [])])
                raise JobError(
                    f"{names} cannot be given with a plan file.", what_to_do="The plan says those; leave them out."
                )
            priced = priced_file(model, file, cluster)
        else:
            if cluster is None:
                raise JobError("--cluster is missing.", what_to_do="Give one, such as --cluster 2x8xh100-sxm-80gb.")
            priced = plan_of(request_of(model=model, cluster=cluster, planner=name, **given), use_cache=not no_cache)
        print_plan(priced, as_json=as_json)


@app.command("verify")
def verify_command(model: Model, plan: PlanFile, as_json: Json = False) -> None:
    """Run PLAN for MODEL on fake processes and compare its collectives: exit code 1 where they differ."""
    with reported(as_json):
        from api.requests.model_registry import load_for_plan
        from planner.plan.sharding_plan import ShardingPlan

        loaded = ShardingPlan.load(plan)
        with watched() as progress:
            progress("building the model")
            source = load_for_plan(model, loaded)
            progress("running the plan on fake processes")
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

        found = diff_plans(ShardingPlan.load(plan), ShardingPlan.load(other))
        if as_json:
            typer.echo(json.dumps(found.to_dict(), indent=2))
        else:
            from api.render.diff import show_diff

            show_diff(found, terminal())


@app.command("explain")
def explain_command(
    model: Model,
    plan: PlanFile,
    parameter: Annotated[str, typer.Argument(metavar="FQN", help="A parameter, such as lm_head.weight.")],
    as_json: Json = False,
) -> None:
    """Say what every other layout of a parameter would cost, with all else planned anew around it."""
    with reported(as_json):
        from api.requests.plan_request import explanation

        with watched() as progress:
            found = explanation(model, plan, parameter, progress)
        from api.render.explanation import explanation_dict, show_explanation

        if as_json:
            typer.echo(json.dumps(explanation_dict(found), indent=2))
        else:
            show_explanation(found, terminal())


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the cluster to this YAML file.")],
    backend: Annotated[str | None, typer.Option(help="nccl (where there is a GPU) or gloo.")] = None,
) -> None:
    """Measure this cluster and write the file that describes it; start it with torchrun."""
    with reported(as_json=False):
        from api.cli.calibration import calibrate

        check_writable(output)
        written = calibrate(output, backend=backend)
        if written is not None:
            typer.echo(written, nl=False)
            typer.echo(f"(written to {output}: give it as --cluster {output})", err=True)


add_tradeoff_commands(app)
add_service_commands(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="shardplan")
