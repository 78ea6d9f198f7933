"""The command line. It imports nothing heavy before a command needs it, so that ``shardplan --help`` answers at once.

Exit codes: 0 done; 1 verify found a difference (or we failed); 2 bad input; 3 no plan fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from api.planning import Progress
    from api.schemas import PlanRequest
    from planner.plan import ShardingPlan

app = typer.Typer(
    help="Decide how a PyTorch model is split over a GPU cluster, before the cluster is touched.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A preset (llama-3.1-8b, ...), a config.json or its folder, or package.module:factory."
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
Cluster = Annotated[str, typer.Option(help="NODESxDEVICESxDEVICE such as 4x8xh100-sxm-80gb, or a .yaml file.")]
Mesh = Annotated[
    str | None, typer.Option(help="Such as dp=2,tp=8, outermost axis first; without it, meshes are tried.")
]
Batch = Annotated[int | None, typer.Option(help="Samples in the global batch.")]
Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence.")]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches per step; without it, several are tried.")]
Ac = Annotated[
    str | None, typer.Option(help="Activation checkpointing: none, selective or full; without it, each is tried.")
]
MemoryGb = Annotated[float | None, typer.Option(help="Cap on the peak per device, in GB of 1e9 bytes.")]
Optimizer = Annotated[str, typer.Option(help="Such as adamw or sgd.")]
Dtype = Annotated[str, typer.Option(help="Of parameters and activations: bf16, fp16 or fp32.")]
Planner = Annotated[str, typer.Option(help="ilp, data-parallel, fully-sharded, tensor-parallel or random:SEED.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Plan again, though the same was planned before.")]


@app.command("plan")
def plan_command(
    model: Model,
    cluster: Cluster,
    mesh: Mesh = None,
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Optimizer = "adamw",
    dtype: Dtype = "bf16",
    planner: Planner = "ilp",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    as_json: Json = False,
    no_cache: NoCache = False,
) -> None:
    """Plan how MODEL is trained on a cluster."""
    with _reported(as_json):
        if output is not None:
            _check_writable(output)
        request = _request(
            model=model,
            cluster=cluster,
            mesh=mesh,
            batch=batch,
            seq=seq,
            micro_batches=micro_batches,
            ac=ac,
            memory_gb=memory_gb,
            optimizer=optimizer,
            dtype=dtype,
            planner=planner,
        )
        found = _planned(request, use_cache=not no_cache)
        if output is not None:
            _save(found, output)
        _print_plan(found, as_json=as_json)


@app.command("show")
def show_command(plan: PlanFile, as_json: Json = False) -> None:
    """Show what a plan does, what it costs and how good it is."""
    with _reported(as_json):
        from planner.plan import ShardingPlan

        _print_plan(ShardingPlan.load(plan), as_json=as_json)


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
    mesh: Mesh = None,
    batch: Batch = None,
    seq: Seq = None,
    micro_batches: MicroBatches = None,
    ac: Ac = None,
    memory_gb: MemoryGb = None,
    optimizer: Annotated[str | None, typer.Option(help="Such as adamw (the default) or sgd.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 (the default), fp16 or fp32.")] = None,
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
    with _reported(as_json):
        from planner.errors import JobError

        if what is None and plan is None and planner is None and (micro_batch is not None or _names_degrees(mesh)):
            if micro_batches is not None or memory_gb is not None:
                raise JobError(
                    "--micro-batches and --memory-gb are for plans.", what_to_do="Give --batch and --micro-batch."
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
            _price_configuration(
                model,
                {key: value for key, value in configuration.items() if value is not None},
                sp=sp,
                virtual_stages=virtual_stages,
                schedule=schedule,
                as_json=as_json,
            )
            return
        file, name = _what_to_price(what, plan, planner)
        options = {
            "mesh": mesh,
            "batch": batch,
            "seq": seq,
            "micro_batches": micro_batches,
            "ac": ac,
            "memory_gb": memory_gb,
            "optimizer": optimizer,
            "dtype": dtype,
        }
        given = {key: value for key, value in options.items() if value is not None}
        if file is not None:
            if given or no_cache:
                names = ", ".join(f"--{key.replace('_', '-')}" for key in [*given, *(["no_cache"] if no_cache else [])])
                raise JobError(
                    f"{names} cannot be given with a plan file.", what_to_do="The plan says those; leave them out."
                )
            priced = _priced(model, file, cluster)
        else:
            if cluster is None:
                raise JobError("--cluster is missing.", what_to_do="Give one, such as --cluster 2x8xh100-sxm-80gb.")
            priced = _planned(_request(model=model, cluster=cluster, planner=name, **given), use_cache=not no_cache)
        _print_plan(priced, as_json=as_json)


@app.command("verify")
def verify_command(model: Model, plan: PlanFile, as_json: Json = False) -> None:
    """Run PLAN for MODEL on fake processes and compare its collectives: exit code 1 where they differ."""
    with _reported(as_json):
        from api.models import load_model
        from planner.plan import ShardingPlan

        loaded = ShardingPlan.load(plan)
        with _progress() as progress:
            progress("building the model")
            source = load_model(model, batch=loaded.job.batch, seq=loaded.job.seq)
            progress("running the plan on fake processes")
            from api.planning import verification

            report = verification(source, loaded).to_dict()
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            from api.render import show_verification

            show_verification(report, _console())
    if not report["equal"]:
        raise typer.Exit(1)


@app.command("calibrate")
def calibrate_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the cluster to this YAML file.")],
    backend: Annotated[str | None, typer.Option(help="nccl (where there is a GPU) or gloo.")] = None,
) -> None:
    """Measure this cluster and write the file that describes it; start it with torchrun."""
    with _reported(as_json=False):
        from api.calibration import calibrate

        _check_writable(output)
        written = calibrate(output, backend=backend)
        if written is not None:
            typer.echo(written, nl=False)


@app.command("serve")
def serve_command(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 where left out.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 where left out; 0 takes a free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where the database lies.")] = None,
    workers: Annotated[int | None, typer.Option(help="Plans made at once.")] = None,
) -> None:
    """Serve plans over HTTP; SHARDPLAN_* in the environment sets what no option does."""
    with _reported(as_json=False):
        from api.serve import serve

        serve({"host": host, "port": port, "data_dir": data_dir, "workers": workers})


def main() -> None:
    """Run the command line."""
    app(prog_name="shardplan")


def _request(**options: Any) -> PlanRequest:
    from pydantic import ValidationError

    from api.schemas import PlanRequest
    from planner.errors import JobError

    try:
        return PlanRequest(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        detail = f"--{field.replace('_', '-')} is {options.get(field)!r}: {first['msg']}."
        raise JobError(detail, what_to_do="`shardplan plan --help` says what it takes.", field=field) from error


def _planned(request: PlanRequest, *, use_cache: bool) -> ShardingPlan:
    """Return the plan, from the cache where ``use_cache`` and it is there."""
    from api.cache import PlanCache
    from api.planning import check_request, fingerprint, plan_request

    check_request(request, allow_local=True)
    key = fingerprint(request, allow_local=True) if use_cache else None
    cache = PlanCache.of_user()
    known = cache.get(key) if key is not None else None
    if known is not None:
        typer.echo(f"(planned before: taken from {cache.folder}; --no-cache plans again)", err=True)
        return known
    with _progress() as progress:
        found = plan_request(request, allow_local=True, progress=progress)
    if key is not None:
        try:
            cache.put(key, found)
        except OSError as error:
            typer.echo(f"(the plan is not kept for next time: {error})", err=True)
    return found


def _what_to_price(what: str | None, plan: Path | None, planner: str | None) -> tuple[Path | None, str | None]:
    """Return the plan file or the planner's name; exactly one of them is not None."""
    from planner.errors import JobError

    given = [value for value in (what, plan, planner) if value is not None]
    if len(given) != 1:
        advice = "Give a plan file or a planner's name after MODEL, such as fully-sharded."
        raise JobError(
            "nothing to price was given." if not given else "more than one thing to price was given.", what_to_do=advice
        )
    if what is not None and (what.endswith(".json") or Path(what).exists()):
        return Path(what), None
    return plan, planner or what


