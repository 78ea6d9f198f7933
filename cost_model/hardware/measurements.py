"""What ``shardplan calibrate`` measured on a cluster, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.hardware.sweep import Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPoint:
    """``[m, k] @ [k, n]`` and its seconds."""

    m: int
    n: int
    k: int
    dtype: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint:
    """One pass of causal attention over ``[batch, heads, seq, head_dim]`` and its seconds."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    backward: bool
    dtype: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPoint:
    """Bytes read and written by a kernel that does little else, and its seconds."""

    nbytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Means (of a GPU: medians) of repetitions on all ranks at once, the median of rounds; of the ranks, the slowest.

    Attributes:
        device: the name that the device reports.
        kind: ``cuda``, ``rocm`` or ``cpu``.
        memory_bytes: of one device; on a CPU, of one rank.
        launch_s: between two small kernels of a full queue; on a CPU, one small op of a plain tensor.
        host_op_s: of the host for each op that is dispatched on DTensors, where it is waited for; else 0.
        first_touch_s_per_byte: of memory that is new to the process, beyond writing it; on a GPU 0.
        sweeps: collectives, by kind and shape of group.
        notes: what could not be measured, and why.
    """

    device: str
    kind: str
    nodes: int
    ranks_per_node: int
    memory_bytes: int
    launch_s: float
    host_op_s: float
    first_touch_s_per_byte: float
    gemms: tuple[GemmPoint, ...]
    attention: tuple[AttentionPoint, ...]
    streams: tuple[StreamPoint, ...]
    sweeps: tuple[Sweep, ...]
    notes: tuple[str, ...] = ()
