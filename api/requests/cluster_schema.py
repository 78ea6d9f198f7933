"""The JSON schema of a cluster that is given as an object, from the dataclasses that it is read into.

It describes; `ClusterSpec.from_dict` checks, with messages that say what to do.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, WithJsonSchema

from cost_model.hardware.cluster import CLUSTER_KEYS, ClusterSpec
from cost_model.hardware.devices import DeviceSpec, LinkSpec, device_keys, device_names
from cost_model.hardware.sweep import Sweep
from cost_model.hardware.unlike_devices import NodeGroup

_ATTRIBUTE = re.compile(r"^ {4}([a-z_]+(?:, [a-z_]+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)


def _texts(cls: type[Any]) -> dict[str, str]:
    """Return attribute -> its text in the docstring of ``cls``, as one line; attributes may share a text."""
    found: dict[str, str] = {}
    for names, text in _ATTRIBUTE.findall(inspect.getdoc(cls) or ""):
        line = " ".join(text.replace("``", "`").split())
        found |= dict.fromkeys(names.split(", "), f"{names}: {line}" if "," in names else line)
    return found


def _properties(cls: type[Any]) -> dict[str, Any]:
    """Return the schemas of the fields of a dataclass; links may be names, or have some of their fields."""
    texts, hints = _texts(cls), typing.get_type_hints(cls)
    found = {}
    for item in dataclasses.fields(cls):
        is_link = LinkSpec in (hints[item.name], *typing.get_args(hints[item.name]))
        schema = _or_name(_LINK, "a link of the catalogue") if is_link else TypeAdapter(hints[item.name]).json_schema()
        found[item.name] = {**schema, **({"description": texts[item.name]} if item.name in texts else {})}
    return found


def _object(properties: dict[str, Any], *, required: tuple[str, ...] = ()) -> dict[str, Any]:
    asked = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **asked}


def _or_name(schema: dict[str, Any], what: str) -> dict[str, Any]:
    return {"anyOf": [{"type": "string", "description": f"Name of {what}."}, schema]}


def _device() -> dict[str, Any]:
    """Return the schema of a device: a name, or figures that replace those of the catalogue's device ``like``."""
    properties = _properties(DeviceSpec)
    properties["peak_flops"] = {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "description": "Dense FLOP/s by dtype: bf16, fp16, fp8, tf32, fp32. It needs fp32.",
    }
    properties["like"] = {
        "type": "string",
        "enum": list(device_names()),
        "description": "The catalogue's device that gives the figures which are left out.",
    }
    return _or_name(_object({name: properties[name] for name in device_keys()}), "a device of the catalogue")


def cluster_schema() -> dict[str, Any]:
    """Return the schema of a cluster's object."""
    properties = _properties(ClusterSpec)
    described = {name: {"description": properties[name].get("description", "")} for name in ("device", "groups")}
    reserved = properties["reserved_gb"]
    number = {"type": "number"}
    properties |= {
        "device": {**_device(), **described["device"]},
        "groups": {
            "type": "array",
            "items": _object({**_properties(NodeGroup), "device": _device()}, required=("device",)),
            **described["groups"],
        },
        "reserved_gb": {**reserved, "type": ["number", "array"], "items": number},
        "sweeps": {
            "type": "array",
            "items": _object(_properties(Sweep), required=("kind", "nodes", "ranks_per_node", "nbytes", "times_s")),
            "description": "Measured collectives, which replace the model.",
        },
    }
    properties = {name: properties[name] for name in CLUSTER_KEYS}
    title = "A cluster given by its figures; those that are left out are the catalogue's."
    return {**_object(properties, required=("devices_per_node",)), "description": title}


_LINK = _object(_properties(LinkSpec))

ClusterObject = Annotated[dict[str, Any], WithJsonSchema(cluster_schema())]
"""A cluster as an object, described in schemas."""

ClusterText = Annotated[str, Field(min_length=1, max_length=1000)]
"""A cluster as text, such as ``4x8xh100-sxm-80gb``."""
