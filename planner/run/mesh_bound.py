"""What no run on a mesh can beat: the relaxation in one micro-batch and without checkpointing, all but uncapped.

Smaller micro-batches do the same work in more and smaller pieces, and layouts that divide them divide the larger ones;
checkpointing adds work. So the relaxation there bounds every run on the mesh, and its reduced costs every run with a
certain choice. Of memory it knows what rests in all of them alike, parameters and the optimizer's states: what does not
fit has to be split, and gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.layouts.layout import Layout, MeshSpec
from planner.formulation.formulate import Formulation
from planner.ilp.relaxation import Relaxer
from planner.pricing.storage_options import StorageOption
from planner.strategies.enumerate import Strategy


@dataclass(slots=True, kw_only=True)
class MeshBound:
    """What no run on a mesh can beat, in all and with any one choice.

    Attributes:
        backward_s: that the backward of every run computes at least beside the model's own, as checkpointing makes it.
        strategies: by region class, what a run with a strategy takes at least.
        stored: by parameter class, the same for a stored layout and the axes over which it is gathered with its block.
    """

    mesh: MeshSpec
    backward_s: float
    bound_s: float
    strategies: tuple[Mapping[Strategy, float], ...]
    stored: tuple[Mapping[tuple[Layout, tuple[int, ...] | None], float], ...]
    _relaxer: Relaxer | None

    def below(self, time_s: float) -> ChoicesBelow:
        """Return which choices could be part of a run that takes less than ``time_s``."""
        return ChoicesBelow(floor=self, time_s=time_s)

    def with_work(self, backward_s: float) -> float:
        """Return what no run can beat whose backward computes ``backward_s`` seconds more, whatever is chosen."""
        if backward_s <= self.backward_s:
            return self.bound_s
        assert self._relaxer is not None
        relaxed = self._relaxer.uncapped(backward_s)
        return self.bound_s if relaxed is None else max(relaxed.bound_s, self.bound_s)

    def within_cap(self, at_most_s: float) -> float:
        """Return what the run that this is the floor of cannot beat within the cap, up to ``at_most_s``.

        To be asked last.
        """
        assert self._relaxer is not None
        relaxed = self._relaxer.capped(at_most_s)
        return at_most_s if relaxed is None else min(relaxed.bound_s, at_most_s)

    def light(self) -> MeshBound:
        """Return what is left to say without the problem: all but `with_work` and `within_cap`."""
        return dataclasses.replace(self, _relaxer=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesBelow:
    """The choices of a mesh that could be part of a run that takes less than ``time_s``."""

    floor: MeshBound
    time_s: float

    def strategy(self, index: int, choice: Strategy) -> bool:
        # To gather again takes no less than to keep.
        kept = dataclasses.replace(choice, reallgathered=()) if choice.reallgathered else choice
        return self.floor.strategies[index].get(kept, self.floor.bound_s) < self.time_s

    def stored(self, index: int, choice: StorageOption) -> bool:
        key = choice.stored, choice.fsdp_axes
        return self.floor.stored[index].get(key, self.floor.bound_s) < self.time_s


def bound_mesh(
    mesh: MeshSpec, formulation: Formulation, memory_bytes: float, backward_s: float = 0.0
) -> MeshBound | None:
    """Return the floor of a mesh from the problem of its largest run; None where that has no solution.

    Args:
        memory_bytes: the cap on memory.
        backward_s: that the backward of every run computes at least beside the model's own.
    """
    relaxer = Relaxer(formulation.problem, memory_bytes, static_bytes=memory_bytes)
    relaxed = relaxer.uncapped(backward_s)
    if relaxed is None:
        return None
    regions, axes_node = len(formulation.strategies), len(formulation.strategies) + len(formulation.stored)
    strategies = [
        dict(zip(choices, times, strict=True))
        for choices, times in zip(formulation.strategies, relaxed.choice_bounds_s[:regions], strict=True)
    ]
    stored: list[dict[tuple[Layout, tuple[int, ...] | None], float]] = []
    for choices, times in zip(formulation.stored, relaxed.choice_bounds_s[regions:axes_node], strict=True):
        least: dict[tuple[Layout, tuple[int, ...] | None], float] = {}
        for choice, time_s in zip(choices, times, strict=True):
            key = choice.stored, choice.fsdp_axes
            least[key] = min(least.get(key, math.inf), time_s)
        stored.append(least)
    return MeshBound(
        mesh=mesh,
        backward_s=backward_s,
        bound_s=relaxed.bound_s,
        strategies=tuple(strategies),
        stored=tuple(stored),
        _relaxer=relaxer,
    )