def _names_degrees(mesh: str | None) -> bool:
    """Tell whether ``mesh`` has an axis that only a configuration has."""
    names = {part.partition("=")[0].strip() for part in (mesh or "").split(",")}
    return bool(names & {"fsdp", "pp", "cp", "ep"})


def _price_configuration(
    model: str, options: dict[str, Any], *, sp: bool, virtual_stages: int, schedule: str, as_json: bool
) -> None:
    from api.estimate_configuration import price_configuration
    from planner.errors import JobError

    for needed in ("cluster", "mesh"):
        if needed not in options:
            raise JobError(f"--{needed} is missing.", what_to_do="A configuration needs --cluster and --mesh.")
    priced = price_configuration(
        model, sequence_parallel=sp, virtual_stages=virtual_stages, schedule=schedule, **options
    )
    if as_json:
        typer.echo(json.dumps(priced.to_dict(), indent=2))
        return
    from api.render_configuration import show_configuration

    show_configuration(priced, _console())


def _priced(model: str, file: Path, cluster: str | None) -> ShardingPlan:
    """Return the plan in ``file`` with a fresh estimate, on ``cluster`` or its own."""
    from api.models import load_model, quiet_libraries
    from cost_model.cluster import ClusterSpec
    from planner import estimate_plan
    from planner.plan import ShardingPlan

    plan = ShardingPlan.load(file)
    where = None if cluster is None else ClusterSpec.parse(cluster)
    with _progress() as progress:
        progress("building the model")
        source = load_model(model, batch=plan.job.batch, seq=plan.job.seq)
        progress("pricing")
        with quiet_libraries():
            priced: ShardingPlan = estimate_plan(
                source.module, plan, example_inputs=source.example_inputs, cluster=where
            )
    return priced


