"""The cluster that a row ran on: device, devices per node, network, and power caps of the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.devices import device_names, find_device
from cost_model.kernels.step_constants import StepConstants, shipped_constants
from published.rows.priced_row import number

META_H100_WATTS = 500.0
"""Watts of Meta's Grand Teton H100, which their developers' servers have too: 96 GB of HBM2e at 2.4 TB/s (README of the
data; 94.99 GiB visible). The catalogue's SXM device has 700 W."""

META_H100_BYTES = round(94.99 * 2**30)
"""Bytes of such a device that torch shows (README of the data)."""

GB300_WATTS, GB200_WATTS = 1400.0, 1200.0
"""Watts of a Blackwell Ultra of a superchip, and of a Blackwell with the same GEMM rates. Source:
glennklockwood.com/garden/processors/B300 (\"Upgrade to 1400 W (from 1200W)\"), read 2026-11-21."""


class UnknownMachineError(ValueError):
    """A row whose device is unknown; the message is the reason that tables print."""


@functools.cache
def _cluster(device: str, capped_share: float, exponent: float, nodes: int, per_node: int, nic: float) -> ClusterSpec:
    base = find_device(device)
    description: dict[str, object] = {"name": device}
    if capped_share != 1.0:
        factor = capped_share**exponent
        description["peak_flops"] = {name: rate * factor for name, rate in base.flop_rates}
    if device.startswith("h100") and capped_share < 1.0:
        description["memory_bandwidth_bytes_per_s"] = 2400e9
        description["memory_bytes"] = META_H100_BYTES
    data: dict[str, object] = {"nodes": nodes, "devices_per_node": per_node, "device": description}
    if nic:
        data["inter_node"] = {"bandwidth_bytes_per_s": nic}
        data["cards_per_node"] = per_node
    return ClusterSpec.from_dict(data)


def cluster_of(row: Mapping[str, str], constants: StepConstants | None = None) -> ClusterSpec:
    """Return the cluster of a row.

    Raises:
        UnknownMachineError: the device or the number of devices is not known.
    """
    gpu = row["gpu"]
    ranks = number(row, "n_gpus")
    if ranks is None:
        raise UnknownMachineError("number of devices not stated")
    device, capped = _device(gpu, number(row, "gpu_mem_gb"))
    count = int(ranks)
    rack = device.startswith(("gb200", "gb300")) and count > 4
    per_node = min(count, 72 if rack else 8 if not device.startswith("gb") else 4)
    if rack and count > 72:
        per_node = 64  # jobs use 64 devices of a rack of 72
    nodes = -(-count // per_node)
    return _cluster(
        device,
        capped,
        (constants or shipped_constants()).power_exponent,
        nodes,
        per_node,
        _card_bytes_per_s(row.get("interconnect", "")),
    )


def _device(gpu: str, memory_gb: float | None) -> tuple[str, float]:
    """Return the catalogue's name of the device, and the power limit as a share of the catalogue device's."""
    names = device_names()
    if gpu.startswith("A100"):
        return ("a100-sxm-40gb" if memory_gb == 40 else "a100-sxm-80gb"), 1.0
    if gpu.startswith("H100"):
        return "h100-sxm-80gb", META_H100_WATTS / 700 if "Meta" in gpu else 1.0
    if gpu.startswith("H200"):
        return "h200-sxm-141gb", 1.0
    if gpu.startswith("B200 (power limited)"):
        return "b200-sxm-180gb", 0.75  # "power limited", the share is assumed
    for start, prefix in (("B200", "b200"), ("B300", "b300"), ("GB200", "gb200"), ("GB300", "gb300")):
        if gpu.startswith(start):
            matches = [name for name in names if name.startswith(prefix)]
            if not matches:  # same GEMM rates in 16 and 8 bits and same links, more memory
                matches = [name for name in names if name.startswith(prefix.replace("300", "200"))]
                return matches[0], GB300_WATTS / GB200_WATTS if prefix == "gb300" else 1.0
            return matches[0], 1.0
    for start in ("MI300X", "MI325X", "MI355X", "MI250X"):
        if gpu == start:
            matches = [name for name in names if name.startswith(start.lower())]
            if matches:
                return matches[0], 1.0
    raise UnknownMachineError(f"device {gpu or 'not stated'} is not in the catalogue")


def _card_bytes_per_s(interconnect: str) -> float:
    """Return the nominal bytes per second of one device's network card; 0.0 where the row does not state it."""
    for text, gbit in (
        ("1600 Gb/s RoCE per node", 200),
        ("8x HDR 200", 200),
        ("8x200 Gb/s", 200),
        ("; 400 Gb/s per node", 50),
        ("800 Gb/s per node", 100),
        ("3200 Gb/s per node", 400),
    ):
        if text in interconnect:
            return gbit / 8 * 1e9
    return 0.0
