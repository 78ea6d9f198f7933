"""The rates of kernels inside a step."""

from __future__ import annotations

import dataclasses

import pytest

from cost_model.hardware.devices import device_names, find_device
from cost_model.kernels.in_step import STAND_ALONE, in_step


@pytest.mark.parametrize("name", device_names())
def test_kernels_are_no_faster_inside_a_step(name: str) -> None:
    found = in_step(find_device(name))
    assert 0 < found.gemm_share <= 1
    assert 0 < found.stream_share <= 1
    assert 0 <= found.taken_share < 0.5
    assert (found == STAND_ALONE) == (not find_device(name).architecture)


def test_a_device_whose_host_was_measured_is_as_it_was_measured() -> None:
    h100 = find_device("h100-sxm-80gb")
    assert in_step(h100) != STAND_ALONE
    assert in_step(dataclasses.replace(h100, host_op_s=1e-5)) == STAND_ALONE
