"""The benchmark of the planner itself: what it asks for, one row measured, and what is written and drawn of it."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cost_model import ClusterSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import autoparallel
import search

TINY = search.Row(
    name="devices-2", group="devices", preset="gpt2", devices=2, batch=4, seq=64, layers=2, mesh="dp=2",
    micro_batches=1, ac="none",
)  # fmt: skip


def test_every_row_has_a_name_and_a_cluster_of_its_own_size() -> None:
    rows = list(search.rows())
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
    assert search.chosen(search.parse_arguments([])) == list(search.rows())


def test_a_row_is_measured_written_and_drawn(tmp_path: Path) -> None:
    found = search.measure(TINY)
    assert found.answer.startswith("dp=2; 1 micro-batches; none; ")
    assert set(found.stages) == set(search.STAGES)
    assert sum(found.stages.values()) <= found.seconds
    assert found.imports_mb <= found.peak_mb
    assert search.outcome_of(json.loads(json.dumps(dataclasses.asdict(found)))) == found
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


def test_what_does_not_fit_is_an_answer() -> None:
    found = search.measure(dataclasses.replace(TINY, preset="llama-3.1-405b", devices=1, batch=1, mesh="dp=1"))
    assert found.answer.startswith("does not fit: least ")
    assert not found.stages


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        autoparallel.parse_arguments(["--checkout", str(tmp_path)])
    assert "is no checkout of autoparallel" in capsys.readouterr().err
