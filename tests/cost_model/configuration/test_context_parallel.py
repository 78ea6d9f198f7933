"""Context parallelism: nothing on an axis of one, more where blocks are merged kernel by kernel."""

import dataclasses

import pytest

from cost_model.configuration.context_parallel import (
    FIRST_BLOCK,
    LATER_BLOCK,
    MERGE_BACKWARD,
    context_seconds,
    merge_seconds,
)
from cost_model.configuration.implementation import Implementation, KernelOptions
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import message_share
from cost_model.kernels.step_constants import shipped_constants

SPEC = TransformerSpec(layers=2, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocab=256)
CLUSTER = ClusterSpec.from_dict({"nodes": 1, "devices_per_node": 8, "device": "h100-sxm-80gb"})
PARALLEL = ParallelSpec(micro_batch=1, seq=8192, context=4)
MERGES = dataclasses.replace(PARALLEL, implementation=Implementation(kernels=KernelOptions(torch_ring_attention=True)))


LONG_ATTENTION = (1.0, 1.0)
"""Seconds of attention that are longer than any hop."""


def test_an_axis_of_one_costs_nothing() -> None:
    alone = dataclasses.replace(MERGES, context=1)
    assert context_seconds(SPEC, alone, CLUSTER, LONG_ATTENTION) == (0.0, 0.0)
    assert merge_seconds(SPEC, alone, CLUSTER, shipped_constants()) == (0.0, 0.0)


def test_backward_carries_gradients_too() -> None:
    forward, backward = context_seconds(SPEC, PARALLEL, CLUSTER, (0.0, 0.0))
    assert backward == 2 * forward > 0


def test_keys_and_values_of_every_head_are_more_bytes_where_torch_merges_blocks() -> None:
    with_merges = context_seconds(SPEC, MERGES, CLUSTER, (0.0, 0.0))
    assert with_merges[0] > context_seconds(SPEC, PARALLEL, CLUSTER, (0.0, 0.0))[0]


def test_each_hop_overlaps_with_the_attention_to_one_block_and_slows_it() -> None:
    alone_s = context_seconds(SPEC, PARALLEL, CLUSTER, (0.0, 0.0))[0]
    hop_s = alone_s / 3
    taken = message_share(CLUSTER.device, nodes=1)
    assert context_seconds(SPEC, PARALLEL, CLUSTER, LONG_ATTENTION)[0] == pytest.approx(taken * alone_s)
    half = context_seconds(SPEC, PARALLEL, CLUSTER, (4 * hop_s / 2, 0.0))[0]
    assert half == pytest.approx((1 + taken) * alone_s / 2)
    # Between nodes a message occupies few processors.
    nodes = ClusterSpec.from_dict({"nodes": 4, "devices_per_node": 1, "device": "h100-sxm-80gb"})
    apart_s = context_seconds(SPEC, PARALLEL, nodes, (0.0, 0.0))[0]
    slowed_s = context_seconds(SPEC, PARALLEL, nodes, LONG_ATTENTION)[0]
    assert 0 < slowed_s / apart_s < taken / 2


def test_merging_moves_bytes_per_block() -> None:
    constants, bandwidth = shipped_constants(), CLUSTER.device.memory_bandwidth_bytes_per_s
    for parallel, per_value in ((PARALLEL, FIRST_BLOCK + 3 * 0.75 * LATER_BLOCK), (MERGES, MERGE_BACKWARD * 4)):
        forward, backward = merge_seconds(SPEC, parallel, CLUSTER, constants)
        assert 0 < forward < backward
        assert backward > per_value * 2048 * 1024 / bandwidth
    in_one_kernel, kernel_by_kernel = (
        merge_seconds(SPEC, parallel, CLUSTER, constants)[1] for parallel in (PARALLEL, MERGES)
    )
    assert in_one_kernel < kernel_by_kernel / 3
