"""Steps of any number of backward passes, clearing and reading amid a step: all as the unsharded run, on four ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.executor_cases import (
    LLAMA_BLOCKS,
    Case,
    data_parallel,
    fully_sharded,
    megatron,
    replicated_on_tp,
    reshard_after_backward,
    reshard_after_step,
    with_fsdp_groups,
)
from support.fsdp_cases import CASES as FSDP_CASES
from support.fsdp_cases import MLP
from support.gloo import run_on_gloo
from support.training_loops import Loop, Step, run_loops

CASES: dict[str, Callable[[], Case]] = {
    "data-parallel": lambda: data_parallel("mlp", micro_batches=3),
    "sharded, no groups": lambda: fully_sharded("mlp", micro_batches=3),
    "FSDP": lambda: with_fsdp_groups(replicated_on_tp("mlp", micro_batches=3), MLP),
    "until backward": lambda: reshard_after_backward(with_fsdp_groups(replicated_on_tp("mlp", micro_batches=3), MLP)),
    "for the step": lambda: reshard_after_step(with_fsdp_groups(replicated_on_tp("mlp", micro_batches=3), MLP)),
    "for the step, one pass planned": lambda: reshard_after_step(with_fsdp_groups(replicated_on_tp("mlp"), MLP)),
    "all for the step": FSDP_CASES["mlp, all for the step"],
    "for the step, reduced on tp afterwards": FSDP_CASES["mlp, for the step, reduced on tp afterwards"],
    "megatron, for the step": lambda: reshard_after_step(with_fsdp_groups(megatron(micro_batches=3), LLAMA_BLOCKS)),
}

STEPS: dict[str, tuple[Step, ...]] = {
    "fewer passes than planned": (Step(passes=2), Step(passes=1), Step(passes=3)),
    "more passes than planned": (Step(passes=5), Step(passes=4), Step(passes=7)),
    "announced": (Step(passes=2, announced=2), Step(passes=5, announced=5), Step(passes=3, announced=4)),
    "clipped": (Step(passes=2, clip=0.1), Step(passes=4, clip=0.1)),
    "read amid the step": (Step(passes=3, reads=True), Step(passes=2, reads=True), Step(passes=5, reads=True)),
    "evaluated amid the step": (Step(passes=3, evaluates=True), Step(passes=4, evaluates=True)),
    "model cleared amid the step": (Step(passes=3, clears="model"), Step(passes=5, clears="model")),
    "optimizer cleared amid the step": (Step(passes=2, clears="optimizer"), Step(passes=4, clears="optimizer")),
    "set to zeros amid the step": (Step(passes=3, clears="zeros"), Step(passes=2, clears="zeros")),
    "cleared between forward and backward": (Step(), Step(clears_late=True), Step(passes=2, clears_late=True)),
    "frozen amid training": (Step(passes=2), Step(frozen=1), Step(passes=3, frozen=1), Step(frozen=0), Step()),
}
LOOPS = {(case, steps): Loop(case=case, steps=STEPS[steps]) for case in CASES for steps in STEPS}


def run(rank: int) -> list[list[str]]:
    return run_loops(rank, list(LOOPS.values()), CASES)


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, str], list[str]]:
    by_rank = run_on_gloo(run, 4)
    assert all(found == by_rank[0] for found in by_rank)
    return dict(zip(LOOPS, by_rank[0], strict=True))


@pytest.mark.parametrize(("case", "steps"), LOOPS)
def test_a_loop_ends_as_the_unsharded_one(results: dict[tuple[str, str], list[str]], case: str, steps: str) -> None:
    assert results[case, steps] == []
