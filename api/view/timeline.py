"""`step_timeline`: one predicted step of one device over time: kernels, waits, the communication of each axis, memory.

The estimate knows how long each part of the model computes and communicates, not when. The timeline puts the parts in
their order: kernels one after another; a collective as soon as its part of the model begins and the axis is free. So
the tracks add up to the estimate's seconds, and where an event stands is an assumption.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from api.view.schedule import Direction, Pass, passes
from planner.plan.estimate import Breakdown, CollectiveEstimate, Estimate, MemoryPoint, SectionCost
from planner.plan.sharding_plan import ShardingPlan

TrackKind = Literal["compute", "communication", "stage"]
EventKind = Literal["forward", "backward", "optimizer", "exposed", "overlapped", "idle"]
"""A collective is "overlapped" where kernels run in the middle of it, else "exposed"."""

MOST_EVENTS = 20_000
"""Events above which blocks, and then whole passes, are drawn as one."""
MOST_POINTS = 1_500
"""Points of the memory curve above which micro-batches have fewer points each."""

_RANGE = re.compile(r"\*|\{(\d+)-\d+\}")
_PHASES_OF: Mapping[Direction, tuple[str, ...]] = {"forward": ("forward",), "backward": ("recompute", "backward")}

COMPUTE = "compute"
"""Name of the track of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One row of the timeline. ``axis``: of communication, the mesh axis."""

    name: str
    kind: TrackKind
    axis: str | None = None


class Event(NamedTuple):
    """One bar of a track.

    Attributes:
        track: index of the track.
        section: index of the part of the model; None: of none.
        block: which of the section's blocks; None: all of them, or none.
        collective: of communication, what runs.
    """

    track: int
    start_s: float
    duration_s: float
    label: str
    kind: EventKind
    section: int | None = None
    block: int | None = None
    micro_batch: int | None = None
    collective: CollectiveEstimate | None = None


class MemoryAt(NamedTuple):
    """Bytes on the device at one time, by role."""

    at_s: float
    label: str
    nbytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of one device, and of a pipeline the passes of all stages; ``note`` says what is simplified."""

    step_s: float
    tracks: tuple[Track, ...]
    events: tuple[Event, ...]
    memory: tuple[MemoryAt, ...]
    note: str = ""

    def track_seconds(self, track: int) -> float:
        """Return the sum of the durations of a track's events."""
        return sum(event.duration_s for event in self.events if event.track == track)


def step_timeline(plan: ShardingPlan, *, most_events: int = MOST_EVENTS) -> Timeline | None:
    """Return the timeline of a step; None: the plan is not priced, or does not say where its seconds are spent."""
    if plan.estimate is None or plan.breakdown is None or plan.estimate.step_time_s <= 0:
        return None
    return _Drawer(plan, plan.estimate, plan.breakdown, most_events).draw()


