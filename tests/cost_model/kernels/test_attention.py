"""Attention by shape and kernel: scores counted by hand, published marks, and that more work never takes less time."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from cost_model.hardware.cluster import find_device
from cost_model.hardware.devices import DeviceSpec, device_names
from cost_model.kernels.attention import (
    KERNELS,
    attended_scores,
    attention_flops,
    attention_time_s,
    default_kernel,
    flash_rate_flops_per_s,
)

H100 = find_device("h100-sxm-80gb")
SHAPE: dict[str, Any] = {
    "batch": 2,
    "heads": 16,
    "kv_heads": 16,
    "seq_q": 8192,
    "seq_k": 8192,
    "head_dim": 128,
    "causal": True,
    "backward": False,
    "device": H100,
    "dtype": "bf16",
}
devices = st.sampled_from([find_device(name) for name in device_names()])
kernels = st.sampled_from(KERNELS)


def time_s(**changes: Any) -> float:
    shape = {**SHAPE, **changes}
    return attention_time_s(**{**shape, "dtype": "bf16" if "bf16" in shape["device"].peak_flops else "fp16"})


def test_scores_under_a_mask_by_hand() -> None:
    assert attended_scores(seq_q=8, seq_k=8, causal=False) == 64
    assert attended_scores(seq_q=8, seq_k=8, causal=True) == 32
    # four new queries after twelve keys: 4 x 12 and half of 4 x 4
    assert attended_scores(seq_q=4, seq_k=16, causal=True) == 56
    # a window of 4: four rows that grow to it, then four full ones
    assert attended_scores(seq_q=8, seq_k=8, causal=True, window=4) == 8 + 16
    assert attended_scores(seq_q=8, seq_k=8, causal=False, window=4) == 32
    assert attended_scores(seq_q=4, seq_k=16, causal=True, window=4) == 16


def test_long_causal_attention_costs_half() -> None:
    assert time_s(seq_q=65536, seq_k=65536) == pytest.approx(
        time_s(seq_q=65536, seq_k=65536, causal=False) * 0.5 * 1.1, rel=0.02
    )


@pytest.mark.parametrize(
    ("device", "kernel", "expected"),
    [
        ("a100-sxm-80gb", "flash", "flash2"),
        ("h100-sxm-80gb", "flash", "cudnn"),
        ("b200-sxm-180gb", "flash", "flash4"),
        ("a100-sxm-80gb", "flash3", "flash2"),
        ("b200-sxm-180gb", "cudnn", "flash4"),
        ("v100-sxm-32gb", "flash2", "unfused"),
        ("mi300x-192gb", "flash", "flash2"),
        ("cpu", "flash", "unfused"),
    ],
)
def test_a_kernel_that_cannot_run_is_the_default(device: str, kernel: str, expected: str) -> None:
    found = find_device(device)
    assert time_s(device=found, kernel=kernel) == time_s(device=found, kernel=expected)


def test_default_kernels() -> None:
    assert {name: default_kernel(find_device(name)) for name in ("l40s-48gb", "toy")} == {
        "l40s-48gb": "flash2",
        "toy": "unfused",
    }


def test_flash2_reaches_amperes_instructions_everywhere() -> None:
    assert flash_rate_flops_per_s(H100, "bf16", "flash2") == 989e12 / 2
    assert flash_rate_flops_per_s(find_device("b200-sxm-180gb"), "bf16", "flash2") == 2250e12 / 4
    assert flash_rate_flops_per_s(find_device("a100-sxm-80gb"), "bf16", "flash2") == 312e12
    assert flash_rate_flops_per_s(H100, "bf16", "flash3") == 989e12


def test_without_a_fused_kernel_it_is_many_times_slower() -> None:
    assert time_s(kernel="unfused") > 10 * time_s(kernel="flash3")
    assert time_s(kernel="unfused", backward=True) > time_s(kernel="unfused")


def test_few_heads_leave_processors_idle() -> None:
    # one head of 256 queries is two rows of tiles: the second head of the same size runs at the same time
    one_head, two_heads = (time_s(batch=1, heads=heads, kv_heads=heads, seq_q=256, seq_k=65536) for heads in (1, 2))
    assert one_head == two_heads


def test_one_query_is_bound_by_memory() -> None:
    nbytes = 2 * (2 * 32 * 8 * 4096 * 128 + 2 * 32 * 32 * 128)
    decode = time_s(batch=32, heads=32, kv_heads=8, seq_q=1, seq_k=4096, causal=False, kernel="flash3")
    assert decode >= nbytes / 3015e9


def test_values_of_another_width() -> None:
    both, narrow = time_s(head_dim=192), time_s(head_dim=192, head_dim_v=128)
    assert time_s(head_dim=128) < narrow < both


def test_empty_and_unknown() -> None:
    assert time_s(batch=0) == 0.0
    with pytest.raises(ValueError, match="kernel is 'triton'"):
        time_s(kernel="triton")


lengths = st.integers(1, 5000)


@given(
    batch=st.integers(1, 8),
    heads=st.integers(1, 64),
    seq=lengths,
    more=st.integers(1, 2000),
    head_dim=st.integers(1, 256),
    causal=st.booleans(),
    backward=st.booleans(),
    window=st.none() | lengths,
    device=devices,
    kernel=kernels,
    what=st.sampled_from(["batch", "heads", "seq_q", "seq_k", "both", "head_dim", "window"]),
)
def test_more_work_is_never_faster(
    batch: int,
    heads: int,
    seq: int,
    more: int,
    head_dim: int,
    causal: bool,
    backward: bool,
    window: int | None,
    device: DeviceSpec,
    kernel: str,
    what: str,
) -> None:
    before = {"batch": batch, "heads": heads, "seq_q": seq, "seq_k": seq, "head_dim": head_dim, "window": window}
    grown = {"seq_q", "seq_k"} if what == "both" else {what}
    after = {name: value + more if value and name in grown else value for name, value in before.items()}
    fixed = {"kv_heads": 1, "causal": causal, "backward": backward, "device": device, "kernel": kernel}
    times = [time_s(**fixed, **shape) for shape in (before, after)]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(
    seq=lengths, factor=st.floats(1, 10), causal=st.booleans(), backward=st.booleans(), device=devices, kernel=kernels
)
def test_a_faster_device_is_never_slower(
    seq: int, factor: float, causal: bool, backward: bool, device: DeviceSpec, kernel: str
) -> None:
    faster = dataclasses.replace(
        device,
        flop_rates=tuple((dtype, rate * factor) for dtype, rate in device.flop_rates),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor,
    )
    shape = {"seq_q": seq, "seq_k": seq, "causal": causal, "backward": backward, "kernel": kernel}
    times = [time_s(**shape, device=each) for each in (device, faster)]
    assert times[1] <= times[0] * (1 + 1e-12)


@given(
    batch=st.integers(1, 4),
    heads=st.integers(1, 4),
    seq_q=st.integers(1, 40),
    seq_k=st.integers(1, 40),
    head_dim=st.integers(1, 40),
    head_dim_v=st.integers(1, 40),
)
def test_flops_are_those_of_flop_counter_mode(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, head_dim_v: int
) -> None:
    query = torch.Size([batch, heads, seq_q, head_dim])
    key = torch.Size([batch, heads, seq_k, head_dim])
    value = torch.Size([batch, heads, seq_k, head_dim_v])
    out = torch.Size([batch, heads, seq_q, head_dim_v])
    shape = {
        "batch": batch,
        "heads": heads,
        "seq_q": seq_q,
        "seq_k": seq_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
    }
    assert attention_flops(**shape, backward=False) == sdpa_flop_count(query, key, value)
    assert attention_flops(**shape, backward=True) == sdpa_backward_flop_count(out, query, key, value)
