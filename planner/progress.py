"""Progress of planning: typed events, their text for a person (`str`), their JSON for a client (`to_dict`).

It imports neither torch nor the planner, so that a client can read events without either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Something that happened while a plan was made.

    Attributes:
        stage: names the kind of event in JSON.
    """

    stage: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object: ``stage`` and the fields that are known."""
        return {"stage": self.stage, **_set_fields(self)}


Progress = Callable[[ProgressEvent], None]
"""Called with each event, in the thread that plans."""


@dataclass(frozen=True, slots=True)
class Phase(ProgressEvent):
    """A phase of work that has no figures: tracing, building the model, a status of a server's job.

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
RUNNING_ON_FAKE_PROCESSES = Phase("running the plan on fake processes")
ASKING_SERVER = Phase("asking the server")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """How far a search is.

    Attributes:
        step_time_s: of the incumbent, the fastest plan so far; None: there is none.
        bound_s: no plan of the search space is faster; None: not known yet.
        tasks_done: node expansions that are done.
        nodes_open: nodes that wait to be expanded.
    """

    step_time_s: float | None = None
    bound_s: float | None = None
    tasks_done: int | None = None
    nodes_open: int | None = None

    @property
    def gap(self) -> float | None:
        """How much faster than the incumbent a plan may be at most, relative to it; None: not known yet."""
        if self.step_time_s is None or self.bound_s is None:
            return None
        return max(self.step_time_s - self.bound_s, 0.0) / self.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are known, with the gap."""
        gap = {} if self.gap is None else {"gap": self.gap}
        return {**_set_fields(self), **gap}

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", gap {self.gap:.2%}"
        return "" if self.step_time_s is None else f"best {self.step_time_s:.6g} s{gap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEvent(ProgressEvent):
    """An event of a branch-and-bound search.

    Attributes:
        state: of the search; its fields are added to the event's own in JSON.
    """

    state: SearchState = SearchState()

    @property
    def action(self) -> str:
        """What happens, in words."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.action, str(self.state))))

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object, with the state of the search."""
        return {"stage": self.stage, **_set_fields(self, leaving_out="state"), **self.state.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshBounding(SearchEvent):
    """A mesh is bounded by a relaxation, number ``mesh_number`` of ``meshes``."""

    stage: ClassVar[str] = "bounding"
    mesh: str
    mesh_number: int
    meshes: int

    @property
    def action(self) -> str:
        return f"bounding mesh {self.mesh} ({self.mesh_number} of {self.meshes})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRelaxing(SearchEvent):
    """The next run of a (mesh, checkpointing) pair is relaxed, in ``micro_batches`` or more."""

    stage: ClassVar[str] = "relaxing"
    mesh: str
    micro_batches: int
    ac: str

    @property
    def action(self) -> str:
        return f"relaxing mesh {self.mesh}, {self.micro_batches} micro-batches, checkpointing {self.ac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSolving(SearchEvent):
    """A run is solved, or the stages of a pipeline where the mesh has an axis ``pp``.

    Attributes:
        leading_blocks: that have choices of their own; None: all equal blocks share theirs.
        is_first_plan: whether it is solved for a first plan, before any bound is known.
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
    """A stage of pipelines is bounded by a relaxation without checkpointing."""

    stage: ClassVar[str] = "bounding stage"
    mesh: str
    micro_batches: int

    @property
    def action(self) -> str:
        return f"bounding a stage on mesh {self.mesh}, {self.micro_batches} micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRelaxing(SearchEvent):
    """A stage of pipelines is relaxed within the memory cap."""

    stage: ClassVar[str] = "relaxing stage"
    mesh: str
    micro_batches: int
    ac: str

    @property
    def action(self) -> str:
        return f"relaxing a stage on mesh {self.mesh}, {self.micro_batches} micro-batches, checkpointing {self.ac}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncumbentFound(SearchEvent):
    """A plan was found that is faster than all before: ``state`` has its step time, the bound and the gap."""

    stage: ClassVar[str] = "best"
    mesh: str

    @property
    def action(self) -> str:
        return f"found a faster plan on mesh {self.mesh}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(ProgressEvent):
    """The plan is made.

    Attributes:
        step_time_s: None where the plan has no price.
        gap: how much faster a plan may be at most, relative to this one; None where it was not searched for.
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
    """Another layout of a parameter is priced.

    Attributes:
        aspect: "stored" or "computed".
        layout: placements as text, one for each mesh axis.
    """

    stage: ClassVar[str] = "alternative"
    aspect: str
    layout: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.aspect} as {', '.join(self.layout)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress(ProgressEvent):
    """An event of one plan of a sweep.

    Attributes:
        subject: the cluster or the batch that the plan is for.
        event: of planning for it.
    """

    stage: ClassVar[str] = "sweep"
    subject: str
    event: ProgressEvent

    def __str__(self) -> str:
        return f"{self.subject}: {self.event}"

    def to_dict(self) -> dict[str, Any]:
        """Return the inner event as a JSON object, with its subject."""
        return {**self.event.to_dict(), "subject": self.subject}


SEARCH_STAGES = frozenset(
    event.stage for event in (MeshBounding, RunRelaxing, RunSolving, StageBounding, StageRelaxing, IncumbentFound)
)
"""Stages of events that only a search reports."""

_BY_STAGE: Mapping[str, type[ProgressEvent]] = {
    event.stage: event
    for event in (MeshBounding, RunRelaxing, RunSolving, StageBounding, StageRelaxing, IncumbentFound, Planned)
}
_STATE_FIELDS = frozenset(field.name for field in dataclasses.fields(SearchState))


def event_from_dict(document: Mapping[str, Any]) -> ProgressEvent:
    """Return the event that `ProgressEvent.to_dict` wrote; a `Phase` where its stage or its fields are others."""
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
    """Return the fields of a dataclass that are not None."""
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return {name: value for name, value in values.items() if value is not None and name != leaving_out}
