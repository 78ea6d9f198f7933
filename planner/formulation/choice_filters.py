"""Restrictions of what may be chosen: by baselines and pins, and by bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Value
from planner.pricing.storage_options import StorageOption
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

Accepts = Callable[[Region, Strategy], bool]
"""Whether a strategy may be chosen; baselines and random plans restrict the space."""
AcceptsStored = Callable[[Value, Sequence[str], Layout], bool]
"""(parameter, its FQNs, stored layout) -> whether it may be chosen."""


class ChoiceFilter(Protocol):
    """Choices that a plan below the cutoff could contain."""

    def strategy(self, index: int, choice: Strategy) -> bool:
        """Tell whether a strategy of the region class of that index may be chosen."""

    def stored(self, index: int, choice: StorageOption) -> bool:
        """Tell whether a choice of the parameter class of that index may be chosen."""
