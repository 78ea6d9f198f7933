"""Tensor parallelism of one layer: communication overlapped with GEMMs, and exposed where GEMMs are short."""

import dataclasses

import pytest

from cost_model.configuration.implementation import Implementation, TensorParallelOptions
from cost_model.configuration.layer_work import layer_work
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import group_time_s
from cost_model.configuration.tensor_parallel import tensor_seconds
from cost_model.configuration.transformer import Experts, TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.in_step import taken_share
from cost_model.kernels.step_constants import shipped_constants

WIDE = TransformerSpec(layers=2, hidden=16384, heads=128, kv_heads=128, head_dim=128, ffn=65536, vocab=256)
NARROW = TransformerSpec(layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=1024, vocab=256)
SPARSE = dataclasses.replace(NARROW, experts=Experts(count=8, top_k=2, ffn=1024))
CLUSTER = ClusterSpec.parse("1x8xh100-sxm-80gb")
PARALLEL = ParallelSpec(micro_batch=4, seq=4096, tensor=8, sequence_parallel=True)


def with_options(parallel=PARALLEL, *, lora=False, **options):
    implementation = Implementation(tensor_parallel=TensorParallelOptions(**options), lora=lora)
    return dataclasses.replace(parallel, implementation=implementation)


OVERLAPPED = with_options(async_tp=True)


def exposed(spec, parallel):
    work = layer_work(spec, parallel, sparse=spec.experts is not None)
    return tensor_seconds(spec, parallel, CLUSTER, shipped_constants(), work)


def moved_s(kind, spec):
    nbytes = 2.0 * PARALLEL.tokens * spec.hidden
    return group_time_s(kind, nbytes, size=8, stride=1, cluster=CLUSTER)


def reduced_s(spec):
    return moved_s("reduce_scatter", spec)


def test_an_axis_of_one_costs_nothing():
    assert exposed(WIDE, dataclasses.replace(OVERLAPPED, tensor=1, sequence_parallel=False)) == (0.0, 0.0)


def test_long_gemms_overlap_with_all_but_the_last_piece_of_a_reduction_and_are_slowed_down():
    forward, backward = exposed(WIDE, OVERLAPPED)
    overlapped_s = moved_s("all_gather", WIDE) + reduced_s(WIDE) * 7 / 8
    added_s = reduced_s(WIDE) / 8 + taken_share(CLUSTER.device) * overlapped_s
    assert forward == pytest.approx(backward) == pytest.approx(2 * added_s)


def test_short_gemms_leave_the_rest_exposed():
    forward, backward = exposed(NARROW, OVERLAPPED)
    assert 2 * reduced_s(NARROW) / 8 < backward < forward < exposed(NARROW, PARALLEL)[0]


@pytest.mark.parametrize(("spec", "overlapped"), [(WIDE, True), (NARROW, False)])
def test_an_input_that_is_not_saved_is_all_gathered_again_overlapped_with_its_gradients_gemms(spec, overlapped):
    forward, backward = exposed(spec, with_options(async_tp=True, saves_gathered_inputs=False))
    saved_forward, saved_backward = exposed(spec, OVERLAPPED)
    gather_s = moved_s("all_gather", spec)
    assert forward == saved_forward
    slowed_s = 2 * taken_share(CLUSTER.device) * gather_s
    assert (backward - saved_backward == pytest.approx(slowed_s)) is overlapped
    assert backward - saved_backward >= slowed_s * (1 - 1e-9)
    # No all-gather is repeated without sequence parallelism, or where weights have no gradient.
    whole = dataclasses.replace(PARALLEL, sequence_parallel=False)
    for parallel, lora in ((whole, False), (PARALLEL, True)):
        freed, saved = (
            with_options(parallel, lora=lora, async_tp=True, saves_gathered_inputs=saves) for saves in (False, True)
        )
        assert exposed(spec, freed) == exposed(spec, saved)
    # The repeated all-gather is asynchronous without async tensor parallelism, too.
    alone = with_options(saves_gathered_inputs=False)
    assert exposed(spec, alone)[1] - exposed(spec, PARALLEL)[1] < 2 * gather_s


def test_without_overlap_everything_is_exposed_both_ways():
    forward, backward = exposed(WIDE, PARALLEL)
    assert forward == backward > 2 * reduced_s(WIDE)


def test_tokens_of_a_router_stay_split_over_the_sequence():
    assert exposed(SPARSE, OVERLAPPED)[0] == pytest.approx(exposed(NARROW, OVERLAPPED)[0] / 2, rel=0.3)
