import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.configuration.activations import layer_bytes
from cost_model.configuration.implementation import (
    AllocatorOptions,
    DataParallelOptions,
    ExpertOptions,
    Implementation,
    KernelOptions,
    LossOptions,
    LowPrecisionOptions,
    PipelineOptions,
    SavingOptions,
    StateOptions,
)
from cost_model.configuration.memory import ROLES, step_memory
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.transformer import Experts, MultiHeadLatentAttention, TransformerSpec
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
    assert found.allocated == max(phase.allocated for phase in found.phases)
    assert found.allocated <= found.reserved <= found.device


@given(batch=st.integers(1, 8), more=st.integers(0, 8), seq=st.sampled_from([512, 2048]), longer=st.integers(1, 4))
def test_bytes_never_fall_as_batch_and_sequence_grow(batch, more, seq, longer):
    before = peak(micro_batch=batch, seq=seq).allocated
    assert peak(micro_batch=batch + more, seq=seq).allocated >= before
    assert peak(micro_batch=batch, seq=seq * longer).allocated >= before


def test_states_of_adamw_in_float32_by_hand():
    found = peak(shard=8, zero=3)
    last = found.phases[-1]
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
    assert first.phases[0].activations == pytest.approx(4 * last.phases[0].activations)
    assert first.phases[0].logits == 0 < last.phases[0].logits


def test_a_loss_in_chunks_holds_less():
    whole = peak(implementation=Implementation())
    chunked = peak(implementation=Implementation(loss=LossOptions(chunks=8)))
    assert chunked.phases[0].logits == whole.phases[0].logits / 8


def test_fragments_stay_within_the_device():
    full = peak(micro_batch=40)
    assert full.device <= H100.device.memory_bytes or full.fragmentation == 0


SHARDED = {"shard": 16, "zero": 3, "micro_batch": 4}
LAYER = 2.0 * (SMALL.attention_parameters + SMALL.norm_parameters + SMALL.dense_mlp_parameters)
EMBEDDING = HEAD = 2.0 * SMALL.vocab * SMALL.hidden


def sharded(**implementation):
    return peak(**SHARDED, implementation=Implementation(**implementation))


def test_all_gathers_on_their_own_stream_are_reserved_in_addition_to_the_peak():
    apart = sharded(allocator=AllocatorOptions(gather_stream=True))
    assert apart.pools == pytest.approx(LAYER + EMBEDDING + HEAD)
    assert apart.reserved == apart.allocated + apart.pools + apart.fragmentation
    assert sharded(
        allocator=AllocatorOptions(gather_stream=True), data_parallel=DataParallelOptions(root_holds_ends=False)
    ).pools == pytest.approx(LAYER + HEAD)
    assert (
        sharded().pools
        == peak(implementation=Implementation(allocator=AllocatorOptions(gather_stream=True))).pools
        == 0
    )


def test_gradients_reduced_on_their_own_stream_stay_reserved_when_none_is_live():
    apart = sharded(allocator=AllocatorOptions(reduce_stream=True))
    assert apart.peak.name == "loss"
    assert apart.peak.gradients == 0
    assert apart.pools == pytest.approx(4 * SMALL.parameters / 16, rel=1e-3)
    always_live = sharded(allocator=AllocatorOptions(reduce_stream=True), state=StateOptions(gradients_persist=True))
    assert always_live.pools == 0
    one_rank = peak(implementation=Implementation(allocator=AllocatorOptions(reduce_stream=True)))
    assert one_rank.pools == 0


def test_16_bit_logits_leave_a_hole_that_their_float32_gradient_does_not_fit_in():
    plain, holed = (
        sharded(allocator=AllocatorOptions(expandable_segments=True), loss=LossOptions(logit_hole_nbytes=nbytes))
        for nbytes in (0.0, 2.0)
    )
    assert plain.fragmentation == 0
    assert holed.fragmentation == 2 * 4 * 2048 * SMALL.vocab
    assert holed.allocated == plain.allocated
    other = peak(
        micro_batch=8, spec=dataclasses.replace(SMALL, layers=64, vocab=1000),
        implementation=Implementation(
            allocator=AllocatorOptions(expandable_segments=True), loss=LossOptions(logit_hole_nbytes=2.0)
        ),
    )  # fmt: skip
    assert other.peak.name != "loss"
    assert other.fragmentation == 0


