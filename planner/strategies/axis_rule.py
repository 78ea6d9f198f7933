"""`AxisRule`: one way to run one of the executor's own ops on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """One way to run an op on one mesh axis.

    Attributes:
        inputs: placements of the inputs; None for a plain tensor.
        outputs: placements of the outputs; None for a plain tensor.
        output_gradients: placements in which the outputs' gradients arrive; None where there is none.
        input_gradients: placements of the gradients of the inputs; None where there is none.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]
    output_gradients: tuple[Placement | None, ...]
    input_gradients: tuple[Placement | None, ...]
