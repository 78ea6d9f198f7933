"""`script_rows`: what a script with torch's own parallelism says of a plan, approximates and loses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from api.frameworks.expressed import Row
from api.frameworks.pytorch.axes import AxisRoles, ParameterLayouts, gathers_batch, inner_ports, moves
from api.frameworks.pytorch.fsdp import Units
from api.frameworks.pytorch.names import names_of
from api.frameworks.pytorch.steps import OPTIMIZERS, Step
from api.frameworks.pytorch.styles import TensorStyles
from planner.plan.sharding_plan import ShardingPlan


def script_rows(
    plan: ShardingPlan,
    roles: AxisRoles,
    styles: TensorStyles | None,
    units: Units,
    step: Step,
    layouts: Mapping[str, ParameterLayouts],
    unsaid: tuple[str, ...],
) -> Iterator[Row]:
    """Yield what a script says of each aspect of ``plan``, which ``unsaid`` parameters have kept from being said."""
    yield roles.row()
    yield from _merged(
        [
            *_parameter_rows(plan, roles, layouts, unsaid),
            *([] if styles is None else styles.rows),
            *units.rows,
            *_step_rows(plan, roles, step),
            *_technique_rows(plan),
        ]
    )


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Return rows without "expressed" ones for a field that another row says less of."""
    rows = list(rows)
    worse = {row.field for row in rows if row.outcome != "expressed"}
    return [row for row in rows if row.outcome != "expressed" or row.field not in worse]


def _parameter_rows(
    plan: ShardingPlan, roles: AxisRoles, layouts: Mapping[str, ParameterLayouts], unsaid: tuple[str, ...]
) -> Iterator[Row]:
    yield Row(field="parameters", outcome="expressed", detail="stored and used in the plan's layouts")
    yield Row(field="activations", outcome="expressed", detail="each rank has its own samples")
    sharded = [n for n, item in layouts.items() if any(not item.compute[a].is_replicate() for a in roles.unsaid)]
    if sharded:
        axes = ", ".join(roles.names[axis] for axis in roles.unsaid)
        known = list(layouts)
        why = f" (no style says {names_of(unsaid, known)})" if unsaid else ""
        detail = f"tensor parallelism on {axes} is FSDP there{why}: gathered for use are {names_of(sharded, known)}"
        yield Row(field="parameters", outcome="approximated", detail=detail)
    keys = dict.fromkeys(key for key, _, port in inner_ports(plan) if any(moves(port, axis) for axis in roles.unsaid))
    if keys:
        yield Row(field="activations", outcome="lost", detail=f"other layouts than a split batch at {', '.join(keys)}")
    data = (*roles.replicate, *roles.shard)
    whole = dict.fromkeys(key for key, _, port in inner_ports(plan) if any(gathers_batch(port, axis) for axis in data))
    if whole:
        detail = f"each rank has its own samples at {', '.join(whole)}, where the plan gathers the batch"
        yield Row(field="activations", outcome="approximated", detail=detail)


def _step_rows(plan: ShardingPlan, roles: AxisRoles, step: Step) -> Iterator[Row]:
    job = plan.job
    if job.training:
        reduction = {
            "ddp": "DDP all-reduces them in buckets, overlapped with the backward; the plan one by one",
            "fsdp": "FSDP reduces them in every micro-batch or once a step, as the plan does"
            + (", and all-reduces one buffer for each group, not each parameter" if len(step.data) > 1 else ""),
            "own": "all-reduced one by one, once a step",
        }[step.reduction]
        yield Row(field="gradient reduction", outcome="expressed", detail=reduction)
        yield _micro_batch_row(plan, step)
        known = job.optimizer in OPTIMIZERS
        detail = job.optimizer if known else f"{job.optimizer} becomes AdamW: torch has none for sharded parameters"
        yield Row(field="optimizer", outcome="expressed" if known else "approximated", detail=detail)
    if plan.activation_checkpointing:
        modes = sorted({*plan.activation_checkpointing.values()})
        yield Row(field="checkpointing", outcome="expressed", detail=f"checkpoint_wrapper, {' and '.join(modes)}")
    if step.autocast:
        detail = f"autocast to {job.dtype}: norms, softmax and the loss run in fp32, and gradients are fp32"
        yield Row(field="dtype", outcome="approximated", detail=detail)
    else:
        detail = f"{job.dtype} in compute, {job.reduce_dtype} in reduction, {job.stored_dtype} stored"
        yield Row(field="dtype", outcome="expressed", detail=detail)


def _micro_batch_row(plan: ShardingPlan, step: Step) -> Row:
    count, batch = plan.micro_batches, plan.job.batch
    if batch is not None and batch % (count * step.data_ranks):
        detail = f"{count} of {batch} samples do not divide over {step.data_ranks} ranks: change BATCH"
        return Row(field="micro-batches", outcome="lost", detail=detail)
    return Row(field="micro-batches", outcome="expressed", detail=f"{count} a step")


def _technique_rows(plan: ShardingPlan) -> Iterator[Row]:
    job, lost = plan.job, "the script runs the model's own code"
    techniques = {
        "fused-ops": (job.fused_ops, f"{lost}; torch.compile may fuse it"),
        "fused-projections": (job.fused_projections, f"{lost}, with one linear layer for each projection"),
        "zigzag": (plan.zigzag is not None, "sequences are in their natural order, and attention is not sharded"),
        "reallgather": (plan.reallgathers, "gathered inputs are saved for the backward"),
        "async-tp": (job.async_tp, "communication is not decomposed; torch.compile can do that"),
        "flash3": (job.attention_kernel == "flash3", "attention runs in the kernel that torch chooses"),
    }
    for name, (is_used, detail) in techniques.items():
        if is_used:
            yield Row(field=f"technique {name}", outcome="lost", detail=detail)
    whole = [key for key, value in plan.opaque_modules.items() if not value]
    if whole:
        detail = f"modules that run on whole tensors run on each rank's samples: {', '.join(whole)}"
        yield Row(field="activations", outcome="approximated", detail=detail)
    if plan.pipeline is not None:
        detail = f"{len(plan.pipeline.stages)} stages: the script runs all layers on the ranks of one stage"
        yield Row(field="pipeline", outcome="lost", detail=detail)
