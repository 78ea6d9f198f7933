"""Restrictions of choices: by baselines and pins (`Accepts`, `AcceptsStored`), and by lower bounds (`ChoiceFilter`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Value
from planner.pricing.storage_options import StorageOption
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

Accepts = Callable[[Region, Strategy], bool]
"""(region, strategy) -> whether the region may run the strategy."""
AcceptsStored = Callable[[Value, Sequence[str], Layout], bool]
"""(parameter, its FQNs, stored layout) -> whether the parameter may be stored in the layout."""


class ChoiceFilter(Protocol):
    """A filter that passes the choices that a plan below the cutoff could contain."""

    def strategy(self, index: int, choice: Strategy) -> bool:
        """Return whether the region class ``index`` may take the strategy ``choice``."""

    def stored(self, index: int, choice: StorageOption) -> bool:
        """Return whether the parameter class ``index`` may take the storage option ``choice``."""
