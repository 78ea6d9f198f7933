"""The first rank's answer for all: ranks are threads that share a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from cost_model.hardware.reading import ClusterError
from executor.launch import exchange
from executor.launch.exchange import PlanExchange
from executor.launch.program import Program, join_program
from planner.errors import JobError, PlanError, PlannerError


def on_ranks(ranks: tuple[int, ...], call: Callable[[PlanExchange, int], Any]) -> list[Any]:
    """Return the result of ``call(exchange, rank)`` of each rank, or what it raised."""
    store = dist.HashStore()

    def on_rank(rank: int) -> Any:
        try:
            return call(PlanExchange(Program(rank=rank, ranks=ranks, store=store)), rank)
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(on_rank, ranks))


def test_the_first_rank_gets_all_values_and_all_ranks_its_answer() -> None:
    def call(own: PlanExchange, rank: int) -> tuple[list[bytes], bytes]:
        time.sleep(0.02 * rank)
        values = own.gather(str(rank).encode())
        return values, own.from_first(lambda: b"from %d" % rank)

    assert on_ranks((1, 3, 5), call) == [([b"1", b"3", b"5"], b"from 1"), ([], b"from 1"), ([], b"from 1")]


def test_rounds_do_not_mix() -> None:
    store = dist.HashStore()
    programs = [Program(rank=rank, ranks=(0, 1), store=store) for rank in (0, 1)]
    for answer in (b"first", b"second"):
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(lambda program, what=answer: PlanExchange(program).from_first(lambda: what), programs)
            assert list(answers) == [answer, answer]


@pytest.mark.parametrize(
    "error",
    [
        JobError("no batch is given.", what_to_do="Give it.", field="batch"),
        ClusterError("unknown device 'x'"),
        KeyError("weight"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_first_rank_is_raised_on_all(error: Exception) -> None:
    def work() -> bytes:
        raise error

    first, *others = on_ranks((0, 1, 2), lambda own, rank: own.from_first(work))
    assert first is error
    for other in others:
        if isinstance(error, PlannerError | ClusterError):
            assert type(other) is type(error)
            assert str(other) == str(error)
            assert vars(other) == vars(error)
        else:
            assert isinstance(other, PlanError)
            assert "Rank 0 failed while it planned: KeyError: 'weight'" in str(other)


def test_a_long_answer_is_waited_for_as_long_as_the_first_rank_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BEAT_S", 0.05)
    monkeypatch.setattr(exchange, "SILENCE_S", 0.4)
    monkeypatch.setattr(exchange, "LOOKS_S", (0.01, 0.05))
    finish = threading.Event()
    threading.Timer(1.5, finish.set).start()

    def work() -> bytes:
        finish.wait()
        return b"late"

    assert on_ranks((0, 1), lambda own, rank: own.from_first(work)) == [b"late", b"late"]


def test_a_first_rank_that_died_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SILENCE_S", 0.2)
    monkeypatch.setattr(exchange, "LOOKS_S", (0.01, 0.05))
    store = dist.HashStore()
    with pytest.raises(PlanError, match="Rank 4, which plans for all, has given no sign of life"):
        PlanExchange(Program(rank=7, ranks=(4, 7), store=store)).from_first(lambda: b"")


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "GATHER_S", 0.1)
    with pytest.raises(PlanError, match="Of 3 ranks, 1, 2 did not call this"):
        PlanExchange(Program(rank=0, ranks=(0, 1, 2), store=dist.HashStore())).gather(b"")


def test_a_process_of_its_own_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    program = join_program()
    assert (program.rank, program.ranks, program.is_first) == (0, (0,), True)
