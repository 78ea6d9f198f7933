"""Progress of planning: typed events, their text for a person (`str`), their JSON for a client (`to_dict`).

This module imports neither torch nor the planner, so that a client can read events without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One event of planning.

    Attributes:
        stage: name of the kind of event, in JSON.
    """

    stage: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object: ``stage``, and the fields that are not None."""
        return {"stage": self.stage, **_set_fields(self)}


Progress = Callable[[ProgressEvent], None]
"""Called with each event, in the thread that plans."""


@dataclass(frozen=True, slots=True)
class Phase(ProgressEvent):
    """An event with a name and no other data: tracing, building the model, or the status of a job on a server.

    Attributes:
        name: text for a person, and the ``stage`` in JSON.
    """

    name: str

    def __str__(self) -> str:
        return self.name

    def to_dict(self) -> dict[str, Any]:
        """Return the name as ``stage``."""
        return {"stage": self.name}


TRACING = Phase("tracing")
BUILDING_MODEL = Phase("building the model")
READING_GRAPH = Phase("reading the graph")
PRICING = Phase("pricing")
PRICING_BASELINES = Phase("pricing the baselines")
RUNNING_ON_FAKE_PROCESSES = Phase("running the plan on fake processes")
ASKING_SERVER = Phase("asking the server")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The state of a search. A field is None while its value is not known.

    Attributes:
        step_time_s: step time in seconds of the incumbent, the fastest plan so far.
        bound_s: lower bound in seconds on the step time of every plan in the search space.
        tasks_done: number of branch-and-bound nodes that were expanded.
        nodes_open: number of nodes that are not expanded yet.
    """

    step_time_s: float | None = None
    bound_s: float | None = None
    tasks_done: int | None = None
    nodes_open: int | None = None

    @property
    def gap(self) -> float | None:
        """Relative optimality gap, (step_time_s - bound_s) / step_time_s; None while either is not known."""
        if self.step_time_s is None or self.bound_s is None:
            return None
        return max(self.step_time_s - self.bound_s, 0.0) / self.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None, and the gap if it is known."""
        gap = {} if self.gap is None else {"gap": self.gap}
        return {**_set_fields(self), **gap}

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", gap {self.gap:.2%}"
        return "" if self.step_time_s is None else f"best {self.step_time_s:.6g} s{gap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEvent(ProgressEvent):
    """An event of a branch-and-bound search.

    Attributes:
        state: state of the search. In JSON, its fields are fields of the event.
    """

    state: SearchState = SearchState()

    @property
    def action(self) -> str:
        """The event in words, without the state of the search."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.action, str(self.state))))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object, with the state of the search."""
        return {"stage": self.stage, **_set_fields(self, leaving_out="state"), **self.state.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshBounding(SearchEvent):
    """A linear relaxation computes the lower bound of a mesh, which is number ``mesh_number`` of ``meshes``."""

    stage: ClassVar[str] = "bounding"
    mesh: str
    mesh_number: int
    meshes: int

    @property
    def action(self) -> str:
        return f"bounding mesh {self.mesh} ({self.mesh_number} of {self.meshes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRelaxing(SearchEvent):
    """The linear relaxation of the next run of a (mesh, checkpointing) pair is solved.

    Attributes:
        micro_batches: least number of micro-batches of that run. Runs that cannot fit the memory are skipped.
    """

    stage: ClassVar[str] = "relaxing"
    mesh: str
    micro_batches: int
    ac: str

    @property
    def action(self) -> str:
        return f"relaxing mesh {self.mesh}, {self.micro_batches} micro-batches, checkpointing {self.ac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSolving(SearchEvent):
    """The integer program of a run is solved; if the mesh has an axis ``pp``, those of the pipeline's stages.

    Attributes:
        leading_blocks: number of leading blocks that have choices of their own; None: equal blocks share all choices.
        is_first_plan: True where the run is solved for a first incumbent, before any lower bound is known; else None.
    """

    stage: ClassVar[str] = "solving"
    mesh: str
    micro_batches: int
    ac: str
    leading_blocks: int | None = None
    is_first_plan: bool | None = None

    @property
    def action(self) -> str:
        settings = f"solving mesh {self.mesh}, {self.micro_batches} micro-batches, checkpointing {self.ac}"
        blocks = "" if self.leading_blocks is None else f", the first {self.leading_blocks} blocks on their own"
        return f"{settings}{blocks}{', for a first plan' if self.is_first_plan else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBounding(SearchEvent):
    """A linear relaxation without checkpointing computes the lower bound of a pipeline stage."""

    stage: ClassVar[str] = "bounding stage"
    mesh: str
    micro_batches: int

    @property
    def action(self) -> str:
        return f"bounding a stage on mesh {self.mesh}, {self.micro_batches} micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRelaxing(SearchEvent):
    """The linear relaxation of a pipeline stage is solved, with the memory cap."""

    stage: ClassVar[str] = "relaxing stage"
    mesh: str
    micro_batches: int
    ac: str

    @property
    def action(self) -> str:
        return f"relaxing a stage on mesh {self.mesh}, {self.micro_batches} micro-batches, checkpointing {self.ac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentFound(SearchEvent):
    """The search has a new incumbent; ``state`` has its step time, the lower bound and the gap."""

    stage: ClassVar[str] = "best"
    mesh: str

    @property
    def action(self) -> str:
        return f"found a faster plan on mesh {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(ProgressEvent):
    """The plan is complete.

    Attributes:
        step_time_s: step time of the plan in seconds; None: the plan has no estimate.
        gap: relative optimality gap of the plan; None: the solver proved no bound.
    """

    stage: ClassVar[str] = "planned"
    mesh: str
    step_time_s: float | None = None
    gap: float | None = None

    def __str__(self) -> str:
        time = "" if self.step_time_s is None else f", {self.step_time_s:.6g} s per step"
        gap = "" if self.gap is None else f", gap {self.gap:.2%}"
        return f"planned on mesh {self.mesh}{time}{gap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativePricing(ProgressEvent):
    """`planner.explanation.explain` prices another layout of a parameter.

    Attributes:
        aspect: "stored" for the stored layout, "computed" for the compute layout.
        layout: placements as text, one for each mesh axis.
    """

    stage: ClassVar[str] = "alternative"
    aspect: str
    layout: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.aspect} as {', '.join(self.layout)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress(ProgressEvent):
    """An event of planning for one point of a sweep.

    Attributes:
        subject: name of the cluster or batch size at that point.
        event: the event of planning for ``subject``.
    """

    stage: ClassVar[str] = "sweep"
    subject: str
    event: ProgressEvent

    def __str__(self) -> str:
        return f"{self.subject}: {self.event}"

    def to_dict(self) -> dict[str, Any]:
        """Return ``event`` as a JSON object, with the field ``subject`` added."""
        return {**self.event.to_dict(), "subject": self.subject}


SEARCH_STAGES = frozenset(
    event.stage for event in (MeshBounding, RunRelaxing, RunSolving, StageBounding, StageRelaxing, IncumbentFound)
)
"""The ``stage`` of every event that only a search reports."""

_BY_STAGE: Mapping[str, type[ProgressEvent]] = {
    event.stage: event
    for event in (MeshBounding, RunRelaxing, RunSolving, StageBounding, StageRelaxing, IncumbentFound, Planned)
}
_STATE_FIELDS = frozenset(field.name for field in dataclasses.fields(SearchState))


def event_from_dict(document: Mapping[str, Any]) -> ProgressEvent:
    """Return the event that `ProgressEvent.to_dict` wrote; a `Phase` where stage or fields are unknown."""
    stage = str(document.get("stage", ""))
    event = _BY_STAGE.get(stage)
    if event is None:
        return Phase(stage)
    names = {field.name for field in dataclasses.fields(event)}
    fields = {name: value for name, value in document.items() if name in names}
    if "state" in names:
        fields["state"] = SearchState(**{name: document[name] for name in _STATE_FIELDS & document.keys()})
    try:
        return event(**fields)
    except TypeError:
        return Phase(stage)


def _set_fields(event: Any, leaving_out: str | None = None) -> dict[str, Any]:
    """Return name -> value of the fields of a dataclass that are not None, without the field ``leaving_out``."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {name: value for name, value in values.items() if value is not None and name != leaving_out}
