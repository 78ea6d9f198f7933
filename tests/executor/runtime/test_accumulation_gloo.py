"""Steps of any number of backward passes, clearing and reading amid a step: all as the unsharded run, on four ranks."""

from __future__ import annotations

import functools
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
from support.own_loops import Loop, Step, differences

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
ORDINARY_CASES = {"until backward", "for the step, reduced on tp afterwards"}


def loops_of(cases: set[str]) -> dict[tuple[str, str], Loop]:
    return {(case, steps): Loop(case=case, steps=STEPS[steps]) for case in sorted(cases) for steps in STEPS}


ORDINARY, VARIANTS = loops_of(ORDINARY_CASES), loops_of(CASES.keys() - ORDINARY_CASES)


def run(rank: int, loops: list[Loop]) -> list[list[str]]:
    return [differences(loop, lambda name: CASES[name]()) for loop in loops]


@functools.cache
def results(*, is_slow: bool) -> dict[tuple[str, str], list[str]]:
    loops = VARIANTS if is_slow else ORDINARY
    by_rank = run_on_gloo(run, 4, list(loops.values()))
    assert all(found == by_rank[0] for found in by_rank)
    return dict(zip(loops, by_rank[0], strict=True))


@pytest.mark.parametrize(("case", "steps"), ORDINARY)
def test_a_loop_ends_as_the_unsharded_one(case: str, steps: str) -> None:
    assert results(is_slow=False)[case, steps] == []


@pytest.mark.slow
@pytest.mark.parametrize(("case", "steps"), VARIANTS)
def test_a_loop_under_another_plan_ends_as_the_unsharded_one(case: str, steps: str) -> None:
    assert results(is_slow=True)[case, steps] == []
