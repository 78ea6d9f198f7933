"""Strategies in which DTensor slices a parameter that is whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate

from cost_model.layouts.layout import Layout
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

R = Replicate()


def slices_parameters(region: Region, strategy: Strategy) -> bool:
    """Tell whether an op multiplies pieces with a parameter that is whole: sums come out where no sum came in."""
    for region_op in region.ops:
        parameters = [i for i in region_op.inputs if region.slots[i].origin == "parameter"]
        made = [strategy.forward[i] for i in region_op.outputs]
        given = [strategy.forward[i] for i in region_op.inputs]
        for axis in range(max((len(layout) for layout in made if layout is not None), default=0)):
            if _partial(made, axis) and not _partial(given, axis):
                held = (strategy.forward[i] for i in parameters)
                if any(layout is not None and layout[axis] == R for layout in held):
                    return True
    return False


def _partial(layouts: Sequence[Layout | None], axis: int) -> bool:
    return any(layout is not None and layout[axis].is_partial() for layout in layouts)