def test_segments_that_do_not_expand_lose_a_share_of_the_peak():
    fixed, pools_apart = sharded(), sharded(allocator=AllocatorOptions(reduce_stream=True))
    share = shipped_constants().fragmentation_share
    assert fixed.fragmentation == pytest.approx(share * fixed.allocated)
    assert pools_apart.fragmentation == fixed.fragmentation  # of the default stream's peak, not of the pools
    assert sharded(allocator=AllocatorOptions(expandable_segments=True)).fragmentation == 0


def test_embedding_and_head_in_groups_of_their_own_are_freed_after_use():
    together, apart = (
        sharded(data_parallel=DataParallelOptions(root_holds_ends=holds)).phases for holds in (True, False)
    )
    assert [phase.gathered for phase in together[:3]] == pytest.approx(
        [EMBEDDING + HEAD + LAYER, EMBEDDING + HEAD + 2 * LAYER, EMBEDDING + HEAD + 2 * LAYER]
    )
    assert [phase.gathered for phase in apart[:3]] == pytest.approx([HEAD, 2 * LAYER, LAYER + max(LAYER, EMBEDDING)])
    assert together[2].workspace == pytest.approx(3 * LAYER + HEAD)  # the root's gradient is whole until the end
    assert apart[1].workspace == pytest.approx(max(3 * LAYER, LAYER + 2 * HEAD))  # float32, being reduced
    assert apart[2].workspace == pytest.approx(3 * LAYER)


def test_a_loss_in_chunks_adds_up_the_heads_gradient_of_a_sharded_model():
    whole, chunked = (sharded(loss=LossOptions(chunks=chunks)).phases[0].workspace for chunks in (1, 8))
    assert chunked - whole == pytest.approx(3 * HEAD)  # one piece's in 16 bits, the sum in float32


def test_selective_checkpointing_saves_attention_unless_it_is_told_not_to():
    saved, recomputed = (
        layer_bytes(
            SMALL,
            dataclasses.replace(
                ONE,
                checkpointing="selective",
                implementation=Implementation(saving=SavingOptions(selective_attention=saves)),
            ),
            sparse=False,
        ).saved
        for saves in (True, False)
    )
    assert saved - recomputed == 2048 * (2 * SMALL.attention_out_dim + 4 * SMALL.heads)


def selective(dtype="bf16", **implementation):
    changed = Implementation(**implementation)
    parallel = dataclasses.replace(ONE, checkpointing="selective", dtype=dtype, implementation=changed)
    return layer_bytes(SMALL, parallel, sparse=False).saved


def test_selective_checkpointing_saves_the_gemms_it_is_told_to():
    tokens, width = 2048, 2  # bytes of a value
    none, alternate, everything = (
        selective(saving=SavingOptions(selective_gemms=name, selective_unread=False))
        for name in ("none", "alternate", "all")
    )
    assert alternate - none == width * tokens * (1024 + 256 + 4096)  # q, v, gate
    assert everything - alternate == width * tokens * (256 + 1024 + 4096)  # k, o, up
    assert selective() - alternate == width * tokens * 1024  # down, which backward does not read


