"""Processes that read requests: small ones never wait for large ones, owners take turns, and nothing ends the pool."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import HTTPException, Request
from support import fakes_for_work

from api.http.problems import ProblemError
from api.http.work import pool
from api.http.work.pool import LARGE, SMALL, SMALL_BYTES, WorkPool
from api.jobs.solver_process import SolverProcess

Run = Callable[..., Awaitable[Any]]


class Client:
    """A request whose client may have gone."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone

    async def is_disconnected(self) -> bool:
        return self.gone


def with_pool(scenario: Callable[[Run], Awaitable[None]], **limits: Any) -> None:
    """Run a scenario with a function that has a pool's processes work: name, value, owner, whether it is large."""

    async def main() -> None:
        small, large = (dataclasses.replace(each, **limits) for each in (SMALL, LARGE))
        made = WorkPool(fakes_for_work.answer, small=small, large=large)
        made.start()

        async def run(name: str, value: Any = None, *, owner: str = "a", large: bool = True, gone: bool = False) -> Any:
            request = cast(Request, Client(gone=gone))
            return await made.run(request, owner, name, SMALL_BYTES + 1 if large else SMALL_BYTES, value=value)

        try:
            await scenario(run)
        finally:
            made.stop()

    asyncio.run(main())


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """A pipe that blocks its reader until something is written to it."""
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


async def open_gate(gate: str) -> None:
    await asyncio.to_thread(Path(gate).write_text, "go")


def test_a_small_request_does_not_wait_for_large_ones(gate: str) -> None:
    async def scenario(run: Run) -> None:
        large = [asyncio.ensure_future(run("block", gate)), asyncio.ensure_future(run("echo", "large"))]
        assert (await run("echo", "small", large=False))["value"] == "small"
        assert not any(each.done() for each in large)
        await open_gate(gate)
        assert [answer["value"] for answer in await asyncio.gather(*large)] == [gate, "large"]

    with_pool(scenario)


def test_owners_take_turns(gate: str) -> None:
    async def scenario(run: Run) -> None:
        blocked = asyncio.ensure_future(run("block", gate))
        order: list[str] = []

        async def noted(owner: str) -> None:
            await run("echo", owner=owner)
            order.append(owner)

        waiting = [asyncio.ensure_future(noted(owner)) for owner in "aaabbc"]
        await asyncio.sleep(0)
        await open_gate(gate)
        await asyncio.gather(blocked, *waiting)
        assert order == list("abcaba")

    with_pool(scenario)


def test_too_many_are_refused_those_of_one_owner_first(gate: str) -> None:
    async def scenario(run: Run) -> None:
        blocked = asyncio.ensure_future(run("block", gate))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(run("echo", owner=owner)) for owner in "aab"]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as refused:
            await run("echo", owner="a")
        assert refused.value.status_code == 503
        waiting.append(asyncio.ensure_future(run("echo", owner="b")))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException):
            await run("echo", owner="c")
        await open_gate(gate)
        await asyncio.gather(blocked, *waiting)
        assert (await run("echo", 1))["value"] == 1

    with_pool(scenario, waiting=4, waiting_of_owner=2)


def test_what_a_client_that_has_gone_asked_for_is_dropped(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(HTTPException):
            await run("note", str(tmp_path / "notes"), gone=True)
        await run("note", str(tmp_path / "notes"))
        assert (tmp_path / "notes").read_text() == "noted\n"

    with_pool(scenario)


def test_a_waiting_request_that_is_cancelled_leaves_the_turn_to_the_next(gate: str) -> None:
    async def scenario(run: Run) -> None:
        blocked = asyncio.ensure_future(run("block", gate))
        left, next_one = (asyncio.ensure_future(run("echo", number)) for number in (1, 2))
        await asyncio.sleep(0)
        left.cancel()
        await open_gate(gate)
        assert (await next_one)["value"] == 2
        await blocked

    with_pool(scenario)


def test_what_it_refuses_is_a_problem_and_a_process_that_dies_is_replaced() -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(ProblemError) as refused:
            await run("refuse", "because")
        assert refused.value.problem["detail"] == "because"
        first = await run("echo")
        with pytest.raises(ProblemError) as died:
            await run("die")
        assert died.value.problem["status"] == 503
        assert (await run("echo"))["pid"] != first["pid"]

    with_pool(scenario)


def test_what_takes_too_long_is_ended_and_refused() -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(ProblemError) as refused:
            await run("sleep", 60)
        assert refused.value.problem["status"] == 422
        assert (await run("echo", 1))["value"] == 1

    with_pool(scenario, time_s=1.0)


def test_a_process_that_has_grown_is_replaced() -> None:
    async def scenario(run: Run) -> None:
        first = await run("echo")
        assert (await run("grow"))["pid"] == first["pid"]
        assert (await run("echo"))["pid"] != first["pid"]

    with_pool(scenario)


def test_the_server_itself_imports_nothing_heavy() -> None:
    script = "import sys, api.http.serve; print(*{'torch', 'networkx', 'pulp', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_a_process_that_cannot_start_at_first_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start, tries = SolverProcess.start, []

    def fails_first(process: SolverProcess) -> None:
        tries.append(process)
        if len(tries) <= 2:
            raise OSError("no memory")
        start(process)

    monkeypatch.setattr(SolverProcess, "start", fails_first)
    monkeypatch.setattr(pool, "_PAUSE_S", 0.01)
    made = pool.WorkPool(fakes_for_work.answer)
    made.start()
    for _ in range(600):
        if made.is_ready:
            break
        time.sleep(0.05)
    made.stop()
    assert made.is_ready
