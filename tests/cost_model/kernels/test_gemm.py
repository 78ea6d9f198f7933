"""GEMMs by shape: numbers worked by hand, and that more work never takes less time."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from cost_model.hardware.cluster import ClusterError, find_device
from cost_model.hardware.devices import DeviceSpec, device_names
from cost_model.kernels.compute import matmul_flops_per_s
from cost_model.kernels.efficiency import shipped_efficiency
from cost_model.kernels.gemm import (
    gemm_flops,
    gemm_rate_flops_per_s,
    gemm_time_s,
    grouped_gemm_time_s,
    grouped_gradient_time_s,
    runs_one_by_one,
)

H100 = find_device("h100-sxm-80gb")
PLAIN = dataclasses.replace(
    shipped_efficiency().gemm, sustained=1.0, wave_rounding=1.0, medium_tile=0.5, small_tile=0.5, misaligned=0.5
)
"""Constants that make numbers easy to work by hand: whole waves, and small tiles at half the rate."""

sizes = st.integers(1, 20_000)
batches = st.integers(1, 300)
devices = st.sampled_from([find_device(name) for name in device_names()])


def dtype_of(device: DeviceSpec) -> str:
    return "bf16" if "bf16" in device.peak_flops else "fp16"


def test_whole_waves_by_hand() -> None:
    # 2048 x 2112 in tiles of 128 x 256: 16 x 9 = 144 (2112 / 256 = 8.25), in tiles of 256 x 128: 8 x 17 = 136 tiles.
    # On 132 processors both are two waves; each tile takes 2 * 128 * 256 * 4096 FLOP at 989e12 * 0.803 / 132.
    time_s = gemm_time_s(m=2048, n=2112, k=4096, device=H100, dtype="bf16", efficiency=PLAIN)
    assert time_s == pytest.approx(2 * (2 * 128 * 256 * 4096) / (989e12 * 0.803 / 132) + 1e-6, rel=1e-9)


def test_a_tile_too_many_costs_a_wave() -> None:
    def waves(n: int) -> float:
        tile_s = 2 * 128 * 256 * 4096 / (989e12 * 0.803 / 132)
        return (gemm_time_s(m=2048, n=n, k=4096, device=H100, dtype="bf16", efficiency=PLAIN) - 1e-6) / tile_s

    assert waves(2048) == pytest.approx(1)  # 128 tiles
    assert waves(2304) == pytest.approx(2)  # 144 tiles
    assert waves(4096) == pytest.approx(2)  # 256 tiles


def test_depth_is_split_where_tiles_leave_processors_idle() -> None:
    # 128 x 256 is 8 tiles of 64 x 64 (at half the rate here): in 8 parts of the depth they occupy 64 of 132 processors
    # busy; 8 partial sums of 8 bytes an element are written and read.
    time_s = gemm_time_s(m=128, n=256, k=65536, device=H100, dtype="bf16", efficiency=PLAIN)
    tile_s = 2 * 64 * 64 * 65536 / (989e12 * 0.803 / 132 * 0.5)
    assert time_s == pytest.approx(tile_s / 8 + 8 * 128 * 256 * 8 / (3350e9 * 0.9) + 1e-6, rel=1e-9)


def test_matrix_vector_product_is_bound_by_memory() -> None:
    # weights of 8192 x 8192 in bf16, one row in and out: 134.25e6 B at 3350e9 * 0.9 B/s
    time_s = gemm_time_s(m=1, n=8192, k=8192, device=H100, dtype="bf16")
    assert time_s == pytest.approx((2 * 8192**2 + 2 * 2 * 8192) / 3015e9 + 1e-6, rel=1e-9)


def test_large_shapes_reach_the_sustained_rate() -> None:
    sustained = shipped_efficiency().gemm.sustained
    assert gemm_rate_flops_per_s(H100, "bf16") == pytest.approx(matmul_flops_per_s(H100, "bf16") * sustained)
    rate = gemm_flops(m=32768, n=32768, k=8192) / gemm_time_s(m=32768, n=32768, k=8192, device=H100, dtype="bf16")
    assert 0.98 < rate / gemm_rate_flops_per_s(H100, "bf16") <= 1


def test_fp8_is_faster_and_misaligned_slower() -> None:
    def time_s(dtype: str, aligned: bool = True) -> float:
        return gemm_time_s(m=8192, n=8192, k=8192, device=H100, dtype=dtype, aligned=aligned)

    assert time_s("fp8") < 0.6 * time_s("bf16")
    assert time_s("tf32") > 1.9 * time_s("bf16")
    assert time_s("bf16", aligned=False) == pytest.approx(
        time_s("bf16") / shipped_efficiency().gemm.misaligned, rel=0.01
    )


def test_a_device_without_processors_is_a_roofline() -> None:
    toy = find_device("toy")
    assert gemm_time_s(m=10, n=10, k=1000, device=toy, dtype="fp32") == pytest.approx(2e5 / 1e9 + 1e-7)


def test_grouped_is_a_batch_with_its_launches() -> None:
    shape = {"n": 2048, "k": 7168, "device": H100, "dtype": "bf16"}
    batched = gemm_time_s(m=4096, batch=8, **shape)
    assert grouped_gemm_time_s(tokens=32768, groups=8, **shape) == pytest.approx(batched + 7e-6)
    assert grouped_gemm_time_s(tokens=32768, groups=8, kernel="grouped", **shape) == pytest.approx(batched)
    assert grouped_gemm_time_s(tokens=0, groups=8, **shape) == 0.0


def test_experts_gemms_run_one_by_one_where_the_grouped_kernel_is_slow() -> None:
    blackwell, groups, n, k = find_device("gb200-nvl72-186gb"), 4, 4096, 7168
    shape = {"groups": groups, "n": n, "k": k, "device": blackwell, "dtype": "bf16"}
    for tokens in (groups * 2048, groups * 8192, groups * 10_000):
        one_by_one = grouped_gemm_time_s(tokens=tokens, kernel="one by one", **shape)
        alone = gemm_time_s(m=tokens // groups, n=n, k=k, device=blackwell, dtype="bf16")
        assert one_by_one == pytest.approx(groups * alone)
        assert one_by_one < 0.7 * grouped_gemm_time_s(tokens=tokens, kernel="grouped", **shape)
        gradients = grouped_gradient_time_s(tokens=tokens, kernel="one by one", **shape)
        assert gradients < 0.7 * grouped_gradient_time_s(tokens=tokens, **shape)
        assert _runs_one_by_one(blackwell, tokens, n, groups)
    assert not _runs_one_by_one(H100, groups * 8192, n, groups)  # the kernel is as fast as one GEMM there
    assert not _runs_one_by_one(blackwell, groups * 128, n, groups)  # most processors would idle
    assert not _runs_one_by_one(blackwell, groups * 2048, 128, groups)
    with pytest.raises(ValueError, match="one by one or grouped"):
        grouped_gradient_time_s(tokens=8, kernel="streams", **shape)


@pytest.mark.parametrize("inner", [512, 2048])
@pytest.mark.parametrize("tokens", [4096 * 8, 32768 * 8])
def test_parts_of_experts_take_as_long_as_the_whole_at_least(tokens: int, inner: int) -> None:
    """Bounds of the search need this for every kernel of grouped GEMMs."""
    device, experts, width = find_device("gb200-nvl72-186gb"), 64, 4096

    def forward_s(tokens: int, experts: int, inner: int) -> float:
        one_by_one = _runs_one_by_one(device, tokens, min(inner, width), experts)
        kernel = "one by one" if one_by_one else "grouped"
        shape = {"groups": experts, "device": device, "dtype": "bf16", "kernel": kernel}
        return grouped_gemm_time_s(tokens=tokens, n=2 * inner, k=width, **shape) + grouped_gemm_time_s(
            tokens=tokens, n=width, k=inner, **shape
        )

    whole_s = forward_s(tokens, experts, inner)
    for ranks in (2, 4, 8, 16):
        for part in ((tokens // ranks, experts, inner), (tokens, experts, inner // ranks)):
            assert ranks * forward_s(*part) >= whole_s
        assert ranks * forward_s(tokens // ranks, experts // ranks, inner) >= whole_s


def _runs_one_by_one(device: DeviceSpec, tokens: int, n: int, groups: int) -> bool:
    kind = {"architecture": device.architecture, "processors": device.processors}
    return runs_one_by_one(tokens=tokens, n=n, groups=groups, **kind)


def test_bad_arguments() -> None:
    assert gemm_time_s(m=0, n=5, k=5, device=H100, dtype="bf16") == 0.0
    with pytest.raises(ValueError, match="negative"):
        gemm_time_s(m=-1, n=5, k=5, device=H100, dtype="bf16")
    with pytest.raises(ClusterError, match="no bf16 matrix rate"):
        gemm_time_s(m=5, n=5, k=5, device=find_device("v100-sxm-32gb"), dtype="bf16")
    with pytest.raises(ValueError, match="streams, one by one or grouped"):
        grouped_gemm_time_s(tokens=8, n=8, k=8, groups=2, device=H100, dtype="bf16", kernel="loop")


@given(
    m=sizes, n=sizes, k=sizes, batch=batches, more=st.integers(1, 3000), device=devices, what=st.sampled_from("mnkb")
)
def test_more_work_is_never_faster(
    m: int, n: int, k: int, batch: int, more: int, device: DeviceSpec, what: str
) -> None:
    before = {"m": m, "n": n, "k": k, "batch": batch}
    after = {size: value + (more if size[0] == what else 0) for size, value in before.items()}
    times = [gemm_time_s(**shape, device=device, dtype=dtype_of(device)) for shape in (before, after)]
    assert times[0] <= times[1] * (1 + 1e-12)


@given(m=sizes, n=sizes, k=sizes, flops=st.floats(1, 10), memory=st.floats(1, 10), device=devices)
def test_a_faster_device_is_never_slower(
    m: int, n: int, k: int, flops: float, memory: float, device: DeviceSpec
) -> None:
    faster = dataclasses.replace(
        device,
        flop_rates=tuple((dtype, rate * flops) for dtype, rate in device.flop_rates),
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * memory,
    )
    times = [gemm_time_s(m=m, n=n, k=k, device=each, dtype=dtype_of(each)) for each in (device, faster)]
    assert times[1] <= times[0] * (1 + 1e-12)


@given(m=st.integers(1, 64), n=st.integers(1, 64), k=st.integers(1, 64), batch=st.integers(1, 4))
def test_flops_are_those_of_flop_counter_mode(m: int, n: int, k: int, batch: int) -> None:
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.empty(batch, m, k, device="meta"), torch.empty(batch, k, n, device="meta"))
    assert gemm_flops(m=m, n=n, k=k, batch=batch) == counter.get_total_flops()