@dataclass(slots=True)
class _Drawer:
    plan: ShardingPlan
    estimate: Estimate
    parts: Breakdown
    most_events: int
    events: list[Event] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)
    waiting: list[Event] = field(default_factory=list)
    kernels: list[tuple[float, float]] = field(default_factory=list)

    def draw(self) -> Timeline:
        plan, estimate = self.plan, self.estimate
        stage = self.parts.stage or 0
        self.tracks.append(Track(name=COMPUTE, kind="compute"))
        axes = dict.fromkeys(each.axis for section in self.parts.sections for each in section.collectives)
        self.tracks += [Track(name=axis, kind="communication", axis=axis) for axis in axes]
        all_passes = passes(estimate, plan.micro_batches, plan.pipeline, stage=stage)
        own = sorted((each for each in all_passes if each.stage == stage), key=lambda each: each.start_s)
        for each in own:
            self._pass(each)
        self._after()
        self._idle()
        self._communication(estimate.step_time_s)
        if plan.pipeline is not None:
            self._stages(all_passes, len(plan.pipeline.stages))
        return Timeline(
            step_s=estimate.step_time_s,
            tracks=tuple(self.tracks),
            events=tuple(sorted(self.events, key=lambda event: (event.track, event.start_s))),
            memory=tuple(self._memory(own)),
            note=self._note(),
        )

    # --- kernels -------------------------------------------------------------------------------------------------

    def _pass(self, each: Pass) -> None:
        """Draw one pass of the device: the sections in order, each with its waits and kernels."""
        forward = each.direction == "forward"
        costs = [
            (section.forward_s, section.forward_wait_s) if forward else (section.backward_s, section.backward_wait_s)
            for section in self.parts.sections
        ]
        count = self.plan.micro_batches
        spent_s = sum(kernels + wait for kernels, wait in costs) / count
        slack = self._slack_shares(each.direction, each.duration_s - spent_s)
        at_s = each.start_s
        numbers = range(len(costs)) if forward else range(len(costs) - 1, -1, -1)
        for number in numbers:
            section, (kernels, wait) = self.parts.sections[number], costs[number]
            blocks = section.calls if self._by_block else 1
            kernels_s, wait_s = kernels / count / blocks, (wait / count + slack[number]) / blocks
            for block in range(blocks) if forward else range(blocks - 1, -1, -1):
                name = self._name(section, block if blocks > 1 or section.calls == 1 else None)
                self._collectives(each, number, block if blocks > 1 else None, at_s)
                if wait_s > 0:
                    label = f"{name} waits for communication"
                    self._add(0, at_s, wait_s, label, "exposed", number, None, each.micro_batch)
                at_s += wait_s
                if kernels_s > 0:
                    label = f"{each.direction} of {name}"
                    drawn = block if blocks > 1 else None
                    self._add(0, at_s, kernels_s, label, each.direction, number, drawn, each.micro_batch)
                    self.kernels.append((at_s, kernels_s))
                at_s += kernels_s

    def _slack_shares(self, direction: Direction, slack_s: float) -> list[float]:
        """Return for each section its part of the seconds by which a busy link extends a pass."""
        if slack_s <= 0:
            return [0.0] * len(self.parts.sections)
        weights = [
            sum(each.time_s for each in section.collectives if each.phase in _PHASES_OF[direction])
            for section in self.parts.sections
        ]
        whole = sum(weights)
        if whole == 0:
            return [slack_s / len(weights)] * len(weights)
        return [slack_s * weight / whole for weight in weights]

    def _after(self) -> None:
        """Draw what follows all passes: exposed reductions, then the optimizer."""
        estimate = self.estimate
        update_s = estimate.step_time_s - estimate.optimizer_s
        if estimate.grad_reduce_s > 0:
            start_s = update_s - estimate.grad_reduce_s
            label = "first all-gathers and last gradient reductions"
            self._add(0, start_s, estimate.grad_reduce_s, label, "exposed")
        if estimate.optimizer_s > 0:
            self._add(0, update_s, estimate.optimizer_s, "optimizer's update", "optimizer")

    def _idle(self) -> None:
        """Fill the gaps of the compute track of a pipeline's stage."""
        if self.plan.pipeline is None:
            return
        at_s = 0.0
        for event in sorted((event for event in self.events if event.track == 0), key=lambda event: event.start_s):
            if event.start_s - at_s > 1e-9 * self.estimate.step_time_s:
                self._add(0, at_s, event.start_s - at_s, "waits for other stages", "idle")
            at_s = max(at_s, event.start_s + event.duration_s)

    # --- communication -------------------------------------------------------------------------------------------

    def _collectives(self, each: Pass, number: int, block: int | None, at_s: float) -> None:
        """Queue the collectives of a section, or of one of its blocks, that a pass runs."""
        section, count = self.parts.sections[number], self.plan.micro_batches
        blocks = section.calls if block is not None else 1
        for collective in section.collectives:
            once = (collective.phase == "param_gather" and each.direction == "forward" and each.micro_batch == 0) or (
                collective.phase == "grad_reduce" and each.direction == "backward" and each.micro_batch == count - 1
            )
            if not once and collective.phase not in _PHASES_OF[each.direction]:
                continue
            duration_s = collective.time_s / blocks / (1 if once else count)
            if duration_s <= 0:
                continue
            name = self._name(section, block)
            track = next(i for i, track in enumerate(self.tracks) if track.axis == collective.axis)
            label = f"{collective.kind} of {name}, {collective.phase.replace('_', ' ')}"
            event = Event(track, at_s, duration_s, label, "exposed", number, block, each.micro_batch, collective)
            self.waiting.append(event)

    def _communication(self, step_s: float) -> None:
        """Draw the queued collectives: each axis runs one at a time, in order, and is done when the step ends."""
        by_track: dict[int, list[Event]] = defaultdict(list)
        for event in sorted(self.waiting, key=lambda event: event.start_s):
            by_track[event.track].append(event)
        for queue in by_track.values():
            starts, free_s = [], 0.0
            for event in queue:
                starts.append(max(event.start_s, free_s))
                free_s = starts[-1] + event.duration_s
            latest_s = step_s
            for index in range(len(queue) - 1, -1, -1):
                starts[index] = min(starts[index], latest_s - queue[index].duration_s)
                latest_s = starts[index]
            moved = (event._replace(start_s=start_s) for event, start_s in zip(queue, starts, strict=True))
            self.events += [event._replace(kind="overlapped") if self._runs_beside(event) else event for event in moved]

    def _runs_beside(self, event: Event) -> bool:
        """Return whether kernels run in the middle of an event."""
        middle_s = event.start_s + event.duration_s / 2
        place = bisect_right(self.kernels, (middle_s, float("inf"))) - 1
        return place >= 0 and middle_s < self.kernels[place][0] + self.kernels[place][1]

    # --- stages, memory ------------------------------------------------------------------------------------------

    def _stages(self, all_passes: Sequence[Pass], stages: int) -> None:
        first = len(self.tracks)
        self.tracks += [Track(name=f"stage {stage}", kind="stage") for stage in range(stages)]
        for each in all_passes:
            label = f"{each.direction} of micro-batch {each.micro_batch}"
            track = first + each.stage
            self._add(track, each.start_s, each.duration_s, label, each.direction, None, None, each.micro_batch)

    def _memory(self, own: Sequence[Pass]) -> Iterator[MemoryAt]:
        """Yield the bytes over the step: at its start, at the points of each pass, and at the optimizer's step."""
        held, points = self.parts.held, self.parts.memory
        if not held and not points:
            return
        yield MemoryAt(0.0, "start of the step", dict(held))
        for each in own:
            if (
                each.direction == "forward"
                and each.micro_batch
                and self.plan.pipeline is None
                and self._has("backward")
            ):
                yield MemoryAt(each.start_s, "start of a micro-batch", dict(held))
            for point in self._points(each.direction):
                where = f"{point.phase} of {point.module or 'the model'}"
                at_s = each.start_s + point.fraction * each.duration_s
                yield MemoryAt(at_s, where, _added(held, point.live))
        for point in points:
            if point.phase == "update":
                yield MemoryAt(self.estimate.step_time_s, "optimizer's update", _added(held, point.live))

    def _has(self, phase: str) -> bool:
        return any(point.phase == phase for point in self.parts.memory)

    def _points(self, direction: Direction) -> list[MemoryPoint]:
        """Return the points of a pass; of many micro-batches, fewer each, with the fullest among them."""
        points = [point for point in self.parts.memory if point.phase == direction]
        step = -(-len(points) * self.plan.micro_batches // MOST_POINTS)
        if step <= 1:
            return points
        fullest = max(points, key=lambda point: sum(point.live.values()))
        return [point for number, point in enumerate(points) if number % step == 0 or point is fullest]

    # --- small things --------------------------------------------------------------------------------------------

    @property
    def _by_block(self) -> bool:
        """Whether blocks are drawn one by one."""
        blocks = sum(section.calls * (2 + len(section.collectives)) for section in self.parts.sections)
        return 2 * self.plan.micro_batches * blocks <= self.most_events

    def _name(self, section: SectionCost, block: int | None) -> str:
        """Return the name of a block of a section, or of all of them."""
        return block_name(section.module, block) or "the model itself"

    def _note(self) -> str:
        if self.plan.pipeline is None:
            return ""
        shown = f"Compute and communication are those of stage {self.parts.stage or 0}, the slowest"
        fullest = self.parts.memory_stage
        shown += "." if fullest in (None, self.parts.stage) else f"; memory is that of stage {fullest}, the fullest."
        if self.plan.pipeline.chunks > 1:
            return f"{shown} The chunks of a stage take turns; they are drawn as one."
        return shown

    def _add(
        self,
        track: int,
        start_s: float,
        duration_s: float,
        label: str,
        kind: EventKind,
        section: int | None = None,
        block: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        self.events.append(Event(track, start_s, duration_s, label, kind, section, block, micro_batch))


def block_name(pattern: str, block: int | None) -> str:
    """Return the FQN of the ``block``-th module that a pattern stands for; the pattern itself for None."""
    if block is None:
        return pattern
    ranged = _RANGE.search(pattern)
    first = int(ranged[1]) if ranged is not None and ranged[1] else 0
    return pattern if ranged is None else pattern[: ranged.start()] + str(first + block) + pattern[ranged.end() :]


def _added(held: Mapping[str, int], live: Mapping[str, int]) -> dict[str, int]:
    return {role: held.get(role, 0) + live.get(role, 0) for role in {**held, **live}}
