"""Attention whose sequence is sharded equals torch's, on two and four real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.gloo import run_on_gloo
from support.unsharded import differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cost_model.layouts.layout import Layout
from executor.collective_counter import CollectiveCounter, axes_by_group
from executor.ops.context_parallel.attention import context_parallel_attention
from executor.ops.dispatch import OwnOps
from executor.redistribute import Redistributor
from executor.verify import verify
from planner import PlanningSession
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.plan.token_order import zigzag_indices

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
Call = Callable[..., torch.Tensor]


def cases() -> Iterator[tuple[str, Call, list[torch.Tensor]]]:
    torch.manual_seed(0)
    for rows in (16, 12):  # with four ranks: chunks of two rows, and of one and two
        query, key = torch.randn(2, 4, rows, 8), torch.randn(2, 2, rows, 8)
        inputs = [query, key, torch.randn_like(key)]
        yield "causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), inputs
        yield (
            "scaled",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3),
            inputs,
        )
        yield "whole", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), inputs
        yield (
            "narrow values",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :4], is_causal=True, enable_gqa=True),
            inputs,
        )
    for shape in ((2, 4, 12, 12), (1, 1, 12, 12), (2, 1, 1, 12)):
        mask = torch.rand(shape) > 0.3
        mask[..., 0] = True
        for one in (mask, torch.randn(shape)):
            yield (
                "mask",
                lambda q, k, v, m=one: F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True),
                inputs,
            )
    longer = [query, torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 8)]
    yield "other keys", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), longer


def check_all(rank: int, shape: tuple[int, int], layouts: list[Layout]) -> list[str]:
    axes = PlanMesh(axes=(("dp", shape[0]), ("cp", shape[1])), device="cpu")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=axes))
    wrong = []
    for name, call, inputs in cases():
        plain = [tensor.clone().requires_grad_() for tensor in inputs]
        expected = call(*plain)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        for layout in layouts:
            sharded = [distribute_tensor(tensor, mesh, layout).requires_grad_() for tensor in inputs]
            grad_out = distribute_tensor(gradient, mesh, layout)
            counter = CollectiveCounter(axes_by_group(mesh), lambda: "forward")
            with OwnOps(redistributor), counter:
                actual = call(*sharded)
                actual.backward(grad_out)
            pairs = zip((actual, *(t.grad for t in sharded)), (expected, *(t.grad for t in plain)), strict=True)
            wrong += [
                f"{name} {layout} {tensor.shape}"
                for tensor, reference in pairs
                if tuple(tensor.placements) != layout or not close(tensor, reference)
            ]
            wrong += [f"{name} {layout} {row}" for row in counter.counts if row.axis != "cp"]
    return wrong


def close(sharded: DTensor, whole: torch.Tensor) -> bool:
    return torch.allclose(sharded.full_tensor(), whole, rtol=1e-5, atol=1e-5)


def check_meshes(rank: int, cases: list[tuple[tuple[int, int], list[Layout]]]) -> list[str]:
    return [wrong for shape, layouts in cases for wrong in check_all(rank, shape, layouts)]


def test_attention_over_a_sharded_sequence_equals_torchs_on_four_ranks() -> None:
    both: list[tuple[tuple[int, int], list[Layout]]] = [((1, 4), [(R, S2)]), ((2, 2), [(S0, S2), (S1, S2)])]
    assert run_on_gloo(check_meshes, 4, both) == [[]] * 4


def check_zigzag(rank: int, ranks: int) -> list[str]:
    """Check attention in zigzag order for several numbers of rows; with one row a rank's second chunk is empty."""
    axes = PlanMesh(axes=(("cp", ranks),), device="cpu")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=axes.names)
    redistributor = Redistributor.from_plan(mesh, ShardingPlan(mesh=axes))
    wrong = []
    for rows, heads, kv_heads, width in ((1, 4, 2, 8), (2, 3, 1, 8), (3, 6, 3, 4), (5, 1, 1, 8)):
        torch.manual_seed(rows)
        shapes = [(2, heads, ranks * rows, 8), (2, kv_heads, ranks * rows, 8), (2, kv_heads, ranks * rows, width)]
        whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        order = torch.tensor(zigzag_indices(ranks * rows, ranks))
        sharded = [
            distribute_tensor(tensor.detach()[:, :, order], mesh, [Shard(2)]).requires_grad_() for tensor in whole
        ]
        actual = context_parallel_attention(redistributor, 0, sharded, None, True, None, is_zigzag=True)
        grad_out = distribute_tensor(gradient[:, :, order], mesh, [Shard(2)])
        actual.backward(grad_out, retain_graph=True)
        actual.backward(grad_out)
        pairs = [(actual, expected), *((t.grad, 2 * w.grad) for t, w in zip(sharded, whole, strict=True))]
        wrong += [f"{rows} rows: {i}" for i, (a, b) in enumerate(pairs) if not close(a, b[:, :, order])]
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_attention_in_zigzag_order_equals_torchs_for_several_numbers_of_rows(ranks: int) -> None:
    assert run_on_gloo(check_zigzag, ranks, ranks) == [[]] * ranks


def test_attention_over_a_sharded_sequence_equals_torchs_on_two_ranks() -> None:
    assert run_on_gloo(check_meshes, 2, [((1, 2), [(R, S2)])]) == [[]] * 2


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
ROWS = 256
KEYS_NBYTES = 2 * 2 * 2 * ROWS * 8 * 4
"""Bytes of keys and values of one layer: 2 sequences, 2 heads of 8 values each, float32."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=256, max_position_embeddings=ROWS)
    return transformers.LlamaForCausalLM(config).train()


def make_batch() -> dict[str, Any]:
    ids = torch.randint(0, 256, (2, ROWS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, :100] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def train_all(rank: int, plans: dict[str, dict[str, Any]]) -> list[str]:
    return differences(plans, make_model, make_batch)


@pytest.fixture(scope="module")
def plans() -> dict[str, ShardingPlan]:
    """Return plans for more devices than there are key heads, so that attention cannot be sharded by heads."""
    by_mode = {}
    for ac in ("none", "selective", "full"):
        session = PlanningSession(
            make_model(),
            cluster="1x4xtoy",
            example_inputs=make_batch(),
            dtype="fp32",
            optimizer="sgd",
            micro_batches=1,
            ac=ac,
        )
        by_mode[ac] = session.plan(mesh="dp=1,tp=4")
    return by_mode


def test_sequences_are_sharded_where_there_are_fewer_heads_than_devices(plans: dict[str, ShardingPlan]) -> None:
    for ac, plan in plans.items():
        assert plan.estimate is not None
        gathers = {
            row.phase: row.count
            for row in plan.estimate.collectives
            if (row.kind, row.axis, row.bytes) == ("all_gather", "tp", KEYS_NBYTES)
        }
        recomputed = {} if ac == "none" else {"recompute": 2}
        assert gathers == {"forward": 2, "backward": 2, **recomputed}, ac
        assert verify(make_model(), plan, make_batch()).equal, ac


def test_losses_and_gradients_equal_the_unsharded_models_with_sharded_sequences(plans: dict[str, ShardingPlan]) -> None:
    assert run_on_gloo(train_all, 4, {ac: plan.to_dict() for ac, plan in plans.items()}) == [[]] * 4
