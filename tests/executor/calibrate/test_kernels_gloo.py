"""Measuring this machine's CPU over gloo, in the smallest of sizes: everything is there, and a cluster comes of it."""

from __future__ import annotations

import torch
from support.gloo import run_on_gloo

from cost_model.calibrate import cluster_yaml, fit_cluster
from cost_model.hardware.measurements import Measurements
from executor.calibrate.collectives import _members, _shapes
from executor.calibrate.kernels import MeasuredSizes, measure

SMALL = MeasuredSizes(
    dtypes=("fp32",),
    gemms=((16, 16, 16), (64, 64, 64)),
    attention=((1, 2, 16, 8),),
    streams=(4096,),
    collectives=(1024, 65536),
    repeats=2,
)


def measured(rank: int) -> Measurements:
    return measure(torch.device("cpu"), SMALL)


def test_ranks_return_the_same_measurements_and_a_cluster_is_fitted_to_them() -> None:
    first, second = run_on_gloo(measured, 2)
    assert first.gemms == second.gemms
    assert first.sweeps == second.sweeps
    assert (first.kind, first.nodes, first.ranks_per_node) == ("cpu", 1, 2)
    assert {sweep.kind for sweep in first.sweeps} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send_recv",
    }
    assert not first.notes
    assert first.host_op_s > first.launch_s > 0  # on a DTensor an op takes longer
    assert first.first_touch_s_per_byte > 0
    assert [point.backward for point in first.attention] == [False, True]
    cluster, residuals = fit_cluster(first)
    assert cluster.size == 2
    assert cluster_yaml(cluster, residuals).startswith("# Measured")


def test_groups_have_the_ranks_of_mesh_axes() -> None:
    assert _shapes(1, 4) == [(1, 2), (1, 4)]
    assert _shapes(1, 3) == [(1, 3)]
    assert _shapes(2, 2) == [(1, 2), (2, 1), (2, 2)]
    assert _shapes(2, 1) == [(2, 1)]
    assert _members(1, 4, (1, 2)) == [[0, 1], [2, 3]]
    assert _members(2, 2, (2, 1)) == [[0, 2], [1, 3]]
    assert _members(2, 2, (2, 2)) == [[0, 1, 2, 3]]
