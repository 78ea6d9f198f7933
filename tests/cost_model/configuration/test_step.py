import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.configuration.implementation import (
    DataParallelOptions,
    ExpertOptions,
    Implementation,
    KernelOptions,
    LowPrecisionOptions,
    SavingOptions,
    TensorParallelOptions,
)
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.step import stage_layers, step_time
from cost_model.configuration.transformer import Experts, TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import taken_share
from cost_model.kernels.step_constants import shipped_constants

SMALL = TransformerSpec(layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=4096, vocab=32000)
SPARSE = dataclasses.replace(SMALL, experts=Experts(count=16, top_k=2, ffn=1024))
H100 = ClusterSpec.parse("2x8xh100-sxm-80gb")
ONE = ParallelSpec(micro_batch=1, seq=2048)
CONFIGURATIONS = {
    "one device": {},
    "data parallel": {"replicate": 16},
    "sharded": {"shard": 16, "zero": 3},
    "sharded optimizer": {"shard": 16, "zero": 1},
    "tensor": {"tensor": 8, "replicate": 2},
    "sequence parallel": {"tensor": 8, "replicate": 2, "sequence_parallel": True},
    "pipeline": {"pipeline": 4, "replicate": 4, "micro_batches": 8},
    "interleaved": {
        "pipeline": 4, "replicate": 4, "micro_batches": 8, "virtual_stages": 2, "schedule": "interleaved"
    },
    "context": {"context": 4, "shard": 4, "zero": 3},
    "experts": {"shard": 16, "zero": 3, "expert": 8},
}  # fmt: skip


def seconds(spec=SMALL, cluster=H100, **changes):
    return step_time(spec, dataclasses.replace(ONE, **changes), cluster).total_s


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_has_a_price_whose_parts_are_not_negative(name):
    spec = SPARSE if name == "experts" else SMALL
    found = step_time(spec, dataclasses.replace(ONE, **CONFIGURATIONS[name]), H100)
    parts = dataclasses.asdict(found)
    assert min(parts.values()) >= 0
    assert found.total_s == pytest.approx(sum(parts.values()))


def test_one_device_communicates_nothing():
    found = step_time(SMALL, ONE, H100)
    assert found.tensor_s == found.data_s == found.context_s == found.expert_s == found.bubble_s == 0


@given(
    name=st.sampled_from(sorted(CONFIGURATIONS)),
    batch=st.integers(1, 4),
    more=st.integers(0, 4),
    seq=st.sampled_from([256, 512, 1024, 4096]),
    longer=st.sampled_from([1, 2, 4]),
)
def test_seconds_never_fall_as_batch_and_sequence_grow(name, batch, more, seq, longer):
    spec = SPARSE if name == "experts" else SMALL
    changes = CONFIGURATIONS[name]
    before = seconds(spec, micro_batch=batch, seq=seq, **changes)
    assert seconds(spec, micro_batch=batch + more, seq=seq, **changes) >= before * (1 - 1e-9)
    assert seconds(spec, micro_batch=batch, seq=seq * longer, **changes) >= before * (1 - 1e-9)


@given(name=st.sampled_from(sorted(CONFIGURATIONS)), factor=st.floats(1.0, 8.0))
def test_seconds_never_rise_with_a_faster_link_or_device(name, factor):
    spec = SPARSE if name == "experts" else SMALL
    changes = CONFIGURATIONS[name]
    before = seconds(spec, **changes)
    plain = H100.to_dict()
    for link in ("intra_node", "inter_node"):
        faster = {**plain[link], "bandwidth_bytes_per_s": plain[link]["bandwidth_bytes_per_s"] * factor}
        assert seconds(spec, ClusterSpec.from_dict({**plain, link: faster}), **changes) <= before * (1 + 1e-9)
    device = plain["device"]
    rates = {name: rate * factor for name, rate in device["peak_flops"].items()}
    memory = device["memory_bandwidth_bytes_per_s"] * factor
    faster = {**device, "peak_flops": rates, "memory_bandwidth_bytes_per_s": memory}
    assert seconds(spec, ClusterSpec.from_dict({**plain, "device": faster}), **changes) <= before * (1 + 1e-9)


def test_recomputation_costs_a_forward():
    long = dataclasses.replace(ONE, seq=16384)
    plain, full = step_time(SMALL, long, H100), step_time(SMALL, dataclasses.replace(long, checkpointing="full"), H100)
    assert 1.2 < full.compute_s / plain.compute_s < 1.5


def test_eager_small_layers_wait_for_the_host():
    tiny = dataclasses.replace(SMALL, hidden=64, heads=1, kv_heads=1, ffn=128)
    slow = dataclasses.replace(
        ONE, seq=16, implementation=Implementation(kernels=KernelOptions(host_ops_per_layer=100))
    )
    fast = dataclasses.replace(ONE, seq=16, implementation=Implementation(kernels=KernelOptions(host_ops_per_layer=0)))
    assert step_time(tiny, slow, H100).compute_s > 3 * step_time(tiny, fast, H100).compute_s


def test_layers_that_do_not_divide_leave_room_for_embedding_and_loss():
    spec = dataclasses.replace(SMALL, layers=126)
    eight = dataclasses.replace(ONE, pipeline=8, virtual_stages=8, schedule="interleaved", micro_batches=64)
    assert stage_layers(spec, eight) == 16
    assert stage_layers(SMALL, dataclasses.replace(ONE, pipeline=4)) == 2


def test_more_stages_than_layers_are_rejected():
    with pytest.raises(ValueError, match="more than 8 layers"):
        seconds(pipeline=16)


