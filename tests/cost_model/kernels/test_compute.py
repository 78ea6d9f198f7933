"""The roofline against numbers worked by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.hardware.cluster import ClusterError, find_device
from cost_model.kernels.compute import dtype_nbytes, eager_time_s, elementwise_time_s, op_time_s

H100 = find_device("h100-sxm-80gb")
amounts = st.floats(0, 1e16)


def test_large_matmul_is_bound_by_flops() -> None:
    # 8192^3 bf16: 2 * 8192^3 = 1.0995e12 FLOP at 989e12 * 0.803, then 1 us
    time_s = op_time_s(flops=2 * 8192**3, nbytes=3 * 2 * 8192**2, device=H100, dtype="bf16", matmul=True)
    assert time_s == pytest.approx(1.3845e-3 + 1e-6, rel=1e-4)


def test_matrix_vector_product_is_bound_by_memory() -> None:
    # 8192 x 8192 bf16 weights: 134.2e6 B at 3350e9 * 0.9 B/s
    time_s = op_time_s(flops=2 * 8192**2, nbytes=2 * 8192**2, device=H100, dtype="bf16", matmul=True)
    assert time_s == pytest.approx(44.517e-6 + 1e-6, rel=1e-4)


def test_vector_ops_use_the_fp32_rate_whatever_the_dtype() -> None:
    time_s = op_time_s(flops=67e12, nbytes=0, device=H100, dtype="bf16", matmul=False)
    assert time_s == pytest.approx(1 + 1e-6, rel=1e-9)


def test_nothing_costs_nothing() -> None:
    assert op_time_s(flops=0, nbytes=0, device=H100, dtype="bf16", matmul=False) == 0.0


def test_missing_rate_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ClusterError, match=r"v100-sxm-32gb has no bf16 matrix rate; it has fp16, fp32"):
        op_time_s(flops=1, nbytes=1, device=find_device("v100-sxm-32gb"), dtype="bf16", matmul=True)
    with pytest.raises(ClusterError, match="unknown dtype 'float7'"):
        dtype_nbytes("float7")
    with pytest.raises(ValueError, match="give 0 or more"):
        op_time_s(flops=-1, nbytes=1, device=H100, dtype="bf16", matmul=True)


@given(flops=amounts, nbytes=amounts, more=amounts, matmul=st.booleans())
def test_more_work_is_never_faster(flops: float, nbytes: float, more: float, matmul: bool) -> None:
    def time_s(flops: float, nbytes: float) -> float:
        return op_time_s(flops=flops, nbytes=nbytes, device=H100, dtype="bf16", matmul=matmul)

    assert time_s(flops + more, nbytes) >= time_s(flops, nbytes)
    assert time_s(flops, nbytes + more) >= time_s(flops, nbytes)


@given(flops=amounts, nbytes=amounts, factor=st.floats(1, 100), matmul=st.booleans())
def test_a_faster_device_is_never_slower(flops: float, nbytes: float, factor: float, matmul: bool) -> None:
    faster = dataclasses.replace(
        H100,
        flop_rates=tuple((dtype, rate * factor) for dtype, rate in H100.flop_rates),
        memory_bandwidth_bytes_per_s=H100.memory_bandwidth_bytes_per_s * factor,
    )
    times = [op_time_s(flops=flops, nbytes=nbytes, device=d, dtype="bf16", matmul=matmul) for d in (H100, faster)]
    assert times[1] <= times[0]


def test_fused_chain_reads_and_writes_once() -> None:
    # 2^20 bf16 elements, two inputs, one result, three ops: 3 tensors of 2 MiB fused, 4 more between the ops otherwise
    chain = {"numel": 2**20, "reads": 2, "writes": 1, "dtype": "bf16", "device": H100, "ops": 3}
    assert elementwise_time_s(**chain) == pytest.approx(3 * 2**21 / 3015e9 + 1e-6)
    assert elementwise_time_s(**chain, fused=False) == pytest.approx(7 * 2**21 / 3015e9 + 3e-6)
    assert elementwise_time_s(**{**chain, "numel": 0}) == 0.0
    with pytest.raises(ValueError, match="give 0 or more"):
        elementwise_time_s(**{**chain, "ops": 0})


def test_eager_waits_for_the_slower_of_host_and_device() -> None:
    assert eager_time_s(device_s=1e-3, ops=100, host_s=6e-6) == 1e-3
    assert eager_time_s(device_s=1e-4, ops=100, host_s=6e-6) == pytest.approx(6e-4)
