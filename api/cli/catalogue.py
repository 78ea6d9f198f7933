"""Commands that list what can be named, ``models`` and ``devices``, and ``--version``. None of them imports torch."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import typer

from api.cli.options import Json


def add_catalogue_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("models")(models_command)
    app.command("devices")(devices_command)


def print_versions(asked: bool) -> None:
    """Print the versions of shardplan and torch, and exit; do nothing where they are not asked for."""
    if asked:
        typer.echo(f"shardplan {_version('shardplan')}, torch {_version('torch')}")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def models_command(as_json: Json = False) -> None:
    """List the presets that MODEL can name: parameters, layers, hidden size, context."""
    from api.requests.model_configs import preset_names, preset_summary

    rows = [preset_summary(name) for name in preset_names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from api.render.text import significant, table

    cells = [("Model", "parameters", "layers", "hidden", "context")]
    for row in rows:
        parameters = f"{significant(row['parameters'] / 1e9)} B"
        context = "-" if row["context"] is None else f"{row['context']:,}"
        cells.append((row["name"], parameters, f"{row['layers']}", f"{row['hidden']:,}", context))
    _print(table(cells, "<>>>>", indent=""))


def devices_command(as_json: Json = False) -> None:
    """List the devices that a cluster can be made of: memory, FLOP/s, bandwidth, links."""
    from cost_model.hardware.devices import device_names, find_device

    devices = [find_device(name) for name in device_names()]
    if as_json:
        typer.echo(json.dumps([device.to_dict() for device in devices], indent=2))
        return
    from api.render.text import significant, table

    def giga(value: float) -> str:
        return significant(value / 1e9)

    cells: list[tuple[Any, ...]] = [("Device", "memory", "16 bit", "bandwidth", "in a node", "between nodes")]
    cells.append(("", "GB", "TFLOP/s", "GB/s", "GB/s", "GB/s"))
    for device in devices:
        rates = device.peak_flops
        rate = max(rates.get("bf16", 0.0), rates.get("fp16", 0.0)) or rates["fp32"]
        inner, outer = device.intra_node, device.inter_node
        inside = f"{inner.name} {giga(inner.bandwidth_bytes_per_s)}"
        between = f"{outer.name} {giga(outer.bandwidth_bytes_per_s)}"
        numbers = (giga(device.memory_bytes), significant(rate / 1e12), giga(device.memory_bandwidth_bytes_per_s))
        cells.append((device.name, *numbers, inside, between))
    _print(table(cells, "<>>>>>", indent=""))


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
