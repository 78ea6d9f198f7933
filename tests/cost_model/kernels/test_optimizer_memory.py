"""Bytes of parameters, gradients and optimizer state against the counts of the literature; the reserve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.hardware.cluster import ClusterError, device_names, find_device
from cost_model.kernels.optimizer_memory import (
    optimizer_update_s,
    parameter_state_bytes,
    reserve_by_role,
    reserve_bytes,
)
from cost_model.kernels.optimizers import OPTIMIZERS


def test_mixed_precision_adamw_is_18_bytes_per_parameter() -> None:
    assert parameter_state_bytes(1000) == {"parameters": 2000, "gradients": 4000, "optimizer_state": 12000}


def test_zero_paper_counts_16_with_half_precision_gradients() -> None:
    assert sum(parameter_state_bytes(1, dtype="fp16", gradient_dtype="fp16").values()) == 16


@pytest.mark.parametrize(("optimizer", "expected"), [("adam", 8), ("adagrad", 4), ("sgd", 0), ("sgd-momentum", 4)])
def test_full_precision_has_no_master_copy(optimizer: str, expected: int) -> None:
    state = parameter_state_bytes(1, optimizer=optimizer, dtype="fp32")
    assert state == {"parameters": 4, "gradients": 4, "optimizer_state": expected}


def test_inference_holds_parameters_only() -> None:
    assert parameter_state_bytes(10, training=False) == {"parameters": 20, "gradients": 0, "optimizer_state": 0}


def test_update_by_hand() -> None:
    # AdamW: reads a 4-byte gradient, reads and writes 12 bytes, writes a 2-byte parameter: 30 B at 3350e9 * 0.9
    time_s = optimizer_update_s(10**9, device=find_device("h100-sxm-80gb"))
    assert time_s == pytest.approx(30e9 / 3015e9, rel=1e-12)
    # SGD in fp32: reads a gradient, reads and writes the parameter
    toy = find_device("toy")
    assert optimizer_update_s(10**6, device=toy, optimizer="sgd", dtype="fp32") == pytest.approx(12e6 / 1e9)
    # 8-bit states, a float32 scale per 256 elements and a table of 256 values each: read and written
    states = 2 * (10**6 + 4 * 10**6 / 256 + 1024)
    eight_bit = optimizer_update_s(10**6 // 256 * 256, device=toy, optimizer="adamw-8bit", dtype="fp32")
    assert eight_bit == pytest.approx((12e6 + 2 * states) / 1e9, rel=1e-3)
    assert optimizer_update_s(0, device=toy) == 0.0


@given(numel=st.integers(0, 10**12), more=st.integers(0, 10**12), optimizer=st.sampled_from(sorted(OPTIMIZERS)))
def test_more_parameters_never_hold_less_or_step_faster(numel: int, more: int, optimizer: str) -> None:
    device = find_device("l4-24gb")
    # A tensor that is quantized may hold less than a smaller one that is not.
    numel, more = (256 * (4096 + n) if OPTIMIZERS[optimizer].bits else n for n in (numel, more))
    few = parameter_state_bytes(numel, optimizer=optimizer)
    many = parameter_state_bytes(numel + more, optimizer=optimizer)
    assert all(many[role] >= few[role] for role in few)
    times = [optimizer_update_s(n, device=device, optimizer=optimizer) for n in (numel, numel + more)]
    assert times[1] >= times[0]


@given(numel=st.integers(0, 10**9), parts=st.integers(1, 64))
def test_shards_add_up_to_the_whole(numel: int, parts: int) -> None:
    whole, part = parameter_state_bytes(numel * parts), parameter_state_bytes(numel)
    assert whole == {role: nbytes * parts for role, nbytes in part.items()}


def test_unknown_optimizer_lists_the_known() -> None:
    with pytest.raises(ClusterError, match=r"unknown optimizer 'adamv'; did you mean adam or adamw"):
        parameter_state_bytes(1, optimizer="adamv")
    with pytest.raises(ValueError, match="give 0 or more"):
        parameter_state_bytes(-1)
    with pytest.raises(ValueError, match="give 0 or more"):
        optimizer_update_s(-1, device=find_device("toy"))


def test_reserve() -> None:
    h100 = find_device("h100-sxm-80gb")
    by_role = {"allocator": round(0.05 * h100.memory_bytes), "context": 800_000_000 + 1_000_000_000}
    assert reserve_by_role(h100) == by_role
    assert reserve_bytes(h100) == sum(by_role.values())
    assert reserve_bytes(find_device("toy")) == reserve_bytes(find_device("cpu")) == 0
    for name in device_names():
        assert reserve_bytes(find_device(name)) < find_device(name).memory_bytes / 4
