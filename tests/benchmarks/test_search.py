"""The benchmark of the planner itself: what it asks for, one row measured, and what is written and drawn of it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import autoparallel
import pytest
import search
import search_cases
from rich.console import Console

from cost_model import ClusterSpec

TINY = search_cases.Row(
    name="devices-2", group="devices", preset="gpt2", devices=2, batch=4, seq=64, layers=2, mesh="dp=2",
    micro_batches=1, ac="none",
)  # fmt: skip


def test_every_row_has_a_name_and_a_cluster_of_its_own_size() -> None:
    rows = list(search_cases.rows())
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert ClusterSpec.parse(row.cluster).size == row.devices, row.name
        assert row.batch % (row.micro_batches or 1) == 0
    layers = [row.layers for row in rows if row.group == "layers"]
    assert layers == [2, 8, 32, 80, 126]
    assert [row.devices for row in rows if row.group == "devices"] == [1, 8, 64, 512, 4096, 16384]


def test_rows_are_chosen_by_name_and_by_group() -> None:
    arguments = search.parse_arguments(["--row", "check-3", "--group", "axes"])
    assert [row.name for row in search.chosen(arguments)] == ["axes-1", "axes-2", "check-3"]
    assert search.chosen(search.parse_arguments([])) == list(search_cases.rows())


def test_a_row_is_measured_written_and_drawn(tmp_path: Path) -> None:
    found = search.measure(TINY)
    assert found.answer.startswith("dp=2; 1 micro-batches; none; ")
    assert set(found.stages) == set(search_cases.STAGES)
    assert sum(found.stages.values()) <= found.seconds
    assert found.imports_mb <= found.peak_mb
    assert search_cases.outcome_of(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    console = Console(record=True, width=220)
    console.print(search.table_of([found]))
    assert "devices-2" in console.export_text()
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from draw_search import draw

    draw([found], tmp_path / "search.png")
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="nothing to draw"):
        draw([], tmp_path / "none.png")


def outcome(name: str, **changes: Any) -> search_cases.Outcome:
    row = next(row for row in search_cases.rows() if row.name == name)
    nothing = search_cases.Outcome(
        row=row, seconds=1.0, cpu_s=1.0, model_s=0.0, stages={}, peak_mb=0.0, imports_mb=0.0, answer="a plan"
    )
    return dataclasses.replace(nothing, **changes)


def test_rows_run_several_times_in_rounds_and_their_medians_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {
        "layers-2": [(3.0, 0.5), (1.0, 0.7), (2.0, 0.1)],
        "layers-126": [(5.0, 0.9), (4.0, 0.8), (6.0, 1.1)],
    }
    asked: list[str] = []

    def measured(row: search_cases.Row, _: float) -> search_cases.Outcome:
        asked.append(row.name)
        seconds, solve = runs[row.name][asked.count(row.name) - 1]
        return outcome(row.name, seconds=seconds, stages={"solve_s": solve})

    monkeypatch.setattr(search, "measure_apart", measured)
    rows = [row for row in search_cases.rows() if row.name in runs]
    *_, last = search.measure_in_rounds(rows, 1.0, 3)
    assert asked == ["layers-2", "layers-126"] * 3
    assert [(item.seconds, item.stages["solve_s"]) for item in last] == [(2.0, 0.5), (5.0, 0.9)]
    broken = outcome("layers-2", answer="failed with exit code 1", seconds=0.0)
    assert search.median_run([last[0], broken, last[0]]) is broken


def test_what_the_rows_say_together() -> None:
    layers = [outcome("layers-2", stages={"solve_s": 0.5}), outcome("layers-126", stages={"solve_s": 0.6}, seconds=6.0)]
    assert search.checks_of(layers) == [
        "over the target: layers-126",
        "solving 126 layers takes 1.20 times as long as 2",
    ]
    limits = [
        outcome("check-8-none", objective_s=9.0, gap=0.001),
        outcome("check-8-1", answer="no plan: time was up"),
        outcome("check-8-30", objective_s=9.0, gap=0.1),
        outcome("check-8-5", objective_s=10.0, gap=0.2),
    ]
    assert search.checks_of(limits)[1:] == ["more time made a plan worse: no", "a plan without its gap: no"]
    limits[2] = outcome("check-8-30", objective_s=11.0)
    assert search.checks_of(limits)[1:] == ["more time made a plan worse: YES", "a plan without its gap: YES"]
    lines = search.markdown_of(limits).splitlines()
    assert lines[0].startswith("| row | model |")
    assert len({line.count("|") for line in lines[:6]}) == 1
    assert lines[-1] == "- a plan without its gap: YES"


def test_a_limit_in_which_nothing_is_found_is_an_answer() -> None:
    found = search.measure(dataclasses.replace(TINY, mesh=None, time_limit_s=1e-6))
    assert found.answer.startswith("no plan: ")
    assert "larger time limit" in found.answer or "longer search" in found.answer
    assert found.objective_s is None


def test_what_does_not_fit_is_an_answer() -> None:
    found = search.measure(dataclasses.replace(TINY, preset="llama-3.1-405b", devices=1, batch=1, mesh="dp=1"))
    assert found.answer.startswith("does not fit: least ")
    assert not found.stages


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        autoparallel.parse_arguments(["--checkout", str(tmp_path)])
    assert "is no checkout of autoparallel" in capsys.readouterr().err
