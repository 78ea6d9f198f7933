"""Progress: what a search reports, its text and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from support.pipeline_sessions import SLOW, session_of

from planner.progress import (
    TRACING,
    AlternativePricing,
    IncumbentFound,
    MeshBounding,
    Phase,
    Planned,
    ProgressEvent,
    RunRelaxing,
    RunSolving,
    SearchState,
    StageBounding,
    StageRelaxing,
    SweepProgress,
    event_from_dict,
)


def events_of(**options: Any) -> list[ProgressEvent]:
    events = list[ProgressEvent]()
    session_of(progress=events.append, **options).plan()
    return events


def test_a_search_of_pipelines_tells_of_its_stages() -> None:
    events = events_of(cluster=SLOW, micro_batches=4, ac="none", executable_only=False)
    assert events[0] == TRACING
    kinds = {type(event) for event in events}
    assert kinds >= {MeshBounding, RunSolving, StageBounding, StageRelaxing, IncumbentFound}
    (bounded, *_) = (event for event in events if isinstance(event, StageBounding))
    assert bounded.to_dict()["stage"] == "bounding stage"
    assert bounded.mesh.startswith("pp=")
    assert bounded.micro_batches == 4
    best = [event.state.step_time_s for event in events if isinstance(event, IncumbentFound)]
    assert best == sorted(best, reverse=True)
    for event in events:
        if isinstance(event, IncumbentFound) and event.state.bound_s is not None:
            assert event.state.bound_s <= best[-1]
            assert str(event).startswith(f"found a faster plan on mesh {event.mesh}; best ")


def test_checkpointing_of_the_first_blocks_is_told() -> None:
    events = events_of(cluster="1x4xtoy", micro_batches=1, ac="full:2")
    solving = [event for event in events if isinstance(event, RunSolving)]
    assert {event.ac for event in solving} == {"full:2"}
    assert {event.to_dict()["ac"] for event in solving} == {"full:2"}
    assert all("checkpointing full:2" in str(event) for event in solving)
    numbers = [(event.mesh_number, event.meshes) for event in events if isinstance(event, MeshBounding)]
    assert sorted(numbers) == [(number, len(numbers)) for number in range(1, len(numbers) + 1)]


STATE = SearchState(step_time_s=0.5, bound_s=0.4, tasks_done=3, nodes_open=7)
EVENTS = [
    TRACING,
    MeshBounding(mesh="dp=2,tp=4", mesh_number=2, meshes=12, state=STATE),
    RunRelaxing(mesh="dp=8", micro_batches=2, ac="selective", state=SearchState(tasks_done=0)),
    RunSolving(mesh="dp=8", micro_batches=2, ac="full:8", leading_blocks=4, state=STATE),
    RunSolving(mesh="dp=8", micro_batches=2, ac="full", is_first_plan=True),
    StageBounding(mesh="pp=2,dp=4", micro_batches=8, state=STATE),
    StageRelaxing(mesh="pp=2,dp=4", micro_batches=8, ac="none", state=STATE),
    IncumbentFound(mesh="dp=8", state=STATE),
    Planned(mesh="dp=8", step_time_s=0.5, gap=0.0),
]


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_an_event_is_read_as_it_was_written(event: ProgressEvent) -> None:
    document = json.loads(json.dumps(event.to_dict()))
    assert None not in document.values()
    assert event_from_dict(document) == event


def test_fields_of_json_and_text() -> None:
    assert EVENTS[1].to_dict() == {
        "stage": "bounding",
        "mesh": "dp=2,tp=4",
        "mesh_number": 2,
        "meshes": 12,
        "step_time_s": 0.5,
        "bound_s": 0.4,
        "gap": pytest.approx(0.2),
        "tasks_done": 3,
        "nodes_open": 7,
    }
    assert str(EVENTS[1]) == "bounding mesh dp=2,tp=4 (2 of 12); best 0.5 s, gap 20.00%"
    alternative = AlternativePricing(aspect="stored", layout=("S(0)", "R"))
    assert str(SweepProgress(subject="batch 8", event=alternative)) == "batch 8: stored as S(0), R"
    assert SweepProgress(subject="batch 8", event=TRACING).to_dict() == {"stage": "tracing", "subject": "batch 8"}


@pytest.mark.parametrize("document", [{"stage": "cooling"}, {"stage": "best", "gap": 0.5}, {"stage": "solving"}, {}])
def test_an_event_of_another_version_is_a_phase(document: dict[str, Any]) -> None:
    assert event_from_dict(document) == Phase(document.get("stage", ""))


def test_a_client_reads_events_without_torch() -> None:
    code = "import sys, planner.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
