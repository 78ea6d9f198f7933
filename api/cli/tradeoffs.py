"""The commands that show what else could be had: ``alternatives``, ``pareto``, ``sweep``, ``batches``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from api.cli.options import (
    Ac,
    Attention,
    Axes,
    Batch,
    Cluster,
    DataAxes,
    Dtype,
    FusedOps,
    Json,
    MemoryGb,
    Mesh,
    MicroBatches,
    Model,
    Optimizer,
    Phase,
    Pins,
    Reallgather,
    ReduceDtype,
    Seq,
    TimeLimit,
    ZigzagOrder,
)
from api.cli.requests import request_of
from api.cli.terminal import check_folder, reported, save_plan, terminal, watched

if TYPE_CHECKING:
    from api.render.tradeoff_rows import TradeoffRow
    from api.requests.plan_request import OpenedRequest, Progress

Folder = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the plans into this folder, as 1.json, 2.json, ...")
]


def add_tradeoff_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("alternatives")(alternatives_command)
    app.command("pareto")(pareto_command)
    app.command("sweep")(sweep_command)
    app.command("batches")(batches_command)


def alternatives_command(
    model: Model,
    cluster: Cluster,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many other meshes.")] = 3,
    phase: Phase = "training",
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    fused_ops: FusedOps = False,
    reallgather: Reallgather = False,
    zigzag: ZigzagOrder = False,
    attention_kernel: Attention = None,
    pin: Pins = None,
    data_axis: DataAxes = None,
    axes: Axes = 2,
    time_limit: TimeLimit = None,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Show the best plan for MODEL and the best plans of the meshes that come next."""
    job: dict[str, Any] = {"batch": batch, "seq": seq, "micro_batches": micro_batches, "ac": ac, "memory_gb": memory_gb}
    job |= {
        "phase": phase,
        "optimizer": optimizer,
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "fused_ops": fused_ops,
        "reallgather": reallgather,
        "zigzag": zigzag,
        "attention_kernel": attention_kernel,
        "pins": tuple(pin or ()),
        "data_axes": tuple(data_axis or ()),
        "axes": axes,
    }
    with reported(as_json), watched() as progress:
        opened = _opened(progress, output, model=model, cluster=cluster, **job)
        from api.render.tradeoff_rows import alternative_rows

        _show(alternative_rows(opened, count, time_limit), output, as_json=as_json)


def pareto_command(
    model: Model,
    cluster: Cluster,
    mesh: Mesh = None,
    phase: Phase = "training",
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    fused_ops: FusedOps = False,
    reallgather: Reallgather = False,
    zigzag: ZigzagOrder = False,
    attention_kernel: Attention = None,
    pin: Pins = None,
    data_axis: DataAxes = None,
    axes: Axes = 2,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the search of each plan.")] = None,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Show what a step of MODEL takes within less and less memory, down to the least that does."""
    job: dict[str, Any] = {
        "mesh": mesh,
        "batch": batch,
        "seq": seq,
        "micro_batches": micro_batches,
        "ac": ac,
        "memory_gb": memory_gb,
    }
    job |= {
        "phase": phase,
        "optimizer": optimizer,
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "fused_ops": fused_ops,
        "reallgather": reallgather,
        "zigzag": zigzag,
        "attention_kernel": attention_kernel,
        "pins": tuple(pin or ()),
        "data_axes": tuple(data_axis or ()),
        "axes": axes,
    }
    with reported(as_json), watched() as progress:
        opened = _opened(progress, output, model=model, cluster=cluster, **job)
        from api.render.tradeoff_rows import pareto_rows

        _show(pareto_rows(opened, mesh, time_limit), output, as_json=as_json)


def sweep_command(
    model: Model,
    cluster: Annotated[str, typer.Option(help="The largest: NODESxDEVICESxDEVICE, or a .yaml file.")],
    objective: Annotated[
        Literal["step-time", "cost", "fewest-devices"],
        typer.Option(help="What makes a size the best: cost is device time per step."),
    ] = "cost",
    within: Annotated[float | None, typer.Option(help="Seconds that a step of the best may take.")] = None,
    price: Annotated[float | None, typer.Option(help="Of a device for an hour, in any currency.")] = None,
    phase: Phase = "training",
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    fused_ops: FusedOps = False,
    reallgather: Reallgather = False,
    zigzag: ZigzagOrder = False,
    attention_kernel: Attention = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the search of each plan.")] = None,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Plan MODEL on 1, 2, 4, ... devices of a cluster, and say which number is best."""
    job: dict[str, Any] = {"batch": batch, "seq": seq, "micro_batches": micro_batches, "ac": ac, "memory_gb": memory_gb}
    job |= {"phase": phase, "optimizer": optimizer, "dtype": dtype, "reduce_dtype": reduce_dtype}
    job |= {"fused_ops": fused_ops, "reallgather": reallgather, "zigzag": zigzag, "attention_kernel": attention_kernel}
    with reported(as_json), watched() as progress:
        opened = _opened(progress, output, model=model, cluster=cluster, **job)
        from api.render.tradeoff_rows import sweep_rows

        rows = sweep_rows(opened, objective, within_s=within, price=price, time_limit_s=time_limit)
        _show(rows, output, as_json=as_json)


def batches_command(
    model: Model,
    cluster: Cluster,
    phase: Annotated[Literal["prefill", "decode"], typer.Option(help="Of inference.")] = "decode",
    mesh: Mesh = None,
    seq: Seq = None,
    within: Annotated[float | None, typer.Option(help="Seconds that a step of the best may take.")] = None,
    most: Annotated[int, typer.Option(min=1, help="The largest batch that is tried.")] = 4096,
    memory_gb: MemoryGb = None,
    dtype: Dtype = "bf16",
    fused_ops: FusedOps = False,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for the search of each plan.")] = None,
    output: Folder = None,
    as_json: Json = False,
) -> None:
    """Plan inference with MODEL at batches of 1, 2, 4, ... and say which makes the most tokens per second."""
    job: dict[str, Any] = {"phase": phase, "mesh": mesh, "batch": 1, "seq": seq, "memory_gb": memory_gb}
    job |= {"dtype": dtype, "fused_ops": fused_ops}
    with reported(as_json), watched() as progress:
        opened = _opened(progress, output, model=model, cluster=cluster, **job)
        from api.render.tradeoff_rows import batch_rows

        rows = batch_rows(opened, mesh, most=most, within_s=within, time_limit_s=time_limit)
        _show(rows, output, as_json=as_json)


def _opened(progress: Progress, output: Path | None, **options: Any) -> OpenedRequest:
    """Return the request with its model, once the folder for the plans is there."""
    if output is not None:
        check_folder(output)
    request = request_of(**options)
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
