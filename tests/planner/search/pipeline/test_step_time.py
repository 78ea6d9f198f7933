"""How blocks are spread over stages, and the seconds of 1F1B."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.interleaved_schedule import simulated_s

from cost_model import ClusterSpec
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import idle_passes, idle_share
from planner.plan.estimate import Estimate
from planner.search.pipeline.interleaving import chunk_sizes, interleaved, role_of
from planner.search.pipeline.partition import balanced
from planner.search.pipeline.stage_planners import stage_clusters
from planner.search.pipeline.step_time import kinds_of, least_step_s, pipeline_step_s, stage_cutoff_s

EQUAL = Estimate(
    step_time_s=7.5, forward_s=3.0, backward_s=4.0, grad_reduce_s=0.0, optimizer_s=0.5, peak_memory_bytes=1
)


@given(
    blocks=st.integers(2, 9),
    stages=st.integers(2, 5),
    first=st.floats(0, 4, allow_nan=False),
    last=st.floats(0, 4, allow_nan=False),
)
def test_no_other_split_has_a_faster_slowest_stage(blocks: int, stages: int, first: float, last: float) -> None:
    stages = min(stages, blocks)

    def slowest(counts: tuple[int, ...]) -> float:
        return max(counts[0] + first, counts[-1] + last, *counts)

    every = (c for c in itertools.product(range(1, blocks + 1), repeat=stages) if sum(c) == blocks)
    found = balanced(blocks, stages, first, last)
    assert sum(found) == blocks
    assert slowest(found) == pytest.approx(min(map(slowest, every)))


def test_ends_with_much_of_their_own_get_fewer_blocks() -> None:
    assert balanced(126, 16) == (7, *[8] * 14, 7)
    assert balanced(12, 4, 2.0, 1.0) == (1, 4, 4, 3)


def test_a_step_of_equal_stages_is_what_one_of_equals_takes() -> None:
    # 4 micro-batches, 4 stages: 7 passes of 1 s and the optimizer.
    assert pipeline_step_s([EQUAL] * 4, 4) == pytest.approx(7.5)


def test_a_step_waits_for_the_slowest_stage() -> None:
    slow = dataclasses.replace(EQUAL, step_time_s=14.5)  # 2 s a pass
    assert pipeline_step_s([EQUAL, slow, EQUAL, EQUAL], 4) == pytest.approx(3 * 2 + 5 + 0.5)
    slow_once = dataclasses.replace(EQUAL, step_time_s=9.0, optimizer_s=2.0)
    assert pipeline_step_s([EQUAL, slow_once, EQUAL, EQUAL], 4) == pytest.approx(7 + 2.0)


STAGES = st.lists(st.tuples(st.floats(1, 9), st.floats(0, 1)), min_size=2, max_size=6)


@given(STAGES, st.integers(1, 16), st.integers(1, 8))
def test_no_step_is_below_its_bound(stages: list[tuple[float, float]], micro_batches: int, chunks: int) -> None:
    estimates = [dataclasses.replace(EQUAL, step_time_s=u, optimizer_s=once) for u, once in stages]
    bound_s = least_step_s([u for u, _ in stages], micro_batches, chunks)
    assert pipeline_step_s(estimates, micro_batches, chunks) >= bound_s * (1 - 1e-12)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_stage_at_its_limit_brings_the_step_to_the_limit(chunks: int) -> None:
    bounds, (kind, *_) = [3.0, 1.0, 1.0, 2.0], kinds_of((1, 2, 2, 1), chunks)
    assert kind.indices == (1, 2)
    limit_s = stage_cutoff_s(bounds, kind, 8, 5.0)
    assert least_step_s([3.0, limit_s, limit_s, 2.0], 8, chunks) == pytest.approx(5.0)


@given(st.integers(2, 16), st.integers(1, 16), st.integers(2, 8))
def test_equal_stages_idle_as_the_cost_model_says(ranks: int, rounds: int, chunks: int) -> None:
    parallel = ParallelSpec(
        micro_batch=1,
        micro_batches=rounds * ranks,
        seq=1,
        pipeline=ranks,
        schedule="interleaved",
        virtual_stages=chunks,
    )
    passes = parallel.micro_batches + idle_share(parallel)
    stage = dataclasses.replace(EQUAL, step_time_s=2.0 * passes + 0.5)  # 2 s for each micro-batch
    step_s = pipeline_step_s([stage] * ranks, parallel.micro_batches, chunks)
    assert step_s == pytest.approx(2.0 * parallel.micro_batches + 2.0 * idle_share(parallel) + 0.5)


@given(STAGES, st.integers(1, 16), st.integers(2, 8))
def test_interleaving_is_never_slower_where_chunks_cost_nothing(
    stages: list[tuple[float, float]], micro_batches: int, chunks: int
) -> None:
    """The same seconds for each micro-batch, and the same optimizers."""

    def step_s(chunks: int) -> float:
        passes = micro_batches + (len(stages) - 1) / chunks
        of_equals = [dataclasses.replace(EQUAL, step_time_s=t * passes + o, optimizer_s=o) for t, o in stages]
        return pipeline_step_s(of_equals, micro_batches, chunks)

    assert step_s(chunks) <= step_s(1) * (1 + 1e-12)


def test_a_stage_has_whole_nodes_or_a_part_of_one() -> None:
    found = dict(stage_clusters(ClusterSpec.parse("4x4xtoy"), 64))
    assert {stages: (c.nodes, c.devices_per_node) for stages, c in found.items()} == {
        2: (2, 4),
        4: (1, 4),
        8: (1, 2),
        16: (1, 1),
    }


@given(
    ranks=st.integers(2, 6),
    blocks=st.integers(2, 24),
    rounds=st.integers(1, 6),
    first=st.sampled_from([0.02, 0.1]),
    last=st.sampled_from([0.02, 0.3, 0.66, 1.0, 2.0]),
)
@example(ranks=8, blocks=126, rounds=8, first=0.02, last=0.66)
@example(ranks=3, blocks=4, rounds=1, first=0.02, last=0.66)
def test_an_interleaved_step_takes_no_longer_than_is_said(
    ranks: int, blocks: int, rounds: int, first: float, last: float
) -> None:
    """Megatron's own order of passes, with chunks of an embedding or a head alone where there are such.

    Of all 4,680 cases drawn from, four take less than 0.85 of it: four blocks on three ranks, in one round. The least
    is the second example, 0.820.
    """
    found = interleaved(blocks, ranks, first, last) if blocks >= ranks else None
    if found is None:
        return
    counts, chunks = found
    seconds = [
        [float(size) for size in chunk_sizes(role_of(rank, ranks), count, chunks)] for rank, count in enumerate(counts)
    ]
    seconds[0][0] += first
    seconds[-1][-1] += last
    micro_batches = rounds * ranks
    passes = micro_batches + idle_passes(ranks, chunks)
    said = least_step_s([3 * sum(of_rank) * passes for of_rank in seconds], micro_batches, chunks)
    least = 0.9 if rounds > 1 else 0.82
    assert least * said < simulated_s(seconds, micro_batches) < (1.01 if rounds >= 4 else 1.03) * said
