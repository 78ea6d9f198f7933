import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.activations import layer_bytes
from cost_model.cluster import ClusterSpec
from cost_model.parallelism import Implementation, ParallelSpec
from cost_model.step_memory import ROLES, step_memory
from cost_model.transformer import TransformerSpec

SMALL = TransformerSpec(layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=4096, vocab=32000)
H100 = ClusterSpec.parse("2x8xh100-sxm-80gb")
ONE = ParallelSpec(micro_batch=1, seq=2048)


def peak(spec=SMALL, **changes):
    return step_memory(spec, dataclasses.replace(ONE, **changes), H100)


@given(
    zero=st.sampled_from([0, 1, 3]),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    checkpointing=st.sampled_from(["none", "selective", "full"]),
)
def test_roles_add_up_to_the_peak(zero, tensor, pipeline, checkpointing):
    found = peak(zero=zero, shard=2, tensor=tensor, pipeline=pipeline, checkpointing=checkpointing, micro_batches=4)
    assert found.allocated == pytest.approx(sum(getattr(found.peak, role) for role in ROLES))
    assert found.allocated == max(moment.allocated for moment in found.timeline)
    assert found.allocated <= found.reserved <= found.device


@given(batch=st.integers(1, 8), more=st.integers(0, 8), seq=st.sampled_from([512, 2048]), longer=st.integers(1, 4))
def test_bytes_never_fall_as_batch_and_sequence_grow(batch, more, seq, longer):
    before = peak(micro_batch=batch, seq=seq).allocated
    assert peak(micro_batch=batch + more, seq=seq).allocated >= before
    assert peak(micro_batch=batch, seq=seq * longer).allocated >= before


def test_states_of_adamw_in_float32_by_hand():
    found = peak(shard=8, zero=3)
    last = found.timeline[-1]
    assert last.name == "optimizer"
    assert last.parameters == last.gradients == pytest.approx(4 * SMALL.parameters / 8, rel=1e-3)
    assert last.optimizer_state == pytest.approx(8 * SMALL.parameters / 8, rel=1e-3)


def test_checkpointing_saves_activations_in_order():
    saved = [
        layer_bytes(SMALL, dataclasses.replace(ONE, checkpointing=mode), sparse=False).saved
        for mode in ("none", "selective", "full")
    ]
    assert saved[0] > saved[1] > saved[2] == 2 * 2048 * 1024


def test_megatrons_34_bytes_of_a_layer_with_dropout_and_fused_attention():
    spec = TransformerSpec(
        layers=1, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096, vocab=1000, gated=False, layer_norm=True,
        dropout=True,
    )  # fmt: skip
    saved = layer_bytes(spec, ONE, sparse=False).saved
    assert saved / (2048 * 1024) == pytest.approx(34, rel=0.03)


def test_the_first_pipeline_rank_holds_more_micro_batches_and_the_last_the_logits():
    parallel = dataclasses.replace(ONE, pipeline=4, micro_batches=8)
    first, last = (step_memory(SMALL, parallel, H100, rank=rank) for rank in (0, 3))
    assert first.timeline[0].activations == pytest.approx(4 * last.timeline[0].activations)
    assert first.timeline[0].logits == 0 < last.timeline[0].logits


def test_a_loss_in_chunks_holds_less():
    whole = peak(implementation=Implementation())
    chunked = peak(implementation=Implementation(loss_chunks=8))
    assert chunked.timeline[0].logits == whole.timeline[0].logits / 8


def test_fragments_stay_within_the_device():
    full = peak(micro_batch=40)
    assert full.device <= 1.063 * H100.device.memory_bytes or full.fragmentation == 0


def test_gathers_of_a_stream_of_their_own_are_reserved_beside_the_peak():
    sharded = {"shard": 16, "zero": 3, "micro_batch": 4}
    apart = peak(**sharded, implementation=Implementation(gather_stream=True))
    layer = 2.0 * (SMALL.attention_parameters + SMALL.norm_parameters + SMALL.dense_mlp_parameters)
    assert apart.pools == pytest.approx(layer + 2.0 * SMALL.vocab * SMALL.hidden)
    assert apart.reserved == apart.allocated + apart.pools + apart.fragmentation
    assert peak(**sharded).pools == peak(implementation=Implementation(gather_stream=True)).pools == 0


def test_selective_checkpointing_keeps_attention_unless_it_is_told_not_to():
    kept, dropped = (
        layer_bytes(
            SMALL,
            dataclasses.replace(ONE, checkpointing="selective", implementation=Implementation(keeps_attention=keeps)),
            sparse=False,
        ).saved
        for keeps in (True, False)
    )
    assert kept - dropped == 2048 * (2 * SMALL.attention_out_dim + 4 * SMALL.heads)


def selective(dtype="bf16", **implementation):
    changed = Implementation(**implementation)
    parallel = dataclasses.replace(ONE, checkpointing="selective", dtype=dtype, implementation=changed)
    return layer_bytes(SMALL, parallel, sparse=False).saved


def test_selective_checkpointing_keeps_what_products_it_is_told_to():
    tokens, width = 2048, 2  # bytes of a value
    none, alternate, everything = (
        selective(kept_products=name, keeps_unread=False) for name in ("none", "alternate", "all")
    )
    assert alternate - none == width * tokens * (1024 + 256 + 4096)  # q, v, gate
    assert everything - alternate == width * tokens * (256 + 1024 + 4096)  # k, o, up
    assert selective() - alternate == width * tokens * 1024  # down, which backward does not read


def test_products_in_low_precision_may_be_kept_otherwise_in_a_share_of_the_layers():
    plain, cast = selective(), selective(kept_products="none")
    mixed = selective("fp4", cast_share=0.75, cast_kept_products="none")
    assert mixed == pytest.approx(0.25 * plain + 0.75 * cast)
    assert selective(cast_share=0.75, cast_kept_products="none") == plain


def test_attention_without_a_compiler_holds_scores_for_a_while():
    fused, dense = (
        layer_bytes(SMALL, dataclasses.replace(ONE, implementation=Implementation(attention=name)), sparse=False)
        for name in ("flash2", "dense")
    )
    assert dense.saved == fused.saved
    assert dense.transient - fused.transient == 5 * 4 * 16 * 2048**2


def test_gradients_stay_whole_over_micro_batches_only_where_they_are_not_reduced_each_time():
    def gradients(**implementation):
        return max(
            moment.gradients
            for moment in peak(
                zero=3, shard=8, micro_batches=4, implementation=Implementation(**implementation)
            ).timeline
        )

    assert gradients(defers_reduce=True) > gradients()
    assert gradients(reshards=False) == gradients(defers_reduce=True)
