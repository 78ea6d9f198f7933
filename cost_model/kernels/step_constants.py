"""The few constants of a whole step that no kernel's measurement gives; fitted to published runs.

The values and the rows that decided each are in ``step_constants.toml``, written by
``benchmarks/calibrate_from_published.py``.
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
    """What decides a step beside kernels and links.

    Attributes:
        gemm_share: by architecture, share of a matrix product's rate alone that it reaches inside a step.
        expert_share: share of their rate that products of experts, and moving tokens between them, reach.
        stream_share, fused_stream_share: share of the streaming rate that element-wise kernels of a step reach, one
            by one and fused; kernels too small to be counted are in it.
        host_op_s: seconds in which Python and the dispatcher launch one kernel.
        power_exponent: a device capped at share p of its kind's power computes at rate p to this exponent.
        fragmentation_share: bytes that the caching allocator cannot hand out as its segments are split, over what is
            allocated of the default stream at most; nothing is lost where segments are expandable.
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
    """Return the constants that ship with the package. Read once: the file is part of the program."""
    text = resources.files("cost_model.kernels").joinpath("step_constants.toml").read_text(encoding="utf-8")
    return read_constants(tomllib.loads(text))


def gemm_share(constants: StepConstants, device: DeviceSpec) -> float:
    """Return the share that holds for ``device``: its architecture's, else that of the generation before it."""
    shares = constants.gemm_share
    same = {"sm103": "sm100", "gfx950": "gfx942", "gfx90a": "gfx942", "sm89": "sm80", "sm86": "sm80", "sm70": "sm80"}
    return shares.get(device.architecture, shares.get(same.get(device.architecture, ""), 1.0))
