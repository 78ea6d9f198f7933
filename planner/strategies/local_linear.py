"""Linear layers that the executor runs on local tensors (`executor.ops.linear`), where DTensor need not be asked."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.layouts.linear import linear_gradients, linear_layout
from planner.graph.op_graph import LINEAR, Op, Value
from planner.strategies.dtensor_rules import Layouts


def local_linear_outputs(op: Op, inputs: Sequence[Value], layouts: Layouts) -> Layouts | None:
    """Return the layout of the output; None if ``op`` is no linear layer, or DTensor runs it in these ``layouts``."""
    known = [layout for layout in layouts if layout is not None]
    if op.target_name != LINEAR or len(known) < len(layouts):
        return None
    output = linear_layout(*known, last_dim=len(inputs[0].shape) - 1)
    return None if output is None else (output,)


def local_linear_gradients(
    op: Op, inputs: Sequence[Value], layouts: Layouts, output_gradients: Layouts
) -> Layouts | None:
    """Return the layouts of the inputs' gradients; None if ``op`` is no linear layer, or DTensor runs its backward.

    Args:
        op: any op.
        inputs: the op's inputs.
        layouts: layout of each input.
        output_gradients: layout of the gradient of each output; None where none arrives.
    """
    if local_linear_outputs(op, inputs, layouts) is None:
        return None
    x, weight, gradient = layouts[0], layouts[1], output_gradients[0]
    assert x is not None
    assert weight is not None
    assert gradient is not None
    gradients = linear_gradients(gradient, x, weight, last_dim=len(inputs[0].shape) - 1)
    if gradients is None:
        return None
    # A layer without a bias has two inputs.
    return tuple(layout if value.requires_grad else None for layout, value in zip(gradients, inputs, strict=False))
