"""Matrix products that the executor runs on local tensors: linear layers, and products of two activations.

The executor runs both (`executor.ops.linear`). Of linear layers DTensor need not be asked. Contrastive losses compare
each sample of a batch with each other. Where both factors are split by samples, the second is gathered inside the op,
and all that comes before it, as pooling and norms, stays data-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout
from cost_model.layouts.linear import linear_gradients, linear_layout
from cost_model.layouts.products import PRODUCTS_OF, gathered_axes, product_gradients
from planner.graph.op_graph import LINEAR, Op, Value
from planner.strategies.axis_rule import AxisRule, InnerCollective
from planner.strategies.dtensor_rules import Layouts

PRODUCTS = ("aten.matmul.default", "aten.mm.default")

R, P, S0 = Replicate(), Partial(), Shard(0)


def product_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rules of a product of two activations, both of two dims; None for any other product."""
    if [len(value.shape) for value in inputs] != [2, 2]:
        return None
    if any(value.kind in ("plain", "parameter") or value.dtype.is_complex for value in inputs):
        return None
    rules = []
    for pair, output in PRODUCTS_OF.items():
        for gradient in (R, P) if pair == (R, R) else (R,) if output == P else (output,):
            gradients = product_gradients((gradient,), *((place,) for place in pair))
            assert gradients is not None
            rules.append(
                AxisRule(
                    inputs=pair,
                    outputs=(output,),
                    output_gradients=(gradient,),
                    input_gradients=tuple(
                        layout[0] if value.requires_grad else None
                        for layout, value in zip(gradients, inputs, strict=True)
                    ),
                )
            )
    return rules


def product_collectives(
    inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the collectives of a product: the second factor is gathered for each pass, and its gradient scattered."""
    first, second = layouts
    assert first is not None
    assert second is not None
    axis = next((axis for axis in gathered_axes(first, second) if mesh_shape[axis] > 1), None)
    if axis is None:
        return ()
    rows = inputs[1].shape[0]
    for other, place in enumerate(second):
        if place == S0:
            rows //= mesh_shape[other]
    nbytes = rows * inputs[1].shape[1] * inputs[1].dtype.itemsize
    found = [InnerCollective(kind="all_gather", axis=axis, nbytes=nbytes)]
    if inputs[0].requires_grad:
        found.append(InnerCollective(kind="all_gather", axis=axis, nbytes=nbytes, phase="backward"))
    if inputs[1].requires_grad:
        found.append(InnerCollective(kind="reduce_scatter", axis=axis, nbytes=nbytes, phase="backward"))
    return tuple(found)


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