@pytest.mark.parametrize(("query_rank", "width"), [(0, 16 * (64 + 32) + 16 * (64 + 128)), (384, 384 + 256 + 32)])
def test_of_mla_every_other_gemm_is_saved_keys_and_values_at_once(query_rank, width):
    mla = MultiHeadLatentAttention(query_rank=query_rank, kv_rank=256, nope_dim=64, rope_dim=32, value_dim=128)
    spec = dataclasses.replace(SMALL, mla=mla, kv_heads=16)
    none, alternate = (
        layer_bytes(
            spec,
            dataclasses.replace(
                ONE,
                checkpointing="selective",
                implementation=Implementation(saving=SavingOptions(selective_gemms=name, selective_unread=False)),
            ),
            sparse=False,
        ).saved
        for name in ("none", "alternate")
    )
    assert alternate - none == 2 * 2048 * (width + SMALL.ffn)


def test_selective_checkpointing_may_save_values_of_each_all_gathered_weight():
    added = selective(saving=SavingOptions(selective_weight_nbytes=2.0)) - selective()
    assert added == 2 * (SMALL.attention_parameters + SMALL.dense_mlp_parameters)


def test_low_precision_gemms_may_be_saved_differently_in_a_share_of_the_layers():
    plain, cast = selective(), selective(saving=SavingOptions(selective_gemms="none"))
    mixed = selective(
        "fp4", low_precision=LowPrecisionOptions(layer_share=0.75), saving=SavingOptions(selective_cast_gemms="none")
    )
    assert mixed == pytest.approx(0.25 * plain + 0.75 * cast)
    assert (
        selective(
            low_precision=LowPrecisionOptions(layer_share=0.75), saving=SavingOptions(selective_cast_gemms="none")
        )
        == plain
    )


def test_attention_without_a_compiler_has_transient_scores():
    fused, dense = (
        layer_bytes(
            SMALL,
            dataclasses.replace(ONE, implementation=Implementation(kernels=KernelOptions(attention=name))),
            sparse=False,
        )
        for name in ("flash2", "dense")
    )
    assert dense.saved == fused.saved
    assert dense.transient - fused.transient == (6 * 4 + 2) * 16 * 2048**2


def test_gradients_stay_unsharded_over_micro_batches_only_where_they_are_not_reduced_each_time():
    def gradients(**implementation):
        return max(
            phase.gradients
            for phase in peak(zero=3, shard=8, micro_batches=4, implementation=Implementation(**implementation)).phases
        )

    assert gradients(data_parallel=DataParallelOptions(defers_reduction=True)) > gradients()
    assert gradients(data_parallel=DataParallelOptions(reshard_after_forward=False)) == gradients(
        data_parallel=DataParallelOptions(defers_reduction=True)
    )


def test_a_pipelines_last_rank_retains_the_logits_of_all_micro_batches_where_they_are_returned():
    def logits(rank, **implementation):
        parallel = dataclasses.replace(
            ONE, pipeline=4, micro_batches=8, implementation=Implementation(**implementation)
        )
        return [phase.logits for phase in step_memory(SMALL, parallel, H100, rank=rank).phases]

    plain, retained = logits(3), logits(3, pipeline=PipelineOptions(retains_outputs=True))
    more = 2.0 * 2048 * SMALL.vocab * (8 - 1)
    assert [b - a for a, b in zip(plain, retained, strict=True)] == [more, more, more, 0.0]
    assert logits(0, pipeline=PipelineOptions(retains_outputs=True)) == logits(0)
    retaining = Implementation(pipeline=PipelineOptions(retains_outputs=True))
    assert peak(micro_batches=8, implementation=retaining) == peak(micro_batches=8)


def test_a_pipeline_may_have_a_buffer_for_each_micro_batch_and_direction():
    def activations(**implementation):
        parallel = dataclasses.replace(
            ONE, pipeline=4, micro_batches=8, checkpointing="full", implementation=Implementation(**implementation)
        )
        return step_memory(SMALL, parallel, H100, rank=0).phases[0].activations

    buffer = 2.0 * 2048 * SMALL.hidden
    preallocated = activations(pipeline=PipelineOptions(preallocates_receives=True))
    assert preallocated - activations() == buffer * (8 + 8 - 4)  # four hold micro-batches in flight
    assert peak(implementation=Implementation(pipeline=PipelineOptions(preallocates_receives=True))) == peak()


