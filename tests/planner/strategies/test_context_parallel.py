"""Context parallelism: kernels, collectives and seconds by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.small_models import TINY_LLAMA

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec
from cost_model.kernels.attention import attention_time_s
from cost_model.kernels.compute import stream_bytes_per_s
from cost_model.kernels.in_step import in_step
from cost_model.layouts.layout import MeshSpec
from planner.graph.op_graph import Op, Value
from planner.plan.token_order import backward_head_parts
from planner.pricing.op_times import LocalOp, OpTimes
from planner.profile.op_profile import OpProfile
from planner.run.compute_bound import least_compute_s
from planner.session import PlanningSession
from planner.strategies.axis_rule import Kernel
from planner.strategies.context_parallel import SEQUENCE, may_split
from planner.strategies.context_parallel_work import ContextParallelWork
from planner.strategies.own_collectives import inner_collectives
from planner.strategies.own_rules import own_rules

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attention(*, causal: bool = True, dropout: float = 0.0, mask: bool = False) -> tuple[Op, list[Value]]:
    heads = {"q": 8, "k": 2, "v": 2}
    inputs = [value(name, (2, heads[name], 64, 16)) for name in heads]
    inputs += [value("mask", (1, 1, 64, 64))] if mask else []
    names = tuple(i.name for i in inputs)
    op = Op(
        name="sdpa",
        target=ATTENTION,
        args=(*names, *(() if mask else (None,)), dropout, causal),
        kwargs={},
        inputs=names,
        outputs=("out",),
        call=0,
        crossings=((),) * len(names),
    )
    return op, inputs


def value(name: str, shape: tuple[int, ...], *, requires_grad: bool = True) -> Value:
    return Value(name=name, shape=shape, dtype=torch.bfloat16, kind="activation", requires_grad=requires_grad)


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize(("rows", "ranks"), [(16, 4), (15, 3), (1, 2), (64, 1)])
def test_all_ranks_compute_each_score_under_a_causal_mask_once(rows: int, ranks: int, is_zigzag: bool) -> None:
    work = ContextParallelWork(
        (2, 8, rows, 16), (2, 2, rows, 16), (2, 2, rows, 16), 2, ranks, causal=True, is_zigzag=is_zigzag
    )
    whole = rows * ranks
    for kernels in (work.kernels, work.backward_kernels):
        pairs = sum(k.heads * (k.queries * (k.queries + 1) // 2 if k.causal else k.queries * k.keys) for k in kernels)
        # If a rank's chunks differ in length, rank 0's last chunk is the longer one, by one row.
        assert 0 <= pairs * ranks - 8 * whole * (whole + 1) // 2 <= 8 * whole * ranks
        if rows % 2 == 0:
            assert pairs * ranks == 8 * whole * (whole + 1) // 2


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (12, 3), (5, 1), (1, 1), (4, 4)])
def test_the_backward_over_own_keys_has_two_parts_with_each_head_in_one(heads: int, kv_heads: int) -> None:
    parts = backward_head_parts(heads, kv_heads)
    assert [head for part, _ in parts for head in part] == list(range(heads))
    assert len(parts) == min(heads, 2)
    for part, kv_heads_of_part in parts:
        assert {head * kv_heads // heads for head in part} == set(kv_heads_of_part)


def test_without_a_mask_a_rank_runs_one_kernel_over_all_keys() -> None:
    work = ContextParallelWork((2, 8, 16, 16), (2, 2, 16, 16), (2, 2, 16, 16), 2, 4, causal=False)
    assert work.kernels == work.backward_kernels == (Kernel(16, 64, False, 8, 2),)


KEYS, QUERIES = 2 * 2 * 2 * 64 * 16 * 2, 2 * 8 * 16 * 16 * 2
"""Bytes of all keys and values, and of one rank's queries, on four ranks."""


def test_keys_are_gathered_and_chunks_exchanged_in_both_passes() -> None:
    op, inputs = attention()
    collectives = inner_collectives(op, inputs, [(SEQUENCE,)] * 3, (4,))
    gather, exchanges = [("all_gather", KEYS)], [("all_to_all", QUERIES)] * 2
    assert sorted((c.kind, c.nbytes) for c in collectives if c.phase == "forward") == gather + exchanges
    backward = sorted((c.kind, c.nbytes) for c in collectives if c.phase == "backward")
    assert backward == [*gather, *exchanges, ("reduce_scatter", KEYS)]
    assert all(c.overlapped_with is None for c in collectives)


def test_collectives_overlap_with_own_keys_in_zigzag_order() -> None:
    op, inputs = attention()
    collectives = inner_collectives(dataclasses.replace(op, is_zigzag=True), inputs, [(SEQUENCE,)] * 3, (4,))
    half_of_heads = Kernel(16, 16, True, 4, 1)
    assert [(c.kind, c.nbytes, c.phase, c.overlapped_with) for c in collectives] == [
        ("all_gather", KEYS, "forward", Kernel(16, 16, True, 8, 2)),
        ("all_gather", KEYS, "backward", half_of_heads),
        ("reduce_scatter", KEYS, "backward", half_of_heads),
    ]


