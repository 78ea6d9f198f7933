"""Fitting a cluster to measurements: the fit recovers the constants, and a file round-trips."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from cost_model.calibrate import cluster_yaml, fit_cluster
from cost_model.collectives.price import AxisGroup, collective_time_s
from cost_model.hardware.cluster import ClusterError, ClusterSpec, find_device
from cost_model.hardware.devices import DeviceSpec, device_names
from cost_model.hardware.measurements import AttentionPoint, GemmPoint, Measurements, StreamPoint
from cost_model.hardware.sweep import make_sweep
from cost_model.kernels.attention import attention_time_s
from cost_model.kernels.gemm import gemm_time_s

SHAPES = ((512, 512, 512), (1024, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096))


def measured_on(device: DeviceSpec, reported: str, dtypes: tuple[str, ...]) -> Measurements:
    """Return the measurements of a machine whose figures are those of ``device``."""
    bandwidth = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    return Measurements(
        device=reported,
        kind=device.kind,
        nodes=2,
        ranks_per_node=4,
        memory_bytes=device.memory_bytes,
        launch_s=device.kernel_launch_s,
        host_op_s=device.host_op_s,
        first_touch_s_per_byte=device.first_touch_s_per_byte,
        gemms=tuple(
            GemmPoint(m=m, n=n, k=k, dtype=dtype, time_s=gemm_time_s(m=m, n=n, k=k, device=device, dtype=dtype))
            for dtype in dtypes
            for m, n, k in SHAPES
        ),
        attention=tuple(
            AttentionPoint(
                batch=2,
                heads=8,
                seq=1024,
                head_dim=64,
                backward=backward,
                dtype=dtypes[0],
                time_s=attention_time_s(
                    batch=2,
                    heads=8,
                    kv_heads=8,
                    seq_q=1024,
                    seq_k=1024,
                    head_dim=64,
                    causal=True,
                    backward=backward,
                    device=device,
                    dtype=dtypes[0],
                ),
            )
            for backward in (False, True)
        ),
        streams=tuple(
            StreamPoint(nbytes=nbytes, time_s=nbytes / bandwidth + device.kernel_launch_s)
            for nbytes in (2**24, 2**26, 2**28)
        ),
        sweeps=(make_sweep("all_reduce", 1, 4, [(2.0**10, 1e-4), (2.0**20, 1e-3), (2.0**24, 1.6e-2)]),),
        notes=("all_to_all on 1x4 was not measured: unsupported",),
    )


@pytest.mark.parametrize(
    ("name", "reported", "dtypes"),
    [
        ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3", ("bf16", "tf32")),
        ("a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", ("fp16",)),
        ("cpu", "cpu", ("fp32",)),
    ],
)
def test_constants_that_made_the_measurements_come_back(name: str, reported: str, dtypes: tuple[str, ...]) -> None:
    known = find_device(name)
    truth = dataclasses.replace(
        known,
        gemm_efficiency=0.8 * known.gemm_efficiency,
        memory_efficiency=0.9 * known.memory_efficiency,
        kernel_launch_s=3e-6,
    )
    cluster, residuals = fit_cluster(measured_on(truth, reported, dtypes))
    device = cluster.device
    for dtype in dtypes:
        fitted = device.peak_flops[dtype] * device.gemm_efficiency
        assert fitted == pytest.approx(truth.peak_flops[dtype] * truth.gemm_efficiency, rel=1e-3)
    assert device.memory_bandwidth_bytes_per_s * device.memory_efficiency == pytest.approx(
        truth.memory_bandwidth_bytes_per_s * truth.memory_efficiency
    )
    assert device.kernel_launch_s == 3e-6
    assert {residual.what for residual in residuals} >= {"stream", "all_reduce 1x4", f"gemm {dtypes[0]}"}
    assert max(residual.mean_error for residual in residuals if residual.what != "attention forward") < 0.02


def test_residuals_show_mispredicted_kinds() -> None:
    measured = measured_on(find_device("cpu"), "cpu", ("fp32",))
    slow = tuple(dataclasses.replace(point, time_s=2 * point.time_s) for point in measured.attention)
    _, residuals = fit_cluster(dataclasses.replace(measured, attention=slow))
    (forward,) = (residual for residual in residuals if residual.what == "attention forward")
    assert (forward.count, forward.worst_error) == (1, pytest.approx(0.5, abs=0.02))
    assert forward.signed_error < 0


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    measured = measured_on(find_device("cpu"), "cpu", ("fp32",))
    cluster, residuals = fit_cluster(measured)
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_yaml(cluster, residuals, measured.notes))
    assert "# all_reduce 1x4" in file.read_text()
    assert "# note: all_to_all on 1x4 was not measured" in file.read_text()
    read = ClusterSpec.parse(file)
    assert read == cluster
    group = AxisGroup(nodes=1, ranks_per_node=4, groups_per_node=1)
    assert collective_time_s("all_reduce", 2.0**20, group, read) == pytest.approx(1e-3)


def test_host_seconds_are_as_measured_and_older_files_have_none() -> None:
    measured = measured_on(find_device("cpu"), "cpu", ("fp32",))
    slow = dataclasses.replace(measured, host_op_s=2e-5, first_touch_s_per_byte=1e-9)
    cluster, residuals = fit_cluster(slow)
    assert (cluster.device.host_op_s, cluster.device.first_touch_s_per_byte) == (2e-5, 1e-9)
    data = yaml.safe_load(cluster_yaml(cluster, residuals))
    for name in ("host_op_s", "first_touch_s_per_byte"):
        del data["device"][name]
    before = ClusterSpec.parse(data).device
    assert (before.host_op_s, before.first_touch_s_per_byte) == (0.0, 0.0)
    assert before.kernel_launch_s == cluster.device.kernel_launch_s


def test_no_device_of_the_catalogue_waits_for_its_host() -> None:
    assert not any(find_device(name).host_op_s or find_device(name).first_touch_s_per_byte for name in device_names())


def test_measurements_that_cannot_be_fitted_are_rejected() -> None:
    measured = measured_on(find_device("cpu"), "cpu", ("fp32",))
    with pytest.raises(ClusterError, match="nothing to fit"):
        fit_cluster(dataclasses.replace(measured, gemms=()))
    with pytest.raises(ClusterError, match="'Abacus' is not in the catalogue"):
        fit_cluster(dataclasses.replace(measured, kind="cuda", device="Abacus"))
