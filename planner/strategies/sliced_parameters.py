"""`slices_parameters`: strategies in which DTensor copies a slice of a replicated parameter in every step."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate

from cost_model.layouts.layout import Layout
from planner.regions.regions import Region
from planner.strategies.enumerate import Strategy

R = Replicate()


def slices_parameters(region: Region, strategy: Strategy) -> bool:
    """Return whether an op of the region multiplies sharded activations with a slice of a replicated parameter.

    The result of such an op is partial on an axis on which no input is partial and the parameter is replicated.
    """
    for region_op in region.ops:
        parameters = [strategy.forward[i] for i in region_op.inputs if region.slots[i].origin == "parameter"]
        outputs = [strategy.forward[i] for i in region_op.outputs]
        inputs = [strategy.forward[i] for i in region_op.inputs]
        for axis in range(max((len(layout) for layout in outputs if layout is not None), default=0)):
            becomes_partial = _any_partial(outputs, axis) and not _any_partial(inputs, axis)
            if becomes_partial and any(layout is not None and layout[axis] == R for layout in parameters):
                return True
    return False


def _any_partial(layouts: Sequence[Layout | None], axis: int) -> bool:
    return any(layout is not None and layout[axis].is_partial() for layout in layouts)
