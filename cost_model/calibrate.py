"""A cluster with constants fitted to its own measurements, and the residuals of that fit.

Constants are fitted one after the other. The launch time is taken as measured. Then the bandwidth is fitted, and then,
for each dtype, the GEMM rate at which half of the measured GEMMs are predicted too slow and half too fast. Collectives
are not fitted: their sweeps replace the model. A device has no constant for attention; the residuals of attention are
reported.

Known error: the residuals, which ``shardplan calibrate`` writes into the cluster's file.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import yaml

from cost_model.collectives.axis_groups import AxisGroup
from cost_model.collectives.price import collective_time_s
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.devices import DeviceSpec, find_device
from cost_model.hardware.measurements import AttentionPoint, GemmPoint, Measurements, StreamPoint
from cost_model.hardware.products import named_device
from cost_model.hardware.reading import ClusterError
from cost_model.kernels.attention import attention_time_s
from cost_model.kernels.gemm import gemm_flops, gemm_time_s

_ROUNDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Relative errors (predicted over measured seconds, minus one) of the measurements of one kind.

    Attributes:
        what: the kind of measurement: ``gemm bf16``, ``stream``, ``attention forward``, ``all_reduce 1x8``, ...
        count: number of measurements.
        mean_error, worst_error: mean and maximum of the absolute errors.
        signed_error: mean of the errors with sign; above 0 where predictions are too slow.
    """

    what: str
    count: int
    mean_error: float
    worst_error: float
    signed_error: float


def fit_cluster(measured: Measurements) -> tuple[ClusterSpec, tuple[Residual, ...]]:
    """Return the calibrated cluster and its residuals.

    Raises:
        ClusterError: a measurement that a constant needs is missing.
    """
    if not measured.gemms or not measured.streams:
        raise ClusterError("nothing to fit; measure both GEMMs and streams")
    device = _fit_device(measured, _start(measured))
    bare = ClusterSpec(
        nodes=measured.nodes,
        devices_per_node=measured.ranks_per_node,
        device=device,
        intra_node=device.intra_node,
        inter_node=device.inter_node,
        cards_per_node=max(1, round(measured.ranks_per_node * device.cards_per_device)),
    )
    cluster = bare.with_sweep(*measured.sweeps)
    return cluster, tuple(_residuals(measured, cluster))


def cluster_yaml(cluster: ClusterSpec, residuals: Iterable[Residual], notes: Iterable[str] = ()) -> str:
    """Return the text of a file that ``ClusterSpec.parse`` reads, with residuals and notes as comments at its top."""
    lines = ["Measured and fitted by `shardplan calibrate`. Predicted against measured, in percent:"]
    lines.append(f"{'what':28s} {'points':>6s} {'mean':>7s} {'worst':>7s} {'signed':>7s}")
    for residual in residuals:
        errors = (residual.mean_error, residual.worst_error, residual.signed_error)
        figures = " ".join(f"{100 * error:7.1f}" for error in errors)
        lines.append(f"{residual.what:28s} {residual.count:6d} {figures}")
    lines += [f"note: {note}" for note in notes]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.safe_dump(cluster.to_dict(), sort_keys=False)


def _start(measured: Measurements) -> DeviceSpec:
    """Return the catalogue's entry of the measured device, from which the fit starts."""
    if measured.kind == "cpu":
        return find_device("cpu")
    device = named_device(measured.device)
    if device is None:
        raise ClusterError(f"{measured.device!r} is not in the catalogue; add its figures to a cluster file")
    return device


