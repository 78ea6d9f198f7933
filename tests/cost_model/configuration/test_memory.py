import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.configuration.activations import layer_bytes
from cost_model.configuration.memory import ROLES, step_memory
from cost_model.configuration.parallelism import Implementation, ParallelSpec
from cost_model.configuration.transformer import Experts, LatentAttention, TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.step_constants import shipped_constants

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


SHARDED = {"shard": 16, "zero": 3, "micro_batch": 4}
LAYER = 2.0 * (SMALL.attention_parameters + SMALL.norm_parameters + SMALL.dense_mlp_parameters)
EMBEDDING = HEAD = 2.0 * SMALL.vocab * SMALL.hidden


def sharded(**implementation):
    return peak(**SHARDED, implementation=Implementation(**implementation))


def test_gathers_of_a_stream_of_their_own_are_reserved_beside_the_peak():
    apart = sharded(gather_stream=True)
    assert apart.pools == pytest.approx(LAYER + EMBEDDING + HEAD)
    assert apart.reserved == apart.allocated + apart.pools + apart.fragmentation
    assert sharded(gather_stream=True, root_holds_ends=False).pools == pytest.approx(LAYER + HEAD)
    assert sharded().pools == peak(implementation=Implementation(gather_stream=True)).pools == 0


def test_gradients_reduced_on_a_stream_of_their_own_stay_reserved_when_none_is_alive():
    apart = sharded(reduce_stream=True)
    assert apart.peak.name == "loss"
    assert apart.peak.gradients == 0
    assert apart.pools == pytest.approx(4 * SMALL.parameters / 16, rel=1e-3)
    assert sharded(reduce_stream=True, gradients_persist=True).pools == 0  # alive at the peak anyway
    assert peak(implementation=Implementation(reduce_stream=True)).pools == 0  # nothing to reduce on one rank


def test_16_bit_logits_leave_a_hole_that_their_float32_gradient_does_not_fit_in():
    plain, holed = (sharded(expandable_segments=True, loss_hole_nbytes=nbytes) for nbytes in (0.0, 2.0))
    assert plain.fragmentation == 0
    assert holed.fragmentation == 2 * 4 * 2048 * SMALL.vocab
    assert holed.allocated == plain.allocated
    other = peak(
        micro_batch=8, spec=dataclasses.replace(SMALL, layers=64, vocab=1000),
        implementation=Implementation(expandable_segments=True, loss_hole_nbytes=2.0),
    )  # fmt: skip
    assert other.peak.name != "loss"
    assert other.fragmentation == 0


def test_segments_that_do_not_expand_lose_a_share_of_the_peak():
    fixed, pools_apart = sharded(), sharded(reduce_stream=True)
    share = shipped_constants().fragmentation_share
    assert fixed.fragmentation == pytest.approx(share * fixed.allocated)
    assert pools_apart.fragmentation == fixed.fragmentation  # of the default stream's peak, not of the pools
    assert sharded(expandable_segments=True).fragmentation == 0


def test_ends_that_are_gathered_by_themselves_are_dropped_after_use():
    together, apart = (sharded(root_holds_ends=holds).timeline for holds in (True, False))
    assert [moment.gathered for moment in together[:3]] == pytest.approx(
        [EMBEDDING + HEAD + LAYER, EMBEDDING + HEAD + 2 * LAYER, EMBEDDING + HEAD + 2 * LAYER]
    )
    assert [moment.gathered for moment in apart[:3]] == pytest.approx([HEAD, 2 * LAYER, LAYER + max(LAYER, EMBEDDING)])
    assert together[2].workspace == pytest.approx(3 * LAYER + HEAD)  # the root's gradient is whole until the end
    assert apart[1].workspace == pytest.approx(max(3 * LAYER, LAYER + 2 * HEAD))  # float32, being reduced
    assert apart[2].workspace == pytest.approx(3 * LAYER)


def test_a_loss_in_chunks_adds_up_the_heads_gradient_of_a_sharded_model():
    whole, chunked = (sharded(loss_chunks=chunks).timeline[0].workspace for chunks in (1, 8))
    assert chunked - whole == pytest.approx(3 * HEAD)  # one piece's in 16 bits, the sum in float32


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


@pytest.mark.parametrize(("query_rank", "width"), [(0, 16 * (64 + 32) + 16 * (64 + 128)), (384, 384 + 256 + 32)])
def test_of_latent_attention_every_other_product_is_kept_keys_and_values_at_once(query_rank, width):
    latent = LatentAttention(query_rank=query_rank, kv_rank=256, nope_dim=64, rope_dim=32, value_dim=128)
    spec = dataclasses.replace(SMALL, latent=latent, kv_heads=16)
    none, alternate = (
        layer_bytes(
            spec,
            dataclasses.replace(
                ONE,
                checkpointing="selective",
                implementation=Implementation(kept_products=name, keeps_unread=False),
            ),
            sparse=False,
        ).saved
        for name in ("none", "alternate")
    )
    assert alternate - none == 2 * 2048 * (width + SMALL.ffn)


