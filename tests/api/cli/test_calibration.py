"""``shardplan calibrate`` without torchrun, with a backend that is not there, and as the only rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from api.cli.calibration import calibrate
from cost_model.hardware.cluster import ClusterSpec
from executor.calibrate import kernels
from planner.errors import JobError


def test_it_says_how_to_start_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(JobError, match="torchrun --nproc-per-node"):
        calibrate(tmp_path / "cluster.yaml")


def test_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(JobError, match="no backend 'mpi'"):
        calibrate(tmp_path / "cluster.yaml", backend="mpi")
    if not torch.cuda.is_available():
        with pytest.raises(JobError, match="nccl needs a GPU"):
            calibrate(tmp_path / "cluster.yaml", backend="nccl")


def test_one_rank_writes_a_cluster_without_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    small = kernels.MeasuredSizes(
        dtypes=("fp32",), gemms=((32, 32, 32),), attention=((1, 1, 8, 8),), streams=(4096,), collectives=(), repeats=1
    )
    monkeypatch.setattr(kernels, "CPU", small)
    threads = torch.get_num_threads()
    try:
        text = calibrate(tmp_path / "cluster.yaml", backend="gloo")
    finally:
        torch.set_num_threads(threads)
    assert text == (tmp_path / "cluster.yaml").read_text()
    cluster = ClusterSpec.parse(tmp_path / "cluster.yaml")
    assert (cluster.size, cluster.sweeps) == (1, ())
    assert cluster.device.peak_flops["fp32"] > 0
