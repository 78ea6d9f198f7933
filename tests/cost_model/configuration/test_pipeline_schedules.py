import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.interleaved_schedule import most_held

from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import held_micro_batches, idle_share, micro_batches_in_flight

FOUR = ParallelSpec(micro_batch=1, micro_batches=8, seq=8, pipeline=4)


def of(**changes):
    return dataclasses.replace(FOUR, **changes)


def test_idle_time_of_each_schedule():
    assert idle_share(FOUR) == 3
    assert idle_share(of(schedule="gpipe")) == 3
    assert idle_share(of(schedule="interleaved", virtual_stages=3)) == 1
    assert idle_share(of(schedule="zero-bubble")) == pytest.approx(1)
    assert idle_share(of(pipeline=1)) == 0


def test_micro_batches_in_flight_of_each_schedule():
    assert [micro_batches_in_flight(FOUR, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert micro_batches_in_flight(of(micro_batches=2)) == 2
    assert micro_batches_in_flight(of(schedule="gpipe")) == 8
    assert micro_batches_in_flight(of(schedule="interleaved", virtual_stages=2)) == 5.5
    assert micro_batches_in_flight(of(pipeline=1)) == 1


@given(ranks=st.integers(2, 32), chunks=st.integers(1, 8))
def test_interleaving_never_idles_longer(ranks, chunks):
    plain = of(pipeline=ranks)
    assert idle_share(of(pipeline=ranks, schedule="interleaved", virtual_stages=chunks)) <= idle_share(plain)


def test_a_rank_outside_the_pipeline_is_rejected():
    with pytest.raises(ValueError, match="pipeline has 4"):
        micro_batches_in_flight(FOUR, 4)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (3, 2), (4, 4), (8, 16)])
def test_interleaved_ranks_hold_what_the_schedule_says(ranks, chunks):
    count = 4 * ranks
    for rank in range(ranks):
        held = held_micro_batches(ranks, chunks, count, rank)
        assert most_held(rank, ranks, chunks, count) == pytest.approx(held * chunks)
    for rank, empty in ((0, 0), (ranks - 1, chunks - 1)):
        held = held_micro_batches(ranks, chunks, count, rank, end_alone=True)
        assert most_held(rank, ranks, chunks, count, empty=empty) == pytest.approx(held * (chunks - 1))
