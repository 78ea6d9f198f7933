"""The measurements of ``shardplan calibrate`` on a cluster, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.hardware.sweep import Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPoint:
    """A GEMM ``[m, k] @ [k, n]`` and its seconds."""

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
    """Bytes read and written by a memory-bound kernel, and its seconds."""

    nbytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of one run of ``shardplan calibrate``.

    A rank's seconds are the mean (on a GPU: the median) of repetitions that run on all ranks at the same time. Each
    result is the seconds of the slowest rank. Kernels are measured in several rounds, of which the median counts.

    Attributes:
        device: the name that the device reports.
        kind: ``cuda``, ``rocm`` or ``cpu``.
        memory_bytes: bytes of memory of one device; on a CPU, of one rank.
        launch_s: seconds between two small kernels of a full queue; on a CPU, of one small op on a plain tensor.
        host_op_s: host seconds per op dispatched on DTensors, if the device waits for the host; otherwise 0.
        first_touch_s_per_byte: seconds per byte of new memory, in addition to writing it; 0 on a GPU.
        sweeps: sweeps of collectives, by kind and shape of group.
        notes: the measurements that failed, and why.
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