def test_selective_checkpointing_may_keep_something_of_each_gathered_weight():
    added = selective(kept_weight_nbytes=2.0) - selective()
    assert added == 2 * (SMALL.attention_parameters + SMALL.dense_mlp_parameters)


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
    assert dense.transient - fused.transient == (6 * 4 + 2) * 16 * 2048**2


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


def test_a_pipelines_last_rank_keeps_the_logits_of_all_micro_batches_where_they_are_returned():
    def logits(rank, **implementation):
        parallel = dataclasses.replace(
            ONE, pipeline=4, micro_batches=8, implementation=Implementation(**implementation)
        )
        return [moment.logits for moment in step_memory(SMALL, parallel, H100, rank=rank).timeline]

    plain, kept = logits(3), logits(3, keeps_outputs=True)
    more = 2.0 * 2048 * SMALL.vocab * (8 - 1)
    assert [b - a for a, b in zip(plain, kept, strict=True)] == [more, more, more, 0.0]
    assert logits(0, keeps_outputs=True) == logits(0)
    assert peak(micro_batches=8, implementation=Implementation(keeps_outputs=True)) == peak(micro_batches=8)


def test_a_pipeline_may_have_a_buffer_for_each_micro_batch_and_direction():
    def activations(**implementation):
        parallel = dataclasses.replace(
            ONE, pipeline=4, micro_batches=8, checkpointing="full", implementation=Implementation(**implementation)
        )
        return step_memory(SMALL, parallel, H100, rank=0).timeline[0].activations

    buffer = 2.0 * 2048 * SMALL.hidden
    assert activations(receives_ahead=True) - activations() == buffer * (8 + 8 - 4)  # four hold what is in flight
    assert peak(implementation=Implementation(receives_ahead=True)) == peak()


EXPERTS = dataclasses.replace(SMALL, experts=Experts(count=8, top_k=2, ffn=512, shared_ffn=1024))


def test_shared_experts_that_are_not_split_are_whole_on_the_first_rank():
    def states(**implementation):
        found = peak(EXPERTS, shard=16, zero=3, implementation=Implementation(**implementation)).timeline[-1]
        return found.parameters, found.optimizer_state

    whole = 8 * 3 * 1024 * 1024 * (1 - 1 / 16)
    split, unsplit = states(), states(shards_shared_experts=False)
    assert [b - a for a, b in zip(split, unsplit, strict=True)] == pytest.approx([4 * whole, 8 * whole])


def test_what_experts_return_may_be_put_back_in_float32_whole_on_each_tensor_rank():
    def saved(tensor, **implementation):
        parallel = dataclasses.replace(ONE, tensor=tensor, implementation=Implementation(**implementation))
        return layer_bytes(EXPERTS, parallel, sparse=True).saved

    assert saved(4, unsorts_whole=True) - saved(4) == 4.0 * 2048 * 2 * 1024 * (1 - 1 / 4)
    assert saved(1, unsorts_whole=True) == saved(1)
    assert saved(1, router_nbytes=4) - saved(1) == 4.0 * 2048 * 1024


def test_full_checkpointing_may_keep_what_attention_returns():
    def saved(**implementation):
        parallel = dataclasses.replace(
            ONE, checkpointing="full", tensor=2, implementation=Implementation(**implementation)
        )
        return layer_bytes(SMALL, parallel, sparse=False).saved

    assert saved(full_keeps_attention=True) - saved() == 2048 * (2 * 1024 + 4 * 16) / 2


def test_a_backward_that_releases_nothing_ends_with_all_that_forward_kept():
    released, held = peak().timeline, peak(implementation=Implementation(releases_saved=False)).timeline
    assert held[:2] == released[:2]
    assert held[2].activations == held[1].activations > 2 * released[2].activations


def test_casts_of_shards_are_there_from_forward_to_backward():
    plain, kept = sharded().timeline, sharded(keeps_cast_shards=True).timeline
    casts = plain[0].parameters / 2
    assert [b.gathered - a.gathered for a, b in zip(plain, kept, strict=True)] == pytest.approx([casts, casts, 0, 0])
    held = sharded(keeps_cast_shards=True, releases_saved=False).timeline
    assert held[2].gathered - plain[2].gathered == pytest.approx(casts)


def test_gradients_leave_holes_between_states_that_kept_activations_fill():
    def found(batch, holes):
        implementation = Implementation(gradient_holes=holes, expandable_segments=True)
        return peak(shard=16, zero=3, micro_batch=batch, checkpointing="full", implementation=implementation)

    few = found(1, True)
    assert few.peak.name == "loss"
    assert few.fragmentation == few.timeline[-1].gradients - few.peak.activations > 0
    assert found(1, False).fragmentation == found(8, True).fragmentation == 0


def test_backward_of_torchs_context_parallelism_gathers_keys_and_values_of_all_ranks():
    def transient(context, **implementation):
        parallel = dataclasses.replace(
            ONE, seq=2048 * context, context=context, checkpointing="full",
            implementation=Implementation(**implementation),
        )  # fmt: skip
        return layer_bytes(SMALL, parallel, sparse=False).transient

    assert transient(8) == transient(1) == transient(1, context_merges=True)
    assert transient(16, context_merges=True) - transient(8, context_merges=True) == 2 * 2 * 8 * 2048 * 1024
