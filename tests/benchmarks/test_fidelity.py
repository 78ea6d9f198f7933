"""The jobs that `fidelity.py` draws, and what it says of their plans."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import fidelity
import pytest

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.plan.checks import check_mesh


def test_drawn_jobs_are_the_same_each_time_and_of_every_kind() -> None:
    jobs = [fidelity.draw(0, number) for number in range(200)]
    assert jobs == [fidelity.draw(0, number) for number in range(200)]
    assert jobs != [fidelity.draw(1, number) for number in range(200)]
    assert {job.model for job in jobs} == {preset.name for preset in fidelity.PRESETS}
    assert {job.phase for job in jobs} == {"training", "prefill", "decode"}
    axes = Counter(job.mesh if job.mesh is None else job.mesh.count(",") + 1 for job in jobs)
    assert set(axes) == {None, 1, 2, 3}
    longest = {preset.name: preset.longest for preset in fidelity.PRESETS}
    for job in jobs:
        if job.mesh is not None:
            check_mesh(MeshSpec.parse(job.mesh), ClusterSpec.parse(job.cluster))
        assert job.seq is None or job.seq <= (longest[job.model] or 0)


def row(number: int, outcome: str, *, verifying_s: float = 0.0) -> fidelity.Row:
    return fidelity.Row(
        number=number, job=fidelity.draw(0, number), mesh="dp=2", outcome=outcome, verifying_s=verifying_s
    )


def test_rows_come_back_and_are_counted_by_outcome(tmp_path: Path) -> None:
    rows = [row(0, "as-planned", verifying_s=1.0), row(1, "as-planned", verifying_s=3.0), row(2, "does-not-fit")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in rows))
    assert list(fidelity.read(file)) == rows
    assert not list(fidelity.read(tmp_path / "absent.jsonl"))
    figures = fidelity.summary(rows)
    assert (figures["jobs"], figures["as-planned"], figures["does-not-fit"]) == (3, 2, 1)
    assert figures["longest_verifying_s"] == 3.0
    assert len(fidelity.table(rows).splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(("outcome", "code"), [("as-planned", 0), ("does-not-run", 1), ("crashed", 1)])
def test_a_plan_that_does_not_run_fails_the_benchmark_and_done_jobs_are_skipped(
    outcome: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers: list[int] = []

    def run(number: int, job: fidelity.DrawnJob) -> fidelity.Row:
        numbers.append(number)
        return row(number, outcome)

    monkeypatch.setattr(fidelity, "run", run)
    monkeypatch.setattr("sys.argv", ["fidelity.py", "--jobs", "2", "--output", str(tmp_path / "rows.jsonl"), "--json"])
    assert fidelity.main() == code
    assert fidelity.main() == code
    assert numbers == [0, 1]
    assert outcome in capsys.readouterr().out
