"""A cluster: nodes times devices per node, and the links between them.

The figures are those of ``devices.toml``, which names a source for each, unless the user gives others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import yaml

from cost_model.hardware.devices import DeviceSpec, LinkSpec, device_names, find_device, read_device, read_link
from cost_model.hardware.reading import (
    ClusterError,
    as_integer,
    as_mapping,
    as_number,
    check_keys,
    close_matches,
    require_positive,
)
from cost_model.hardware.sweep import Sweep, read_sweep, read_sweep_file
from cost_model.hardware.unlike_devices import NodeGroup, Waste, least_device, read_groups, wasted

__all__ = ["ClusterError", "ClusterSpec", "DeviceSpec", "LinkSpec", "device_names", "find_device"]

_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9.\-]*)", re.IGNORECASE)
_BETWEEN = r"\s*(?:[x*,:/-]|\s)\s*"
_LOOSE = re.compile(rf"(\d+)(?:{_BETWEEN}(\d+))?(?:{_BETWEEN})?([a-z].*)", re.IGNORECASE)
_DEVICE_FIRST = re.compile(r"([a-z].*?)\s*[x*:]\s*(\d+)", re.IGNORECASE)
"""Counts and a device in any order and with any sign between them, for a hint."""
CLUSTER_KEYS = (
    "nodes",
    "devices_per_node",
    "device",
    "groups",
    "intra_node",
    "inter_node",
    "cards_per_node",
    "oversubscription",
    "rail_optimized",
    "reserved_gb",
    "sweeps",
)
_FILE_KEYS = ("file", "kind", "nodes", "ranks_per_node")
FILE_SUFFIXES = (".yaml", ".yml", ".json")
"""Ends of a text that names a cluster's file, in lower case."""

