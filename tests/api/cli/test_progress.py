"""Progress where standard error is no terminal: a line every so often, and none for what is quick."""

from __future__ import annotations

import threading

import pytest

from api.cli.terminal import ProgressLines, watched
from planner.progress import TRACING, RunRelaxing, SearchState, SweepProgress

RELAXING = RunRelaxing(
    mesh="dp=4,tp=2", micro_batches=8, ac="none", state=SearchState(step_time_s=7.3444, bound_s=7.1, tasks_done=3)
)


def test_a_line_has_elapsed_time_incumbent_bound_and_gap() -> None:
    times = iter([100.0, 110.0, 120.4])
    lines = ProgressLines(clock=lambda: next(times))
    lines.take(TRACING)
    assert lines.line() == "(10 s; tracing)"
    lines.take(RELAXING)
    action = "relaxing mesh dp=4,tp=2, 8 micro-batches, checkpointing none"
    assert lines.line() == f"(20 s; {action}; best 7.34 s; none below 7.1 s; gap 3.3%)"


def test_a_sweep_says_which_point_it_is_at() -> None:
    lines = ProgressLines(clock=lambda: 0.0)
    lines.take(SweepProgress(subject="1x4xtoy", event=RELAXING))
    assert "1x4xtoy: relaxing mesh" in lines.line()
    assert "best 7.34 s" in lines.line()


def test_lines_come_while_planning_runs_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    came = threading.Event()

    def echo(text: str, *, err: bool) -> None:
        assert err
        printed.append(text)
        came.set()

    monkeypatch.setattr("api.cli.terminal.typer.echo", echo)
    with watched(every_s=0.001) as progress:
        progress(RELAXING)
        came.clear()
        assert came.wait(timeout=30)
    assert "relaxing mesh dp=4,tp=2" in printed[-1]
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_nothing_is_printed_of_what_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with watched() as progress:
        progress(RELAXING)
    assert capsys.readouterr().err == ""
