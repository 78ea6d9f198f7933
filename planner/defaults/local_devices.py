"""`local_devices`: the GPUs that this process sees, or its CPU, as the catalogue knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from cost_model.hardware.devices import DeviceSpec, find_device
from cost_model.hardware.products import device_of_product

CPU = "cpu"
"""The catalogue's device for ranks without a GPU: its figures are assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevices:
    """The devices that a process sees.

    Attributes:
        type: device type, as torch names it: "cuda" (ROCm too) or "cpu".
        count: number of GPUs; 0 on a CPU.
        product: name that the driver reports; "" on a CPU.
        memory_bytes: bytes of a GPU's memory; 0 on a CPU.
        architecture: ``sm90``, ``gfx942``, ...; "" on a CPU.
    """

    type: Literal["cuda", "cpu"] = "cpu"
    count: int = 0
    product: str = ""
    memory_bytes: int = 0
    architecture: str = ""

    @property
    def spec(self) -> DeviceSpec:
        """The catalogue's device.

        Raises:
            ClusterError: the catalogue has no such GPU.
        """
        if self.type == "cpu":
            return find_device(CPU)
        return device_of_product(self.product, memory_bytes=self.memory_bytes, architecture=self.architecture)


def local_devices() -> LocalDevices:
    """Return the GPUs that this process sees; its CPU where it sees none, or where its process group has none."""
    if not torch.cuda.is_available() or _group_is_on_cpu():
        return LocalDevices()
    properties = torch.cuda.get_device_properties(0)
    of_rocm = getattr(properties, "gcnArchName", "") if torch.version.hip is not None else ""
    return LocalDevices(
        type="cuda",
        count=torch.cuda.device_count(),
        product=properties.name,
        memory_bytes=properties.total_memory,
        architecture=of_rocm.partition(":")[0] or f"sm{properties.major}{properties.minor}",
    )


def _group_is_on_cpu() -> bool:
    """Return whether the default process group runs on CPUs alone."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
