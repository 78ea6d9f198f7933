"""Context parallelism: nothing on an axis of one, more where blocks are merged kernel by kernel."""

import dataclasses

from cost_model.cluster import ClusterSpec
from cost_model.layer_context import MERGE_BACKWARD, context_seconds, merge_seconds
from cost_model.parallelism import Implementation, ParallelSpec
from cost_model.step_constants import shipped_constants
from cost_model.transformer import TransformerSpec

SPEC = TransformerSpec(layers=2, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocab=256)
CLUSTER = ClusterSpec.from_dict({"nodes": 1, "devices_per_node": 8, "device": "h100-sxm-80gb"})
PARALLEL = ParallelSpec(micro_batch=1, seq=8192, context=4)
MERGES = dataclasses.replace(PARALLEL, implementation=Implementation(context_merges=True))


def test_an_axis_of_one_costs_nothing() -> None:
    alone = dataclasses.replace(MERGES, context=1)
    assert context_seconds(SPEC, alone, CLUSTER) == (0.0, 0.0)
    assert merge_seconds(SPEC, alone, CLUSTER, shipped_constants()) == (0.0, 0.0)


def test_backward_carries_gradients_too() -> None:
    forward, backward = context_seconds(SPEC, PARALLEL, CLUSTER)
    assert backward == 2 * forward > 0


def test_keys_and_values_of_every_head_are_more_bytes_where_torch_merges_blocks() -> None:
    assert context_seconds(SPEC, MERGES, CLUSTER)[0] > context_seconds(SPEC, PARALLEL, CLUSTER)[0]


def test_merging_moves_bytes_per_block() -> None:
    constants = shipped_constants()
    assert merge_seconds(SPEC, PARALLEL, CLUSTER, constants) == (0.0, 0.0)
    forward, backward = merge_seconds(SPEC, MERGES, CLUSTER, constants)
    assert 0 < forward < backward
    least = MERGE_BACKWARD * 4 * 2048 * 1024 / CLUSTER.device.memory_bandwidth_bytes_per_s
    assert backward > least
