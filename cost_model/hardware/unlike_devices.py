"""Nodes with unlike devices in one cluster: the device that stands for all of them, and what the better ones waste.

All ranks of a plan do equal work, so every device waits for the slowest, and holds no more than the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_model.hardware.devices import DeviceSpec, LinkSpec, read_device
from cost_model.hardware.reading import ClusterError, as_integer, as_mapping, check_keys, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a cluster that have equal devices."""

    nodes: int
    device: DeviceSpec

    def __post_init__(self) -> None:
        require_positive(self, ("nodes",), "cluster.groups: an item")

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, which `read_groups` reads back."""
        return {"nodes": self.nodes, "device": self.device.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What a plan for the least of unlike devices does not use of one kind of them.

    Attributes:
        devices: number of devices of this kind.
        flops: fraction of their FLOP/s in bf16 (fp32 where a device has no bf16) that is never used.
        memory_bytes: bytes of each one's memory that are never used.
    """

    name: str
    devices: int
    flops: float
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.devices:,} {self.name}: {self.flops:.0%} of the FLOP/s, {self.memory_bytes / 1e9:.1f} GB each"


def read_groups(value: object) -> tuple[NodeGroup, ...]:
    """Return the node groups of a cluster's ``groups``: a list of ``{"nodes": 2, "device": "h100-sxm-80gb"}``.

    Items with equal devices become one.

    Raises:
        ClusterError: an item lacks a key, has an unknown one, or a wrong value.
    """
    where = "cluster.groups: an item"
    if not isinstance(value, (list, tuple)):
        raise ClusterError(f"cluster.groups must be a list of nodes and device, not {value!r}")
    nodes: dict[DeviceSpec, int] = {}
    for item in value:
        data = as_mapping(item, where)
        check_keys(data, ("nodes", "device"), where)
        if "device" not in data:
            raise ClusterError(f"{where} has no device; give nodes and device")
        device = read_device(data["device"], f"{where}: device")
        nodes[device] = nodes.get(device, 0) + as_integer(data.get("nodes", 1), f"{where}: nodes")
    return tuple(NodeGroup(nodes=count, device=device) for device, count in nodes.items())


def least_device(groups: Sequence[NodeGroup], devices_per_node: int) -> DeviceSpec:
    """Return the device that stands for all: the slowest one, with the least memory, rates and links of any.

    Args:
        devices_per_node: devices in each node, for the rate of links whose wires are split over peers.

    Raises:
        ClusterError: the devices cannot be in one communicator.
    """
    devices = [group.device for group in groups]
    if len(devices) == 1:
        return devices[0]
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise ClusterError(f"no communicator spans {' and '.join(kinds)} devices; plan for the devices of one kind")
    slowest = min(devices, key=_flops)
    rates = {
        dtype: min(device.peak_flops[dtype] for device in devices)
        for dtype in slowest.peak_flops
        if all(dtype in device.peak_flops for device in devices)
    }

    def slowest_link(links: Sequence[LinkSpec], ranks: int) -> LinkSpec:
        return min(links, key=lambda link: link.rate_bytes_per_s(ranks))

    return replace(
        slowest,
        name=f"least-of-{'-and-'.join(device.name for device in devices)}",
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth_bytes_per_s=min(device.memory_bandwidth_bytes_per_s for device in devices),
        flop_rates=tuple(sorted(rates.items())),
        kernel_launch_s=max(device.kernel_launch_s for device in devices),
        collective_launch_s=max(device.collective_launch_s for device in devices),
        flash_attention=all(device.flash_attention for device in devices),
        intra_node=slowest_link([device.intra_node for device in devices], devices_per_node),
        inter_node=slowest_link([device.inter_node for device in devices], 2),
        cards_per_device=min(device.cards_per_device for device in devices),
        nvls_min_ranks=slowest.nvls_min_ranks if all(device.nvls_min_ranks for device in devices) else 0,
        overlaps=all(device.overlaps for device in devices),
        source="the least of its devices' figures, each with a source of its own",
    )


def wasted(groups: Sequence[NodeGroup], devices_per_node: int, least: DeviceSpec) -> tuple[Waste, ...]:
    """Return what is wasted of each kind of device that is better than ``least``."""
    rows = [
        Waste(
            name=group.device.name,
            devices=group.nodes * devices_per_node,
            flops=1 - _flops(least) / _flops(group.device),
            memory_bytes=group.device.memory_bytes - least.memory_bytes,
        )
        for group in groups
    ]
    return tuple(row for row in rows if row.flops > 0 or row.memory_bytes > 0)


def _flops(device: DeviceSpec) -> float:
    rates = device.peak_flops
    return rates.get("bf16", rates["fp32"]) * device.gemm_efficiency