_FORMS = (
    "write NODESxDEVICESxDEVICE_TYPE (4x8xh100-sxm-80gb), DEVICESxDEVICE_TYPE for one node, several of these joined by "
    "+, or the path of a .yaml or .json file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """``nodes`` x ``devices_per_node`` devices, and the links between them.

    Attributes:
        nodes, devices_per_node, device: number of nodes, number of devices in each node, and type of all devices. Where
            types differ, ``device`` is the least of them (`cost_model.hardware.unlike_devices`).
        groups: the nodes of each type, where types differ; empty in a part of such a cluster.
        intra_node, inter_node: the link of a device inside a node, and the link of each network card. The rate that a
            card delivers (``ib_write_bw``) is ``inter_node.efficiency`` times its nominal bandwidth.
        cards_per_node: network cards in each node.
        oversubscription: bandwidth of the cards over that of the upper switches; 1 where all cards reach their full
            rate at the same time.
        rail_optimized: whether card i of every node is on one switch, so that rings and trees stay below the
            over-subscribed switches. Messages between pairs cross the over-subscribed switches in any case.
        reserved_gb: GB (1e9 bytes) of a device's memory that other processes hold: one figure for all nodes, or one
            figure for each node; empty: 0.
        sweeps: measured collectives, which replace the model.
    """

    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    cards_per_node: int
    oversubscription: float = 1.0
    rail_optimized: bool = True
    reserved_gb: tuple[float, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    groups: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        if sum(group.nodes for group in self.groups) != self.nodes:
            object.__setattr__(self, "groups", ())
        require_positive(self, ("nodes", "devices_per_node", "cards_per_node"), "cluster")
        if self.oversubscription < 1:
            raise ClusterError(f"cluster.oversubscription is {self.oversubscription}; 1 is none, 2 is two to one")

    def __hash__(self) -> int:
        """Return a hash of a few figures only, because caches of prices hash clusters often."""
        links = (self.intra_node.bandwidth_bytes_per_s, self.inter_node.bandwidth_bytes_per_s)
        return hash((self.nodes, self.devices_per_node, self.cards_per_node, *links, len(self.sweeps)))

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def memory_bytes(self) -> int:
        """Bytes that a job may hold on each device; the largest ``reserved_gb`` counts, as all ranks hold the same."""
        return self.device.memory_bytes - round(max(self.reserved_gb, default=0.0) * 1e9)

    @property
    def name(self) -> str:
        """The short form, ``4x8xh100-sxm-80gb``, which does not show figures that differ from the catalogue's."""
        groups = self.groups or (NodeGroup(nodes=self.nodes, device=self.device),)
        return " + ".join(f"{group.nodes}x{self.devices_per_node}x{group.device.name}" for group in groups)

    @property
    def waste(self) -> tuple[Waste, ...]:
        """What is not used of devices that are better than the least of the cluster; empty where all are alike."""
        return wasted(self.groups, self.devices_per_node, self.device)

    @classmethod
    def parse(cls, spec: str | Path | Mapping[str, object]) -> Self:
        """Return the cluster of ``spec``: ``4x8xh100-sxm-80gb``, ``8xh100-sxm-80gb``, or the path of a YAML file.

        ``2x8xh100-sxm-80gb + 4x8xa100-sxm-80gb`` is a cluster of unlike nodes. A mapping is read as by ``from_dict``.

        Raises:
            ClusterError: the text has none of these forms, the device is unknown, or the file cannot be read.
        """
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        if not isinstance(spec, (str, Path)):
            raise ClusterError(f"a cluster is text or a mapping, not {spec!r}; {_FORMS}")
        text = str(spec).strip()
        if text.lower().endswith(FILE_SUFFIXES):
            return cls._from_file(Path(text))
        if "+" in text:
            return cls._of_parts([cls._of_text(part.strip()) for part in text.split("+")])
        return cls._of_text(text)

    @classmethod
    def _of_text(cls, text: str) -> Self:
        """Return the cluster of equal devices that the short form ``text`` names."""
        match = _SHORT.fullmatch(text)
        if match is None:
            meant = _meant(text)
            hint = f" (did you mean {meant}?)" if meant else ""
            if text.lower() in device_names():
                hint = f"; {text} is a device: write how many, as in 8x{text}"
            raise ClusterError(
                f"cannot read cluster {text!r}{hint}; {_FORMS}. Known devices: {', '.join(device_names())}"
            )
        return cls.from_dict({"nodes": int(match[1] or 1), "devices_per_node": int(match[2]), "device": match[3]})

    @classmethod
    def _of_parts(cls, parts: Sequence[ClusterSpec]) -> Self:
        counts = sorted({part.devices_per_node for part in parts})
        if len(counts) > 1:
            raise ClusterError(
                f"the nodes have {' and '.join(map(str, counts))} devices; ranks are laid out evenly over nodes, so "
                f"give {counts[0]} devices of each node"
            )
        groups = [{"nodes": part.nodes, "device": part.device.to_dict()} for part in parts]
        return cls.from_dict({"devices_per_node": counts[0], "groups": groups})

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(
                f"cannot read cluster file {path}: {error.strerror}; give the path of a file that exists"
            ) from error
        except (yaml.YAMLError, ValueError) as error:  # not UTF-8, or no path at all
            raise ClusterError(f"cluster file {path} is not YAML: {error}; correct the file") from error
        try:
            return cls.from_dict(as_mapping(data, "the file"), folder=path.parent)
        except ClusterError as error:
            raise ClusterError(f"cluster file {path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object], folder: Path = Path()) -> Self:
        """Return the cluster that ``data`` describes.

        For example ``{"nodes": 2, "devices_per_node": 8, "device": "h100-sxm-80gb", "cards_per_node": 4}``. ``device``
        (a name, or figures) and ``devices_per_node`` are required. ``nodes`` defaults to 1. Unlike nodes have
        ``groups``, a list of ``nodes`` and ``device``, in place of these two. ``intra_node``,
        ``inter_node`` (a link's name, or some of its fields) and ``cards_per_node`` default to the usual ones of the
        device. ``reserved_gb`` is one number, or one number for each node. ``sweeps`` is a list of files and of sweeps
        as ``to_dict`` writes them. A file is a path relative to ``folder``, or a mapping with ``file`` and the fields
        that the file lacks (``kind``, ``nodes``, ``ranks_per_node``).

        Raises:
            ClusterError: a key is unknown or missing, or its value is wrong.
        """
        data = as_mapping(data, "cluster")
        check_keys(data, CLUSTER_KEYS, "cluster")
        groups = read_groups(data.get("groups", []))
        required = ("devices_per_node",) if groups else ("devices_per_node", "device")
        missing = [key for key in required if key not in data]
        if missing:
            raise ClusterError(f"cluster: missing {', '.join(missing)}; a cluster needs devices_per_node and device")
        devices_per_node = as_integer(data["devices_per_node"], "cluster.devices_per_node")
        nodes = as_integer(data.get("nodes", sum(group.nodes for group in groups) or 1), "cluster.nodes")
        if groups and nodes != sum(group.nodes for group in groups):
            raise ClusterError(f"cluster.nodes is {nodes}, which is not the sum of its groups; leave nodes out")
        if "device" in data:
            device = read_device(data["device"], "cluster.device")
        else:
            device = least_device(groups, devices_per_node)
        links = {
            key: read_link(data[key], f"cluster.{key}", usual) if key in data else usual
            for key, usual in (("intra_node", device.intra_node), ("inter_node", device.inter_node))
        }
        usual_cards = max(1, round(devices_per_node * device.cards_per_device))
        rails = data.get("rail_optimized", True)
        if not isinstance(rails, bool):
            raise ClusterError(f"cluster.rail_optimized must be true or false, not {rails!r}")
        cluster = cls(
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=device,
            intra_node=links["intra_node"],
            inter_node=links["inter_node"],
            cards_per_node=as_integer(data.get("cards_per_node", usual_cards), "cluster.cards_per_node"),
            oversubscription=as_number(data.get("oversubscription", 1.0), "cluster.oversubscription"),
            rail_optimized=rails,
            reserved_gb=_read_reserved(data.get("reserved_gb", []), nodes, device.memory_bytes),
            groups=groups if len(groups) > 1 else (),
        )
        return cluster.with_sweep(*_read_sweeps(data.get("sweeps", []), folder))

    def with_sweep(self, *sweeps: Sweep | str | Path) -> Self:
        """Return this cluster with measured sweeps, or files of sweeps, added.

        A later sweep of the same collective and shape replaces an earlier one. See ``cost_model.hardware.sweep``.

        Raises:
            ClusterError: a file cannot be read, or a sweep's group does not fit on the cluster's nodes.
        """
        by_shape = {(sweep.kind, sweep.nodes, sweep.ranks_per_node): sweep for sweep in self.sweeps}
        for item in sweeps:
            for sweep in (item,) if isinstance(item, Sweep) else read_sweep_file(Path(item)):
                if sweep.ranks_per_node > self.devices_per_node:
                    raise ClusterError(
                        f"sweep of {sweep.kind} has {sweep.ranks_per_node} ranks per node, the cluster {self.name} has "
                        f"{self.devices_per_node} devices per node; give sweeps of this cluster"
                    )
                if sweep.intra_node is None or sweep.inter_node is None:
                    sweep = sweep.measured_on(self.intra_node, self.inter_node, self.cards_per_node)
                by_shape[sweep.kind, sweep.nodes, sweep.ranks_per_node] = sweep
        return replace(self, sweeps=tuple(by_shape.values()))

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data with every figure, so that prices do not change with a later catalogue."""
        data: dict[str, object] = {
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "device": self.device.to_dict(),
            "intra_node": self.intra_node.to_dict(),
            "inter_node": self.inter_node.to_dict(),
            "cards_per_node": self.cards_per_node,
        }
        if (self.oversubscription, self.rail_optimized) != (1.0, True):
            data |= {"oversubscription": self.oversubscription, "rail_optimized": self.rail_optimized}
        if self.groups:
            data["groups"] = [group.to_dict() for group in self.groups]
        if self.reserved_gb:
            data["reserved_gb"] = list(self.reserved_gb)
        if self.sweeps:
            data["sweeps"] = [sweep.to_dict() for sweep in self.sweeps]
        return data


def _meant(text: str) -> str | None:
    """Return the cluster that a misspelt ``text`` may mean, such as 4x8xh100-sxm-80gb for "4*8 H100"; None: no idea."""
    counts_first, device_first = _LOOSE.fullmatch(text), _DEVICE_FIRST.fullmatch(text)
    if counts_first is not None:
        counts, name = [count for count in counts_first.groups()[:2] if count], counts_first[3]
    elif device_first is not None:
        counts, name = [device_first[2]], device_first[1]
    else:
        return None
    near = close_matches(name.lower().replace("_", "-").replace(" ", "-"), device_names())
    return "x".join([*counts, near[0]]) if near else None


def _read_reserved(value: object, nodes: object, memory_bytes: int) -> tuple[float, ...]:
    is_list = isinstance(value, (list, tuple))
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if is_list and len(values) not in (0, nodes):
        raise ClusterError(
            f"cluster.reserved_gb has {len(values)} entries for {nodes} nodes; give one number, or one for each node"
        )
    reserved = tuple(as_number(item, "cluster.reserved_gb") for item in values)
    for item in reserved:
        if not 0 <= item * 1e9 < memory_bytes:
            raise ClusterError(
                f"cluster.reserved_gb is {item:g}; give GB from 0 up to a device's memory, {memory_bytes / 1e9:g}"
            )
    return reserved


def _read_sweeps(value: object, folder: Path) -> list[Sweep]:
    if not isinstance(value, (list, tuple)):
        raise ClusterError(f"cluster.sweeps must be a list of files or sweeps, not {value!r}")
    sweeps: list[Sweep] = []
    for item in value:
        if isinstance(item, str):
            sweeps += read_sweep_file(folder / item)
            continue
        data = as_mapping(item, "cluster.sweeps: an item")
        if "file" not in data:
            sweeps.append(read_sweep(data, "cluster.sweeps: an item"))
            continue
        check_keys(data, _FILE_KEYS, "cluster.sweeps: an item")
        counts = {key: as_integer(data[key], f"cluster.sweeps: {key}") for key in _FILE_KEYS[2:] if key in data}
        kind = str(data["kind"]) if "kind" in data else None
        sweeps += read_sweep_file(folder / str(data["file"]), kind=kind, **counts)
    return sweeps