def test_no_rule_for_dropout_or_a_learned_mask() -> None:
    for options in ({"dropout": 0.1}, {"causal": False, "dropout": 0.1}):
        assert not may_split(*attention(**options))
    op, inputs = attention(causal=False, mask=True)
    assert not may_split(op, inputs)  # the mask is learned
    plain = [*inputs[:3], value("mask", (1, 1, 64, 64), requires_grad=False)]
    (rule,) = [rule for rule in own_rules(op, plain) or [] if rule.inputs[0] == SEQUENCE]
    assert rule.inputs[3] == SEQUENCE
    one_row = [*inputs[:3], value("mask", (1, 1, 1, 64), requires_grad=False)]
    (rule,) = [rule for rule in own_rules(op, one_row) or [] if rule.inputs[0] == SEQUENCE]
    assert rule.inputs[3] != SEQUENCE


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "a100-sxm-80gb", "b200-sxm-180gb"])
def test_the_lower_bound_on_compute_holds(device: str) -> None:
    """The kernels of a split sequence are mostly rectangular, and more efficient than the unsplit causal kernel."""
    config = {**TINY_LLAMA, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 1 << 18}
    with quiet_libraries():
        source = load_model({"hf_config": config}, seq=1 << 17)
    session = PlanningSession(
        source.module,
        cluster=f"1x8x{device}",
        batch=1,
        seq=1 << 17,
        ac="none",
        micro_batches=1,
        memory_gb=1e4,
        fused_ops=True,
    )
    for mesh in ("dp=8", "dp=4,tp=2", "dp=2,tp=4"):
        run = session._planner.run_of(MeshSpec.parse(mesh), 1, "none")
        least_s = least_compute_s(session._analysis, session._planner.op_times, run, 1)
        estimate = session.plan(mesh=mesh).estimate
        assert estimate is not None
        assert 0.5 * estimate.compute_s < least_s <= estimate.compute_s


def test_shards_run_in_the_devices_attention_kernel() -> None:
    """On Hopper that is cuDNN's kernel, which is much faster there than FlashAttention-2."""
    op, inputs = attention()
    shape, device = (1, 8, 1 << 14, 128), ClusterSpec.parse("1x8xh100-sxm-80gb").device
    none = {"saved_extra_nbytes": 0, "cached_extra_nbytes": 0, "forward_peak_nbytes": 0, "backward_extra_nbytes": 0}
    profile = OpProfile(flops=1.0, backward_flops=1.0, nbytes=1, backward_nbytes=1, saved=(), **none)
    work = ContextParallelWork(shape, shape, shape, 2, 2, causal=True)
    times = OpTimes(device, flash_attention=True)
    time = times.op_time(LocalOp(op, inputs, inputs[0], [shape] * 3, shape, profile, context_work=work))

    def kernels_s(kernel: str, backward: bool) -> float:
        return sum(
            attention_time_s(
                batch=1, heads=8, kv_heads=8, seq_q=k.queries, seq_k=k.keys, head_dim=128, causal=k.causal,
                backward=backward, device=device, dtype="bf16", kernel=kernel,
            )
            for k in work.kernels
        )  # fmt: skip

    bytes_per_s = stream_bytes_per_s(device) * in_step(device).stream_share
    expected = kernels_s("cudnn", False) + work.forward_nbytes / bytes_per_s
    assert time.forward_s == pytest.approx(expected)
    assert time.backward_s == pytest.approx(kernels_s("cudnn", True) + work.backward_nbytes / bytes_per_s)
    assert kernels_s("cudnn", False) < 0.8 * kernels_s("flash2", False)


def test_communication_that_overlaps_with_own_keys_is_not_exposed() -> None:
    """In zigzag order, on devices that overlap communication and on devices that do not."""
    with quiet_libraries():
        config = {**TINY_LLAMA, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 1}
        source = load_model({"hf_config": {**config, "max_position_embeddings": 1 << 16}}, seq=1 << 15)
    cluster = ClusterSpec.parse("8x1xh100-sxm-80gb")
    without_overlap = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, overlaps=False))
    overlapped, blocking = (
        PlanningSession(
            source.module, cluster=one, batch=1, seq=1 << 15, micro_batches=1, ac="none", zigzag=True, fused_ops=True
        ).plan(mesh="dp=8")
        for one in (cluster, without_overlap)
    )
    assert overlapped.estimate is not None
    assert blocking.estimate is not None
    keys_nbytes = 2 * (1 << 15) * 128 * 2  # one head of keys and of values, in bf16
    rows = {row.phase + row.kind: row for row in overlapped.estimate.collectives if row.bytes == keys_nbytes}
    assert {name: row.count for name, row in rows.items()} == dict.fromkeys(
        ("forwardall_gather", "backwardall_gather", "backwardreduce_scatter"), config["num_hidden_layers"]
    )
    assert overlapped.zigzag is not None
    times, piece = OpTimes(cluster.device, flash_attention=True), (1, 8, 1 << 12, 128)
    whole, half = (Kernel(1 << 12, 1 << 12, True, heads, 1) for heads in (8, 4))
    overlapped_s = 0.0
    for name, row in rows.items():
        backward = name.startswith("backward")
        kernel_s = times.kernel_s(half if backward else whole, piece, piece, "bf16", "flash", backward=backward)
        assert kernel_s > 0
        overlapped_s += min(row.time_s, row.count * kernel_s)
    saved_s = blocking.estimate.exposed_communication_s - overlapped.estimate.exposed_communication_s
    # Overlap slows compute. On such devices the collectives of FSDP groups overlap as well.
    assert saved_s >= overlapped_s * (1 - in_step(cluster.device).taken_share) - 1e-9
    assert overlapped_s > 0
