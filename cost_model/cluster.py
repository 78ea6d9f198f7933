"""A cluster: nodes times devices per node of one device type, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml

from cost_model.devices import DeviceSpec, LinkSpec, device_names, find_device, read_device, read_link
from cost_model.records import ClusterError, as_integer, as_mapping, check_keys, require_positive

__all__ = ["ClusterError", "ClusterSpec", "DeviceSpec", "LinkSpec", "device_names", "find_device"]

_SHORT = re.compile(r"(?:(\d+)x)?(\d+)x([a-z][a-z0-9.\-]*)", re.IGNORECASE)
_KEYS = ("nodes", "devices_per_node", "device", "intra_node", "inter_node", "cards_per_node")
_FORMS = "write NODESxDEVICESxDEVICE (4x8xh100-sxm-80gb), DEVICESxDEVICE for one node, or the path of a .yaml file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """``nodes`` x ``devices_per_node`` devices; ``cards_per_node`` network cards of ``inter_node``'s bandwidth in
    each node."""

    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node: LinkSpec
    inter_node: LinkSpec
    cards_per_node: int

    def __post_init__(self) -> None:
        require_positive(self, ("nodes", "devices_per_node", "cards_per_node"), "cluster")

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def name(self) -> str:
        """The short form, ``4x8xh100-sxm-80gb``; figures that differ from the catalogue's do not show in it."""
        return f"{self.nodes}x{self.devices_per_node}x{self.device.name}"

    @classmethod
    def parse(cls, spec: str | Path | Mapping[str, object]) -> Self:
        """Return the cluster written as ``4x8xh100-sxm-80gb``, ``8xh100-sxm-80gb``, a YAML file's path, or a mapping.

        Raises:
            ClusterError: the text has none of these forms, the device is unknown, or the file cannot be read.
        """
        if isinstance(spec, Mapping):
            return cls.from_dict(spec)
        if not isinstance(spec, (str, Path)):
            raise ClusterError(f"a cluster is text or a mapping, not {spec!r}; {_FORMS}")
        text = str(spec).strip()
        if text.lower().endswith((".yaml", ".yml")):
            return cls._from_file(Path(text))
        match = _SHORT.fullmatch(text)
        if match is None:
            known = (
                ""
                if text.lower() not in device_names()
                else f"; {text} is a device: say how many, for example 8x{text}"
            )
            raise ClusterError(
                f"cannot read cluster {text!r}{known}; {_FORMS}. Known devices: {', '.join(device_names())}"
            )
        return cls.from_dict({"nodes": int(match[1] or 1), "devices_per_node": int(match[2]), "device": match[3]})

    @classmethod
    def _from_file(cls, path: Path) -> Self:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(
                f"cannot read cluster file {path}: {error.strerror}; give the path of a file that exists"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ClusterError(f"cluster file {path} is not YAML: {error}") from error
        try:
            return cls.from_dict(as_mapping(data, "the file"))
        except ClusterError as error:
            raise ClusterError(f"cluster file {path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Return the cluster of plain data: ``device`` (a name or figures), ``devices_per_node``, and what is unusual.

        ``nodes`` defaults to 1; ``intra_node``, ``inter_node`` (a link's name, or some of its fields) and
        ``cards_per_node`` to what is usual for the device. For example
        ``{"nodes": 2, "devices_per_node": 8, "device": "h100-sxm-80gb", "cards_per_node": 4}``.

        Raises:
            ClusterError: a key is unknown, missing or wrong.
        """
        data = as_mapping(data, "cluster")
        check_keys(data, _KEYS, "cluster")
        missing = [key for key in ("devices_per_node", "device") if key not in data]
        if missing:
            raise ClusterError(f"cluster: missing {', '.join(missing)}; a cluster needs devices_per_node and device")
        device = read_device(data["device"], "cluster.device")
        devices_per_node = as_integer(data["devices_per_node"], "cluster.devices_per_node")
        links = {
            key: read_link(data[key], f"cluster.{key}", usual) if key in data else usual
            for key, usual in (("intra_node", device.intra_node), ("inter_node", device.inter_node))
        }
        usual_cards = max(1, round(devices_per_node * device.cards_per_device))
        return cls(
            nodes=as_integer(data.get("nodes", 1), "cluster.nodes"),
            devices_per_node=devices_per_node,
            device=device,
            intra_node=links["intra_node"],
            inter_node=links["inter_node"],
            cards_per_node=as_integer(data.get("cards_per_node", usual_cards), "cluster.cards_per_node"),
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data with every figure, so that a price can be recomputed when the catalogue moves on."""
        return {
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "device": self.device.to_dict(),
            "intra_node": self.intra_node.to_dict(),
            "inter_node": self.inter_node.to_dict(),
            "cards_per_node": self.cards_per_node,
        }