def _print_plan(plan: ShardingPlan, *, as_json: bool) -> None:
    if as_json:
        typer.echo(plan.to_json(), nl=False)
        return
    from api.render import show_plan

    show_plan(plan, _console())


def _console() -> Any:
    from rich.console import Console

    # Piped output has no width of its own, and must not be cut at 80 columns.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Give a function that shows the stage at work, on standard error where a person watches it."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") if console.is_terminal else nullcontext() as status:

        def show(stage: str) -> None:
            if status is not None:
                status.update(f"{stage} ...")

        yield show


def _check_writable(output: Path) -> None:
    from planner.errors import JobError

    if output.is_dir() or not output.parent.is_dir():
        what = "is a folder" if output.is_dir() else f"cannot be written: there is no folder {output.parent}"
        raise JobError(f"--output {output} {what}.", what_to_do="Give the name of a file in a folder that exists.")


def _save(plan: ShardingPlan, output: Path) -> None:
    from planner.errors import JobError

    try:
        plan.save(output)
    except OSError as error:
        detail = f"--output {output} cannot be written: {error.strerror}."
        raise JobError(detail, what_to_do="Give the name of a file that may be written.") from error


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    """Turn an error that a user can act on into a message and its exit code; anything else is a bug, and shows.

    The message goes to standard error; with ``--json``, problem details go to standard output as well.
    """
    from api.errors import UserError, exit_code_of, problem_of

    try:
        yield
    except UserError as error:
        if as_json:
            typer.echo(json.dumps({"error": problem_of(error)}, indent=2))
        typer.echo(f"shardplan: {error}", err=True)
        raise typer.Exit(exit_code_of(error)) from None
