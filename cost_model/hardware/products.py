"""`device_of_product`, `named_device`: the catalogue's device for a GPU as its driver reports it."""

from __future__ import annotations

import dataclasses
import re

from cost_model.hardware.devices import DeviceSpec, device_names, find_device
from cost_model.hardware.reading import ClusterError

_PRODUCTS = (
    (r"gb200", "gb200-nvl72-186gb"),
    (r"b200", "b200-sxm-180gb"),
    (r"h200", "h200-sxm-141gb"),
    (r"h100 nvl", "h100-nvl-94gb"),
    (r"h100 pcie", "h100-pcie-80gb"),
    (r"h100", "h100-sxm-80gb"),
    (r"a100-pcie|a100 80gb pcie", "a100-pcie-80gb"),
    (r"a100-sxm4-40gb", "a100-sxm-40gb"),
    (r"a100", "a100-sxm-80gb"),
    (r"v100-sxm[23]", "v100-sxm-32gb"),
    (r"l40s", "l40s-48gb"),
    (r"l4", "l4-24gb"),
    (r"a10", "a10-24gb"),
    (r"rtx 4090", "rtx-4090-24gb"),
    (r"mi250x", "mi250x-64gb"),
    (r"mi300x", "mi300x-192gb"),
    (r"mi325x", "mi325x-256gb"),
    (r"mi355x", "mi355x-288gb"),
)
"""(pattern of whole words in the name that a driver reports, in lower case; name in the catalogue). The first match
counts. Names such as "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB" and "AMD Instinct MI300X" are torch's."""

_LESS_MEMORY = 0.99
"""A GPU with less than this fraction of the catalogue's memory is another variant, or a part of a GPU (MIG)."""


def named_device(product: str) -> DeviceSpec | None:
    """Return the catalogue's device for the GPU that a driver calls ``product``; None: the catalogue lacks it."""
    name = product.lower()
    known = next((entry for pattern, entry in _PRODUCTS if re.search(rf"\b(?:{pattern})\b", name)), None)
    return None if known is None else find_device(known)


def device_of_product(product: str, *, memory_bytes: int, architecture: str = "") -> DeviceSpec:
    """Return the catalogue's device for a GPU.

    A GPU that the catalogue lacks gets the figures of the device of its architecture with the nearest memory. The
    memory is the GPU's own where it has less than the catalogue's device, or is not that device.

    Args:
        product: name that the driver reports, such as "NVIDIA H100 80GB HBM3".
        memory_bytes: bytes of the GPU's memory.
        architecture: ``sm90``, ``gfx942``, ...; "": not known.

    Raises:
        ClusterError: the catalogue has no device of this name or architecture.
    """
    device = named_device(product)
    if device is not None:
        return device if memory_bytes >= _LESS_MEMORY * device.memory_bytes else _variant(device, product, memory_bytes)
    devices = map(find_device, device_names())
    alike = [device for device in devices if architecture and device.architecture == architecture]
    if not alike:
        raise ClusterError(
            f"{product!r} is not in the catalogue; add its figures to a cluster file, or write one with "
            "`shardplan calibrate`"
        )
    nearest = min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes))
    return _variant(nearest, product, memory_bytes)


def _variant(device: DeviceSpec, product: str, memory_bytes: int) -> DeviceSpec:
    """Return ``device`` with another memory, under a name that says so."""
    name = f"{device.name}-with-{memory_bytes / 1e9:.0f}gb"
    return dataclasses.replace(device, name=name, memory_bytes=memory_bytes, source=f"{device.name}, for {product}")
