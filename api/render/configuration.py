"""A priced configuration as text of 80 columns, in the order of a printed plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from api.render.plan import print_lines
from api.render.run_cost import device_word, run_line
from api.render.text import bars, fold, labelled, percent, significant, size, size_unit, time_unit, with_band
from api.requests.price_configuration import PricedConfiguration
from api.requests.run_cost import RunCost
from cost_model.configuration.memory import ROLES
from planner.plan.stated_errors import stated_configuration_error

_COMMUNICATION = ("tensor_s", "context_s", "expert_s", "pipeline_send_s", "data_s")
_NAMES = {"optimizer_state": "optimizer", "gathered": "all-gathered"}
_PARTS = {
    "tensor_s": "of tensor parallelism, exposed",
    "context_s": "of context parallelism, exposed",
    "expert_s": "of expert parallelism, exposed",
    "pipeline_send_s": "between stages, exposed",
    "data_s": "of parameters and gradients, exposed",
    "slowdown_s": "of kernels by overlapped communication",
}
"""Part of the step -> explanation, for parts whose names do not say enough."""


def show_configuration(priced: PricedConfiguration, console: Console, cost: RunCost | None = None) -> None:
    """Print the price of one parallel configuration; ``cost``: a training run whose days and price are printed."""
    print_lines(configuration_lines(priced, cost), console)


def configuration_lines(priced: PricedConfiguration, cost: RunCost | None = None) -> list[str]:
    """Return the price of a configuration as lines of at most 80 columns."""
    parts = [_headline(priced), figure_lines(priced, cost), _mesh(priced), memory_bars(priced), _time(priced)]
    return [line for part in parts for line in (*part, "")][:-1]


def _headline(priced: PricedConfiguration) -> list[str]:
    cluster, parallel = priced.cluster, priced.parallel
    nodes = f" ({cluster.nodes} nodes of {cluster.devices_per_node})" if cluster.nodes > 1 else ""
    lines = fold(f"{priced.model} on {cluster.size:,} x {cluster.device.name.upper()}{nodes}")
    lines += fold(f"training, {parallel.global_batch:,} x {parallel.seq:,} tokens a step, {parallel.dtype}")
    if not priced.fits:
        needs, has = size(priced.memory.device), size(cluster.memory_bytes)
        lines += fold(f"the configuration does not fit: it needs {needs}, and a device has {has}.", "Warning: ")
    return lines


def figure_lines(priced: PricedConfiguration, cost: RunCost | None = None) -> list[str]:
    """Return a line for each of step time, MFU, memory, and that nothing was run."""
    cluster, parallel, step_s = priced.cluster, priced.parallel, priced.time.total_s
    stated = stated_configuration_error(cluster, parallel.dtype, has_experts=priced.spec.experts is not None)
    each = priced.tokens_per_s_per_device
    rate = f"{significant(each * cluster.size)} tokens/s, {significant(each)} per {device_word(cluster)}"
    lines = labelled("step time", with_band(step_s, None if stated is None else stated.error), rate)
    name, share = _binding(priced)
    lines += labelled("MFU", f"{significant(100 * priced.model_flops_share)} %", f"bound by {name} ({percent(share)})")
    free = max(cluster.memory_bytes - priced.memory.device, 0.0) / cluster.memory_bytes
    figure = f"{size(priced.memory.device)} of {size(cluster.memory_bytes)}"
    lines += labelled("memory", figure, f"{percent(free)} free" if priced.fits else "does not fit")
    lines += labelled("verified", "no: a configuration by degrees is priced, not run")
    return lines + ([] if cost is None else labelled(*run_line(cost, each * cluster.size, cluster)))


def _binding(priced: PricedConfiguration) -> tuple[str, float]:
    time = priced.time
    parts = {
        "compute": time.compute_s + time.loss_s,
        "exposed communication": sum(getattr(time, name) for name in _COMMUNICATION) + time.slowdown_s,
        "the pipeline's bubble": time.bubble_s,
        "the optimizer's memory traffic": time.optimizer_s,
    }
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name] / time.total_s


def _mesh(priced: PricedConfiguration) -> list[str]:
    parallel = priced.parallel
    lines = ["Mesh"]
    for axis, degree, sentence in _axes(priced):
        lines += fold(sentence, f"{f'  {axis} = {degree:,}':<14}  ")
    batches = f"{parallel.micro_batches:,} micro-batch{'es' if parallel.micro_batches > 1 else ''}"
    ac = "no" if parallel.checkpointing == "none" else parallel.checkpointing
    each = f"{parallel.micro_batch} x {parallel.seq:,} tokens a rank"
    return lines + fold(f"{batches} of {each}, {ac} activation checkpointing", "  ")


def _axes(priced: PricedConfiguration) -> Iterator[tuple[str, int, str]]:
    """Yield (axis, degree, what it does) of each axis with a degree above 1."""
    parallel = priced.parallel
    sequences = ", sequences in between (SP)" if parallel.sequence_parallel else ""
    axes = (
        ("pp", parallel.pipeline, f"pipeline stages, {parallel.schedule}"),
        ("dp", parallel.replicate, "splits the batch over replicas of the model (DP)"),
        ("fsdp", parallel.shard, "shards weights, gradients, optimizer states and the batch (FSDP)"),
        ("cp", parallel.context, "splits sequences (CP)"),
        ("tp", parallel.tensor, f"splits matrix multiplications (TP){sequences}"),
        ("ep", parallel.expert, "spreads the experts over ranks of dp, fsdp and cp (EP)"),
    )
    used = [axis for axis in axes if axis[1] > 1]
    yield from used or [("dp", 1, "one device")]


def memory_bars(priced: PricedConfiguration) -> list[str]:
    """Return the bytes of a device at the peak by role, as bars."""
    memory = priced.memory
    amounts = {role: getattr(memory.peak, role) for role in ROLES}
    amounts |= {"other streams": memory.pools, "fragmentation": memory.fragmentation, "context": memory.context}
    shown = sorted(((name, value) for name, value in amounts.items() if value), key=lambda item: -item[1])
    named = {_NAMES.get(name, name.replace("_", " ")): value for name, value in shown}
    unit, one = size_unit(max(named.values(), default=0.0))
    notes = {"context": "CUDA context, NCCL", "other streams": "held by the allocator"}
    return bars(f"Memory per {device_word(priced.cluster)}", named, unit, one, notes)


def _time(priced: PricedConfiguration) -> list[str]:
    fields = [name for name in priced.time.__dataclass_fields__ if getattr(priced.time, name) > 0]
    amounts = {_part(name): getattr(priced.time, name) for name in fields}
    unit, one = time_unit(max(amounts.values(), default=0.0))
    return bars("Time per step", amounts, unit, one, {_part(name): text for name, text in _PARTS.items()})


def _part(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")