def _fit_device(measured: Measurements, start: DeviceSpec) -> DeviceSpec:
    device = dataclasses.replace(
        start,
        name=f"{start.name}-calibrated",
        memory_bytes=measured.memory_bytes,
        kernel_launch_s=measured.launch_s,
        host_op_s=measured.host_op_s,
        first_touch_s_per_byte=measured.first_touch_s_per_byte,
        source=f"measured on {measured.device} by shardplan calibrate",
    )
    device = _with_bandwidth(device, measured.streams)
    by_dtype: dict[str, list[GemmPoint]] = defaultdict(list)
    for point in measured.gemms:
        by_dtype[point.dtype].append(point)
    rates = {dtype: _fitted_rate(device, points) for dtype, points in by_dtype.items()}
    efficiency = device.gemm_efficiency
    if device.kind != "cpu":  # the peak is the maker's; the share of it is measured
        main = "bf16" if "bf16" in rates else next(iter(rates))
        efficiency = min(1.0, rates[main] / device.peak_flops[main])
    peaks = device.peak_flops | {dtype: rate / efficiency for dtype, rate in rates.items()}
    return dataclasses.replace(device, gemm_efficiency=efficiency, flop_rates=tuple(sorted(peaks.items())))


def _with_bandwidth(device: DeviceSpec, points: Sequence[StreamPoint]) -> DeviceSpec:
    """Return the device with the median bandwidth of the points, without the launch time of each kernel.

    On a CPU the nominal bandwidth changes, on other devices ``memory_efficiency``.
    """
    reached = median(point.nbytes / max(point.time_s - device.kernel_launch_s, 0.1 * point.time_s) for point in points)
    if device.kind == "cpu":
        return dataclasses.replace(device, memory_bandwidth_bytes_per_s=reached / device.memory_efficiency)
    return dataclasses.replace(device, memory_efficiency=min(1.0, reached / device.memory_bandwidth_bytes_per_s))


def _fitted_rate(device: DeviceSpec, points: Sequence[GemmPoint]) -> float:
    """Return the FLOP/s (peak times ``gemm_efficiency``) at which the median log error of points of one dtype is 0."""
    dtype = points[0].dtype
    rate = max(gemm_flops(m=p.m, n=p.n, k=p.k) / p.time_s for p in points)
    for _ in range(_ROUNDS):
        candidate = dataclasses.replace(
            device, flop_rates=tuple(sorted({**device.peak_flops, dtype: rate / device.gemm_efficiency}.items()))
        )
        error = median(math.log(_gemm_s(p, candidate) / p.time_s) for p in points)
        rate *= math.exp(error)
        if abs(error) < 1e-4:
            break
    return rate


def _gemm_s(point: GemmPoint, device: DeviceSpec) -> float:
    return gemm_time_s(m=point.m, n=point.n, k=point.k, device=device, dtype=point.dtype)


def _attention_s(point: AttentionPoint, device: DeviceSpec) -> float:
    return attention_time_s(
        batch=point.batch,
        heads=point.heads,
        kv_heads=point.heads,
        seq_q=point.seq,
        seq_k=point.seq,
        head_dim=point.head_dim,
        causal=True,
        backward=point.backward,
        device=device,
        dtype=point.dtype,
    )


def _residuals(measured: Measurements, cluster: ClusterSpec) -> Iterable[Residual]:
    device = cluster.device
    errors: dict[str, list[float]] = defaultdict(list)
    for gemm in measured.gemms:
        errors[f"gemm {gemm.dtype}"].append(_gemm_s(gemm, device) / gemm.time_s - 1)
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    for stream in measured.streams:
        errors["stream"].append((stream.nbytes / bandwidth + device.kernel_launch_s) / stream.time_s - 1)
    for attention in measured.attention:
        name = f"attention {'backward' if attention.backward else 'forward'}"
        errors[name].append(_attention_s(attention, device) / attention.time_s - 1)
    for sweep in measured.sweeps:
        group = AxisGroup(nodes=sweep.nodes, ranks_per_node=sweep.ranks_per_node, groups_per_node=1)
        for nbytes, time_s in zip(sweep.nbytes, sweep.times_s, strict=True):
            predicted = collective_time_s(sweep.kind, nbytes, group, cluster)
            errors[f"{sweep.kind} {sweep.nodes}x{sweep.ranks_per_node}"].append(predicted / time_s - 1)
    for what, signed in errors.items():
        absolute = [abs(error) for error in signed]
        yield Residual(
            what=what,
            count=len(signed),
            mean_error=mean(absolute),
            worst_error=max(absolute),
            signed_error=mean(signed),
        )
