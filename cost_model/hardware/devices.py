"""Devices and links, and the catalogue ``devices.toml`` of known devices and links, with a source for each figure."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources

import numpy as np

from cost_model.hardware.reading import (
    ClusterError,
    as_mapping,
    as_number,
    check_keys,
    close_matches,
    read_fields,
    require_positive,
)

KINDS = ("cuda", "rocm", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link: its nominal bandwidth per direction, the fraction that collectives reach, and the latency of one hop.

    Attributes:
        bandwidth_bytes_per_s: nominal bandwidth per direction, of a device for a link inside a node, of a network card
            for a link between nodes.
        latency_s: seconds of one hop of a ring with the lowest-latency protocol.
        efficiency: largest fraction of ``bandwidth_bytes_per_s`` that a collective reaches, in (0, 1].
        mesh_peers: number of peers over which a device's bandwidth is split, each with its own wires; 0 if a device can
            give its whole bandwidth to any peer (a switch, a bus).
        rank_shares: (ranks, fraction) pairs, for uneven wiring: the fraction of the rate that a group of so many ranks
            reaches, linear between two pairs and constant outside of them. It replaces ``mesh_peers``.
        source: source of the figures.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    mesh_peers: int = 0
    rank_shares: tuple[tuple[int, float], ...] = ()
    source: str = field(default="given by the user", hash=False)

    def __post_init__(self) -> None:
        require_positive(self, ("bandwidth_bytes_per_s", "efficiency"), self.name)
        if self.efficiency > 1:
            raise ClusterError(
                f"{self.name}.efficiency is {self.efficiency}; it is a share of the bandwidth, at most 1"
            )
        if self.latency_s < 0 or self.mesh_peers < 0:
            raise ClusterError(
                f"{self.name}: latency_s ({self.latency_s}) and mesh_peers ({self.mesh_peers}) cannot be negative"
            )
        ranks = [count for count, _ in self.rank_shares]
        if ranks != sorted(set(ranks)) or not all(0 < share <= 1 for _, share in self.rank_shares):
            raise ClusterError(
                f"{self.name}.rank_shares is {self.rank_shares}; it holds (ranks, share) with rising ranks and shares "
                "above 0 and at most 1"
            )

    def rate_bytes_per_s(self, ranks: int) -> float:
        """Return the bytes per second that one device can send to the other ``ranks - 1`` devices of its group."""
        reached = self.bandwidth_bytes_per_s * self.efficiency
        if self.rank_shares:
            counts, shares = zip(*self.rank_shares, strict=True)
            return reached * float(np.interp(ranks, counts, shares))
        if self.mesh_peers == 0:
            return reached
        return reached * min(1.0, max(ranks - 1, 1) / self.mesh_peers)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, which ``read_link`` reads back."""
        return {**asdict(self), "rank_shares": [list(pair) for pair in self.rank_shares]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one process of a CPU.

    Attributes:
        kind: ``cuda``, ``rocm`` or ``cpu``; a ``cpu`` has none of NCCL's protocols.
        memory_bytes: bytes of the device's memory, from which a plan reserves ``optimizer_memory.reserve_bytes``.
        memory_bandwidth_bytes_per_s: nominal memory bandwidth.
        flop_rates: (dtype name, dense FLOP/s) pairs in the order of the names; ``peak_flops`` is the same as a dict.
        gemm_efficiency: fraction of the peak that the best large GEMM reaches.
        memory_efficiency: fraction of ``memory_bandwidth_bytes_per_s`` that a streaming kernel reaches.
        kernel_launch_s: seconds lost between two kernels of a full queue.
        host_op_s: host seconds per op dispatched on DTensors, including views and ops of the backward, if the device
            waits for the host: a CPU, measured by ``shardplan calibrate``. 0 if the host runs ahead of the device. A
            value above 0 replaces ``kernel_launch_s`` in plans.
        first_touch_s_per_byte: seconds to get a byte of new memory from the system, in addition to writing it. Used if
            ``host_op_s`` is above 0, for buffers that are freed after each use. 0 if an allocator caches memory.
        collective_launch_s: fixed seconds of the cheapest collective.
        flash_attention: whether a fused attention kernel exists.
        overlaps: whether communication overlaps with compute; on a CPU both use the same cores.
        nvls_min_ranks: smallest number of ranks per node for which NCCL chooses reduction in the switch (NVLS); 0: the
            device has no NVLS.
        nvls_efficiency: fraction of ``intra_node``'s rate that NVLS reaches.
        architecture: ``sm80``, ``sm90``, ``gfx942``, ...; selects the constants of ``efficiency.toml``.
        processors: number of streaming multiprocessors or compute units; 0: unknown, waves of tiles are not rounded up.
        intra_node, inter_node: the device's usual links.
        cards_per_device: network cards per device in the usual node; below 1 if devices share a card.
        source: source of the figures.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    flop_rates: tuple[tuple[str, float], ...]
    gemm_efficiency: float
    memory_efficiency: float
    kernel_launch_s: float
    collective_launch_s: float
    flash_attention: bool
    intra_node: LinkSpec
    inter_node: LinkSpec
    cards_per_device: float
    nvls_min_ranks: int = 0
    nvls_efficiency: float = 1.0
    architecture: str = ""
    processors: int = 0
    overlaps: bool = True
    host_op_s: float = 0.0
    first_touch_s_per_byte: float = 0.0
    source: str = field(default="given by the user", hash=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ClusterError(f"{self.name}.kind is {self.kind!r}; it is one of {', '.join(KINDS)}")
        positive = (
            "memory_bytes",
            "memory_bandwidth_bytes_per_s",
            "gemm_efficiency",
            "memory_efficiency",
            "cards_per_device",
        )
        require_positive(self, (*positive, "nvls_efficiency"), self.name)
        for name in ("gemm_efficiency", "memory_efficiency", "nvls_efficiency"):
            if getattr(self, name) > 1:
                raise ClusterError(f"{self.name}.{name} is {getattr(self, name)}; it is a share, at most 1")
        if "fp32" not in self.peak_flops or not all(rate > 0 for _, rate in self.flop_rates):
            raise ClusterError(f"{self.name}.peak_flops needs fp32 and only rates above 0, not {self.peak_flops}")
        times = (self.kernel_launch_s, self.collective_launch_s, self.host_op_s, self.first_touch_s_per_byte)
        if min(*times, self.nvls_min_ranks, self.processors) < 0:
            raise ClusterError(f"{self.name}: launch and host times, nvls_min_ranks and processors cannot be negative")

    @property
    def compiles(self) -> bool:
        """Whether fused ops are compiled here: each chain of element-wise ops is one kernel."""
        return self.kind != "cpu"

    @property
    def peak_flops(self) -> dict[str, float]:
        """Dense FLOP/s by dtype name (``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp8``)."""
        return dict(self.flop_rates)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, which ``read_device`` reads back."""
        data: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        del data["flop_rates"]
        data["peak_flops"] = self.peak_flops
        data["intra_node"] = self.intra_node.to_dict()
        data["inter_node"] = self.inter_node.to_dict()
        return data


def read_link(value: object, where: str, base: LinkSpec | None = None) -> LinkSpec:
    """Return the link that ``value`` describes: a catalogue name, or fields that replace those of ``base``.

    Args:
        value: the name, or a mapping of fields.
        where: place of ``value`` in the input, for messages.
        base: link with the default values of fields; None: ``value`` has all fields without a default.

    Raises:
        ClusterError: the name is unknown, a field is unknown or missing, or its value is wrong.
    """
    if isinstance(value, str):
        links = _catalogue()[1]
        if value.lower() not in links:
            raise ClusterError(f"{where}: unknown link {value!r}{_hint(value, links)}")
        return links[value.lower()]
    data = as_mapping(value, where)
    merged: dict[str, object] = {"name": where}
    if base is not None:
        merged = {**base.to_dict(), "source": f"{base.name} with figures given by the user"}
    return _make_link({**merged, **data}, where)


def _make_link(data: Mapping[str, object], where: str) -> LinkSpec:
    values = read_fields(LinkSpec, data, where)
    try:
        shares = tuple((int(ranks), float(share)) for ranks, share in values.pop("rank_shares", ()))
    except (TypeError, ValueError) as error:
        raise ClusterError(f"{where}.rank_shares must be pairs of ranks and share, [[2, 0.5], [4, 1.0]]") from error
    return LinkSpec(rank_shares=shares, **values)


def read_device(value: object, where: str = "device") -> DeviceSpec:
    """Return the device that ``value`` describes: a catalogue name, or a mapping of figures.

    The figures that the mapping lacks are those of the catalogue's device that ``like`` names, or without ``like`` the
    one that ``name`` names. ``name`` is the name of a new device, or may be left out where ``like`` is given.

    Raises:
        ClusterError: ``like`` is unknown; ``name`` is unknown and the figures are not complete; a field is unknown or
            its value wrong.
    """
    if isinstance(value, str):
        return find_device(value)
    data = dict(as_mapping(value, where))
    check_keys(data, device_keys(), where)
    name, base = _name_and_base(data, where)
    merged: dict[str, object] = (
        {} if base is None else {**base.to_dict(), "source": f"{base.name} with figures given by the user"}
    )
    merged.update(data)
    merged["name"] = name
    if "peak_flops" in merged:
        merged["flop_rates"] = _read_rates(merged.pop("peak_flops"), where)
    for key in ("intra_node", "inter_node"):
        if key in merged:
            merged[key] = read_link(merged[key], f"{where}.{key}", getattr(base, key) if base else None)
    return DeviceSpec(**read_fields(DeviceSpec, merged, where))


def device_keys() -> tuple[str, ...]:
    """Return the keys that a mapping of a device may have."""
    return ("like", *("peak_flops" if item.name == "flop_rates" else item.name for item in fields(DeviceSpec)))


def _name_and_base(data: dict[str, object], where: str) -> tuple[str, DeviceSpec | None]:
    """Return the name of the device of ``data``, and the catalogue's device that it starts from; ``like`` is removed.

    Raises:
        ClusterError: there is neither name nor ``like``, or they contradict each other.
    """
    like, name = data.pop("like", None), data.get("name")
    if like is None:
        if not isinstance(name, str):
            names = ", ".join(device_names())
            raise ClusterError(f"{where}: a device needs a name, or `like` with the name of a known one: {names}")
        return name.lower(), _catalogue()[0].get(name.lower())
    if not isinstance(like, str):
        raise ClusterError(
            f"{where}.like must be the name of a device, not {like!r}; known: {', '.join(device_names())}"
        )
    try:
        base = find_device(like)
    except ClusterError as error:
        raise ClusterError(f"{where}.like: {error}") from None
    if name is None:
        return base.name, base
    if not isinstance(name, str):
        raise ClusterError(f"{where}.name must be text, not {name!r}")
    if name.lower() in device_names() and name.lower() != base.name:
        raise ClusterError(f"{where}: the catalogue has another device called {name!r}; give a name of your own")
    return name.lower(), base


def device_names() -> tuple[str, ...]:
    """Return the names of the catalogue's devices, in the catalogue's order."""
    return tuple(_catalogue()[0])


def find_device(name: str) -> DeviceSpec:
    """Return the catalogue's device called ``name``, whose case does not matter.

    Raises:
        ClusterError: no device has this name; the message lists close matches and every known device.
    """
    devices = _catalogue()[0]
    if name.lower() not in devices:
        raise ClusterError(f"unknown device {name!r}{_hint(name, devices)}")
    return devices[name.lower()]


def _read_rates(value: object, where: str) -> tuple[tuple[str, float], ...]:
    rates = as_mapping(value, f"{where}.peak_flops")
    return tuple(sorted((dtype, as_number(rate, f"{where}.peak_flops.{dtype}")) for dtype, rate in rates.items()))


def _hint(name: str, catalogue: Mapping[str, object]) -> str:
    near = close_matches(name.lower(), catalogue)
    question = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"{question} known: {', '.join(catalogue)}"


@functools.cache
def _catalogue() -> tuple[dict[str, DeviceSpec], dict[str, LinkSpec]]:
    """Return (devices, links) of ``devices.toml`` by name; cached, since the file is part of the program."""
    tables = tomllib.loads(resources.files("cost_model.hardware").joinpath("devices.toml").read_text(encoding="utf-8"))
    links = {
        name: _make_link({"name": name, **table}, f"devices.toml: links.{name}")
        for name, table in tables["links"].items()
    }
    devices = {}
    for name, table in tables["devices"].items():
        merged = {"name": name, **tables["kinds"].get(table["kind"], {}), **table}
        merged["flop_rates"] = _read_rates(merged.pop("peak_flops"), f"devices.toml: devices.{name}")
        merged.update(intra_node=links[merged["intra_node"]], inter_node=links[merged["inter_node"]])
        devices[name] = DeviceSpec(**read_fields(DeviceSpec, merged, f"devices.toml: devices.{name}"))
    return devices, links
