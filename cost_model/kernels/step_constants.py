"""The constants of a whole training step, which measurements of single kernels do not give.

``benchmarks/calibrate_from_published.py`` fits them to published training runs; ``step_constants.toml`` has the values,
the date and the sources. Known error: see ``cost_model.configuration.step``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cost_model.hardware.devices import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class StepConstants:
    """The constants of a step.

    Attributes:
        gemm_share: architecture -> fraction of the stand-alone GEMM rate that is reached inside a step.
        expert_share: fraction of the rate of other GEMMs inside a step that the GEMMs of experts reach; the moving of
            tokens between experts counts in it.
        stream_share, fused_stream_share: fraction of the streaming rate that element-wise kernels of a step reach,
            unfused and fused. It accounts for small kernels that are not counted one by one.
        host_op_s: host seconds in which Python and the dispatcher launch one kernel.
        power_exponent: a device whose power is capped at the fraction p of its kind's power computes at the fraction
            p ** ``power_exponent`` of its rate.
        fragmentation_share: bytes that split segments make unusable for the caching allocator, over the allocated peak
            of the default stream; 0 with expandable segments.
    """

    gemm_share: Mapping[str, float]
    expert_share: float
    stream_share: float
    fused_stream_share: float
    host_op_s: float
    power_exponent: float
    fragmentation_share: float


def read_constants(table: Mapping[str, Any]) -> StepConstants:
    """Return the constants of a parsed ``step_constants.toml``."""
    values = {name: table[name]["value"] for name in StepConstants.__dataclass_fields__}
    return StepConstants(**values)


@functools.cache
def shipped_constants() -> StepConstants:
    """Return the constants of ``step_constants.toml``; cached, since the file is part of the program."""
    text = resources.files("cost_model.kernels").joinpath("step_constants.toml").read_text(encoding="utf-8")
    return read_constants(tomllib.loads(text))


def gemm_share(constants: StepConstants, device: DeviceSpec) -> float:
    """Return the ``gemm_share`` of the architecture of ``device``, or of a related architecture, or else 1."""
    shares = constants.gemm_share
    same = {"sm103": "sm100", "gfx950": "gfx942", "gfx90a": "gfx942", "sm89": "sm80", "sm86": "sm80", "sm70": "sm80"}
    return shares.get(device.architecture, shares.get(same.get(device.architecture, ""), 1.0))