def test_all_gathers_without_overlap_are_exposed_and_a_large_layer_is_all_gathered_again_to_recompute():
    sharded = {"shard": 16, "zero": 3, "checkpointing": "full", "micro_batch": 8}

    def data_s(**options):
        implementation = Implementation(data_parallel=DataParallelOptions(**options))
        return step_time(SMALL, dataclasses.replace(ONE, **sharded, implementation=implementation), H100).data_s

    assert data_s(overlaps=False) > 2 * data_s()
    assert data_s(overlaps=False, max_reuse_numel=1.0) > data_s(overlaps=False)
    assert data_s(overlaps=False, collectives_per_layer=4) > data_s(overlaps=False)


def test_async_tensor_parallelism_exposes_the_last_piece_of_a_reduction_and_slows_gemms():
    wide = dataclasses.replace(SMALL, hidden=32768, heads=256, kv_heads=256, head_dim=128, ffn=131072)  # long GEMMs

    def tensor_s(ranks, overlap):
        implementation = Implementation(tensor_parallel=TensorParallelOptions(async_tp=overlap))
        parallel = dataclasses.replace(
            ONE, tensor=ranks, sequence_parallel=True, micro_batch=16, implementation=implementation
        )
        return step_time(wide, parallel, H100).tensor_s

    taken = taken_share(H100.device)
    assert tensor_s(2, True) / tensor_s(2, False) == pytest.approx(1 / 4 + 3 / 4 * taken, rel=0.05)
    assert tensor_s(8, True) / tensor_s(8, False) == pytest.approx(1 / 16 + 15 / 16 * taken, rel=0.05)


def test_sends_between_stages_overlap_only_where_chunks_interleave():
    def step(**changes):
        return step_time(SMALL, dataclasses.replace(ONE, pipeline=4, micro_batches=8, **changes), H100)

    plain, apart = step(), step(implementation=Implementation(data_parallel=DataParallelOptions(overlaps=False)))
    interleaved = step(schedule="interleaved", virtual_stages=2)
    assert plain.pipeline_send_s == apart.pipeline_send_s > 0
    assert interleaved.pipeline_send_s == 0 < interleaved.slowdown_s


def test_attention_that_selective_checkpointing_does_not_save_is_recomputed():
    saved, recomputed = (
        seconds(
            micro_batch=8,
            checkpointing="selective",
            implementation=Implementation(saving=SavingOptions(selective_attention=keeps)),
        )
        for keeps in (True, False)
    )
    assert recomputed > saved


def test_biases_of_experts_cost_where_their_kernels_are_not_fused():
    biased = dataclasses.replace(SPARSE, experts=dataclasses.replace(SPARSE.experts, bias=True))
    apart = Implementation(
        experts=ExpertOptions(bias_kernels=True), kernels=KernelOptions(host_ops_per_layer=0, expert_host_ops=0)
    )
    assert seconds(biased, implementation=apart) > seconds(SPARSE, implementation=apart)


def test_the_share_of_experts_counts_where_a_rank_has_one_of_them():
    alone = dataclasses.replace(SMALL, experts=Experts(count=8, top_k=2, ffn=1024))
    parallel = dataclasses.replace(ONE, shard=16, zero=3, expert=8, micro_batch=8)
    slow, fast = (
        step_time(alone, parallel, H100, dataclasses.replace(shipped_constants(), expert_share=share))
        for share in (0.5, 1.0)
    )
    assert slow.compute_s > fast.compute_s


def test_reducing_only_with_the_last_micro_batch_costs_between_none_and_all():
    def data_s(micro_batches, **options):
        implementation = Implementation(data_parallel=DataParallelOptions(overlaps=False, **options))
        parallel = dataclasses.replace(ONE, shard=16, zero=3, micro_batches=micro_batches)
        return step_time(SMALL, dataclasses.replace(parallel, implementation=implementation), H100).data_s

    assert data_s(1, defers_reduction=True) == pytest.approx(data_s(1))
    assert data_s(1) < data_s(4, defers_reduction=True) < data_s(4)


def test_an_all_gather_in_8_bits_is_shorter():
    tensor = {"tensor": 8, "replicate": 2, "sequence_parallel": True, "dtype": "fp8"}

    def tensor_s(**implementation):
        parallel = dataclasses.replace(ONE, **tensor, implementation=Implementation(**implementation))
        return step_time(SMALL, parallel, H100).tensor_s

    assert tensor_s(low_precision=LowPrecisionOptions(casts_before_gather=True)) < tensor_s()
    sharded = {"shard": 16, "zero": 3, "dtype": "fp8"}
    slow = Implementation(data_parallel=DataParallelOptions(overlaps=False))
    fast = dataclasses.replace(slow, low_precision=LowPrecisionOptions(casts_shards=True))
    assert seconds(**sharded, implementation=fast) < seconds(**sharded, implementation=slow)


def test_attention_without_a_compiler_takes_longer_than_fused():
    assert seconds(implementation=Implementation(kernels=KernelOptions(attention="dense"))) > seconds(
        implementation=Implementation(kernels=KernelOptions(attention="unfused"))
    )


def test_saving_more_gemms_recomputes_fewer():
    def step_s(name):
        return seconds(
            checkpointing="selective",
            implementation=Implementation(
                saving=SavingOptions(selective_gemms=name), kernels=KernelOptions(host_ops_per_layer=0)
            ),
        )

    assert step_s("none") > step_s("alternate") > step_s("all")