EXPERTS = dataclasses.replace(SMALL, experts=Experts(count=8, top_k=2, ffn=512, shared_ffn=1024))


def test_shared_experts_that_are_not_split_are_whole_on_the_first_rank():
    def states(**implementation):
        found = peak(EXPERTS, shard=16, zero=3, implementation=Implementation(**implementation)).phases[-1]
        return found.parameters, found.optimizer_state

    whole = 8 * 3 * 1024 * 1024 * (1 - 1 / 16)
    split, unsplit = states(), states(experts=ExpertOptions(shards_shared_experts=False))
    assert [b - a for a, b in zip(split, unsplit, strict=True)] == pytest.approx([4 * whole, 8 * whole])


def test_results_of_experts_may_be_combined_in_float32_whole_on_each_tensor_rank():
    def saved(tensor, **implementation):
        parallel = dataclasses.replace(ONE, tensor=tensor, implementation=Implementation(**implementation))
        return layer_bytes(EXPERTS, parallel, sparse=True).saved

    assert saved(4, experts=ExpertOptions(float32_combine=True)) - saved(4) == 4.0 * 2048 * 2 * 1024 * (1 - 1 / 4)
    assert saved(1, experts=ExpertOptions(float32_combine=True)) == saved(1)
    assert saved(1, experts=ExpertOptions(router_nbytes=4)) - saved(1) == 4.0 * 2048 * 1024


def test_full_checkpointing_may_save_the_result_of_attention():
    def saved(**implementation):
        parallel = dataclasses.replace(
            ONE, checkpointing="full", tensor=2, implementation=Implementation(**implementation)
        )
        return layer_bytes(SMALL, parallel, sparse=False).saved

    assert saved(saving=SavingOptions(full_attention=True)) - saved() == 2048 * (2 * 1024 + 4 * 16) / 2


def test_a_backward_that_frees_nothing_ends_with_all_that_forward_saved():
    released, held = (
        peak().phases,
        peak(implementation=Implementation(saving=SavingOptions(frees_in_backward=False))).phases,
    )
    assert held[:2] == released[:2]
    assert held[2].activations == held[1].activations > 2 * released[2].activations


def test_saved_casts_of_shards_live_from_forward_to_backward():
    plain, retained = sharded().phases, sharded(data_parallel=DataParallelOptions(saves_cast_shards=True)).phases
    casts = plain[0].parameters / 2
    assert [b.gathered - a.gathered for a, b in zip(plain, retained, strict=True)] == pytest.approx(
        [casts, casts, 0, 0]
    )
    held = sharded(
        data_parallel=DataParallelOptions(saves_cast_shards=True), saving=SavingOptions(frees_in_backward=False)
    ).phases
    assert held[2].gathered - plain[2].gathered == pytest.approx(casts)


def test_gradients_leave_holes_between_states_that_saved_activations_fill():
    def found(batch, holes):
        implementation = Implementation(allocator=AllocatorOptions(gradient_holes=holes, expandable_segments=True))
        return peak(shard=16, zero=3, micro_batch=batch, checkpointing="full", implementation=implementation)

    few = found(1, True)
    assert few.peak.name == "loss"
    assert few.fragmentation == few.phases[-1].gradients - few.peak.activations > 0
    assert found(1, False).fragmentation == found(8, True).fragmentation == 0


def test_backward_of_torchs_context_parallelism_gathers_keys_and_values_of_all_ranks():
    def transient(context, **implementation):
        parallel = dataclasses.replace(
            ONE, seq=2048 * context, context=context, checkpointing="full",
            implementation=Implementation(**implementation),
        )  # fmt: skip
        return layer_bytes(SMALL, parallel, sparse=False).transient

    ring = {"kernels": KernelOptions(torch_ring_attention=True)}
    assert transient(8) == transient(1) == transient(1, **ring)
    assert transient(16, **ring) - transient(8, **ring) == 2 * 2 * 8 * 2048 * 1024
