"""A priced configuration as tables for the terminal: time by part, memory by role."""

from __future__ import annotations

from rich.console import Console

from api.render.text import duration, new_table, size
from api.requests.price_configuration import PricedConfiguration
from cost_model.configuration.memory import ROLES


def show_configuration(priced: PricedConfiguration, console: Console) -> None:
    """Print the price of one parallel configuration."""
    parallel, memory = priced.parallel, priced.memory
    console.print(f"{priced.model} on {priced.cluster.name}: {duration(priced.time.total_s)} per step", style="bold")
    console.print(
        f"{priced.tokens_per_s_per_device:,.0f} tokens/s per device, {priced.model_flops_share:.1%} of peak FLOP/s; "
        f"{parallel.micro_batches} micro-batches of {parallel.micro_batch} x {parallel.seq} tokens per rank"
    )
    verdict = "fits" if priced.fits else "DOES NOT FIT"
    capacity = size(priced.cluster.memory_bytes)
    console.print(
        f"Memory: {size(round(memory.allocated))} allocated, {size(round(memory.reserved))} reserved, "
        f"{size(round(memory.device))} of the device: {verdict} in {capacity}"
    )
    seconds = new_table("Part", "Time>")
    for name in priced.time.__dataclass_fields__:
        value = getattr(priced.time, name)
        if isinstance(value, float) and value > 0:
            seconds.add_row(name.removesuffix("_s").replace("_", " "), duration(value))
    roles = new_table("Role", f"At the peak ({memory.peak.name})>")
    for role in ROLES:
        nbytes = getattr(memory.peak, role)
        if nbytes:
            roles.add_row(role.replace("_", " "), size(round(nbytes)))
    console.print("", seconds, "", roles, sep="\n")
