"""Rules of ours, for ops that DTensor refuses, gathers for, or gets wrong. The executor runs these ops by the same
rules.

`embedding`  DTensor's vocabulary-sharded lookup leaves a full-size replicated gradient.
`conv2d`     DTensor refuses a batch that is sharded on two axes.
`cross_entropy_loss`  DTensor gathers vocabulary-sharded logits, and averages ranks that ignore different numbers of
labels.
`scaled_dot_product_attention`  DTensor takes it apart where it has no rule for the kernel. Batch, heads, or queries and
keys (context parallelism: `planner.strategies.context_parallel`) are split.
`where` (a plain condition and a number, as in learned masks)  DTensor reduces a partial gradient inside the backward.
`shardplan.experts`  Our own op. Tokens, experts, both (`planner.strategies.expert_parallel`), or the inner dim of each
expert are split.

`shardplan.rms_norm`, `shardplan.gated`, `shardplan.rotary`, `shardplan.cross_entropy`  Ops of ours as well
(`fused_kernels`). Any dim is split but what a norm averages over and what a rotation turns; the loss is as above.

Each rule is for one mesh axis; the ops are separable, so that a strategy on several axes is one rule per axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, shard_counts, split_factor
from planner.graph.op_graph import Op, Value
from planner.model_rewrites import experts, fused_kernels
from planner.strategies import context_parallel, expert_parallel
from planner.strategies.inner_collectives import InnerCollective

R = Replicate()
P = Partial()
FUSED_GATE_UP = _StridedShard(1, split_factor=experts.GATE_UP_MATRICES)
"""Of the experts' gates and ups, which lie in one tensor one after the other, the same piece of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """One way to run an op on one axis: placements of inputs (None: plain), of the output, and of their gradients."""

    inputs: tuple[Placement | None, ...]
    output: Placement
    output_gradient: Placement
    input_gradients: tuple[Placement | None, ...]


def _embedding(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    ids = inputs[1]
    width = len(ids.shape)
    rules = [
        AxisRule(inputs=(R, R), output=R, output_gradient=R, input_gradients=(R, None)),
        AxisRule(inputs=(R, R), output=R, output_gradient=P, input_gradients=(P, None)),
        AxisRule(inputs=(Shard(0), R), output=P, output_gradient=R, input_gradients=(Shard(0), None)),
        AxisRule(
            inputs=(Shard(1), R), output=Shard(width), output_gradient=Shard(width), input_gradients=(Shard(1), None)
        ),
    ]
    for dim in range(width):
        rules.append(
            AxisRule(inputs=(R, Shard(dim)), output=Shard(dim), output_gradient=Shard(dim), input_gradients=(P, None))
        )
    if ids.kind == "plain":
        rules += [
            AxisRule(
                inputs=(rule.inputs[0], None),
                output=rule.output,
                output_gradient=rule.output_gradient,
                input_gradients=rule.input_gradients,
            )
            for rule in rules
            if rule.inputs[1] == R
        ]
    return rules


def _convolution(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    bias = len(inputs) == 3
    image = inputs[0].requires_grad

    def rule(
        x: Placement, weight: Placement, output: Placement, gradient: Placement, gx: Placement, gw: Placement
    ) -> AxisRule:
        tail_in: tuple[Placement, ...] = (weight,) if bias else ()
        tail_out: tuple[Placement, ...] = (gw,) if bias else ()
        return AxisRule(
            inputs=(x, weight, *tail_in),
            output=output,
            output_gradient=gradient,
            input_gradients=(gx if image else None, gw, *tail_out),
        )

    rules = [rule(R, R, R, R, R, R), rule(R, R, R, P, P, P), rule(Shard(0), R, Shard(0), Shard(0), Shard(0), P)]
    if _groups(op) == 1:
        rules.append(rule(R, Shard(0), Shard(1), Shard(1), P, Shard(0)))
    return rules


def _groups(op: Op) -> int:
    groups = op.kwargs.get("groups", op.args[6] if len(op.args) > 6 else 1)
    return int(groups)


def _cross_entropy(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    labels: tuple[Placement | None, ...] = (None,) if inputs[1].kind == "plain" else (R,)
    rules = [AxisRule(inputs=(R, *labels), output=R, output_gradient=R, input_gradients=(R, None))]
    if is_shardable_cross_entropy(op, inputs):
        rows = (Shard(0),) if inputs[1].kind != "plain" else (None,)
        rules.append(AxisRule(inputs=(Shard(0), *rows), output=R, output_gradient=R, input_gradients=(Shard(0), None)))
        rules.append(
            AxisRule(inputs=(Shard(1), *labels), output=R, output_gradient=R, input_gradients=(Shard(1), None))
        )
    return rules


def _attention(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    mask = inputs[3] if len(inputs) > 3 else None

    def rule(placement: Placement) -> AxisRule:
        masks: tuple[Placement | None, ...] = ()
        gradients: tuple[Placement | None, ...] = ()
        if mask is not None and mask.kind == "plain":
            masks, gradients = (None,), (None,)
        elif mask is not None:
            covered = not isinstance(placement, Shard) or mask.shape[placement.dim] > 1
            masks = (placement if covered else R,)
            gradients = ((placement if covered else P) if mask.requires_grad else None,)
        return AxisRule(
            inputs=(placement, placement, placement, *masks),
            output=placement,
            output_gradient=placement,
            input_gradients=(*(placement if value.requires_grad else None for value in inputs[:3]), *gradients),
        )

    if any(len(value.shape) != 4 for value in inputs):
        return [rule(R)]
    rules = [rule(R), rule(Shard(0)), rule(Shard(1))]
    if context_parallel.may_split(op, inputs):
        rules.append(rule(context_parallel.SEQUENCE))
    return rules


def _where(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    condition, tensor = inputs[0], inputs[-1]
    if len(inputs) != 2 or condition.kind != "plain" or len(condition.shape) != len(tensor.shape):
        return None
    gradient = tensor.requires_grad
    rules = [
        AxisRule(inputs=(None, R), output=R, output_gradient=g, input_gradients=(None, g if gradient else None))
        for g in (R, P)
    ]
    for dim in range(len(tensor.shape)):
        split = Shard(dim)
        rules.append(
            AxisRule(
                inputs=(None, split),
                output=split,
                output_gradient=split,
                input_gradients=(None, split if gradient else None),
            )
        )
    return rules


def _experts(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    def rule(
        tokens: Placement, matrices: tuple[Placement, Placement], output: Placement, gradients: tuple[Placement, ...]
    ) -> AxisRule:
        given = output if isinstance(output, Shard) else R  # sums that are not taken yet have a gradient that is whole
        needed = [value.requires_grad for value in inputs]
        found = (gradients[0], None, gradients[0], *gradients[1:])
        return AxisRule(
            inputs=(tokens, tokens, tokens, *matrices),
            output=output,
            output_gradient=given,
            input_gradients=tuple(place if need else None for place, need in zip(found, needed, strict=True)),
        )

    inner = (FUSED_GATE_UP, Shard(2))
    return [
        rule(R, (R, R), R, (R, R, R)),
        rule(Shard(0), (R, R), Shard(0), (Shard(0), P, P)),
        rule(R, (Shard(0), Shard(0)), P, (P, Shard(0), Shard(0))),
        rule(R, inner, P, (P, *inner)),
        rule(Shard(0), (Shard(0), Shard(0)), Shard(0), (Shard(0), Shard(0), Shard(0))),
    ]


def _rms_norm(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    splits = [Shard(dim) for dim in range(len(inputs[0].shape) - 1)]
    rules = [(R, R, R), (R, P, P), *((split, split, P) for split in splits)]
    return [_fused_rule(inputs, (given, R), gradient, (gradient, of_weight)) for given, gradient, of_weight in rules]


def _gated(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    splits = [Shard(dim) for dim in range(len(inputs[0].shape))]
    rules = [(R, R), (R, P), *((split, split) for split in splits)]
    return [_fused_rule(inputs, (given, given), gradient, (gradient, gradient)) for given, gradient in rules]


def _gated_pairs(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    # A piece of the last dim holds whole pairs: what they make is split evenly as well.
    splits = [Shard(dim) for dim in range(len(inputs[0].shape))]
    rules = [(R, R), (R, P), *((split, split) for split in splits)]
    return [_fused_rule(inputs, (given,), gradient, (gradient,)) for given, gradient in rules]


def _rotary(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    whole, angles = inputs[0].shape, inputs[1].shape
    each_sample = Shard(0) if angles[0] == whole[0] > 1 else R
    rules = [
        (R, R, R),
        (R, R, P),
        (Shard(0), each_sample, Shard(0)),
        (Shard(1), R, Shard(1)),
        (Shard(2), Shard(1), Shard(2)),
    ]
    return [
        _fused_rule(inputs, (given, turned, turned), gradient, (gradient, None, None))
        for given, turned, gradient in rules
    ]


def _fused_rule(
    inputs: Sequence[Value],
    given: tuple[Placement, ...],
    gradient: Placement,
    input_gradients: tuple[Placement | None, ...],
) -> AxisRule:
    """Return the rule of an op whose result is split as its first input is."""
    return AxisRule(
        inputs=tuple(
            None if value.kind == "plain" else placement for value, placement in zip(inputs, given, strict=True)
        ),
        output=given[0],
        output_gradient=gradient,
        input_gradients=tuple(
            placement if value.requires_grad else None for value, placement in zip(inputs, input_gradients, strict=True)
        ),
    )


def uncommon_placements(op: Op, position: int) -> tuple[Placement, ...]:
    """Return in which placements, beside whole and evenly split dims, a rule of ours takes an input of ``op``."""
    return (FUSED_GATE_UP,) if op.target_name == experts.OP_NAME and position == 3 else ()


def is_shardable_cross_entropy(op: Op, inputs: Sequence[Value]) -> bool:
    """Tell whether the loss is one that ours computes: class indices, two-dim logits, a mean or a sum, no smoothing."""
    if op.target_name == fused_kernels.CROSS_ENTROPY:
        return True
    if len(inputs) != 2 or len(inputs[0].shape) != 2 or inputs[1].dtype.is_floating_point:
        return False
    reduction = op.args[3] if len(op.args) > 3 else op.kwargs.get("reduction", 1)
    smoothing = op.args[5] if len(op.args) > 5 else op.kwargs.get("label_smoothing", 0.0)
    return reduction in (1, 2) and not smoothing


_OWN: dict[str, Callable[[Op, Sequence[Value]], list[AxisRule] | None]] = {
    "aten.embedding.default": _embedding,
    "aten.conv2d.default": _convolution,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.where.ScalarOther": _where,
    experts.OP_NAME: _experts,
    fused_kernels.RMS_NORM: _rms_norm,
    fused_kernels.GATED: _gated,
    fused_kernels.GATED_PAIRS: _gated_pairs,
    fused_kernels.ROTARY: _rotary,
    fused_kernels.CROSS_ENTROPY: _cross_entropy,
}


def own_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return our rules for ``op``, or None where DTensor's hold."""
    if op.target_name == "aten.embedding.default" and len(op.args) > 4 and op.args[4]:
        return None  # sparse gradients
    builder = _OWN.get(op.target_name)
    return builder(op, inputs) if builder is not None else None


def may_run(op: Op, placements: Sequence[Placement | None]) -> bool:
    """Tell whether we let DTensor run ``op`` with inputs so placed on one axis (beyond what DTensor itself accepts)."""
    # Sums that are still spread over ranks pass through linear ops on their own only: mixed with whole tensors they
    # gain nothing that reducing them at the boundary before does not.
    given = [placement for placement in placements if placement is not None]
    return all(placement == P for placement in given) or P not in given


def may_join(op: Op, layouts: Sequence[Layout | None]) -> bool:
    """Tell whether the rules that an op has on each axis go together, in ``layouts`` of its inputs."""
    if op.target_name == context_parallel.OP_NAME:
        return context_parallel.may_join(layouts)
    return len(expert_parallel.exchange_axes(op, layouts)) <= 1


def inner_collectives(
    op: Op, inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the collectives that an op of ours runs inside itself."""
    shapes = [piece_shape(value, layout, mesh_shape) for value, layout in zip(inputs, layouts, strict=True)]
    if op.target_name == context_parallel.OP_NAME:
        return context_parallel.collectives(op, inputs, layouts, shapes, mesh_shape)
    if op.target_name == experts.OP_NAME:
        return expert_parallel.collectives(op, inputs, layouts, shapes, mesh_shape)
    losses = ("aten.cross_entropy_loss.default", fused_kernels.CROSS_ENTROPY)
    if op.target_name in losses and is_shardable_cross_entropy(op, inputs):
        return _of_cross_entropy(inputs, layouts, mesh_shape)
    return ()


def _of_cross_entropy(
    inputs: Sequence[Value], layouts: Sequence[Layout | None], mesh_shape: Sequence[int]
) -> tuple[InnerCollective, ...]:
    """Return the collectives of a loss.

    Over split classes it reduces the rows' maxima, then their sums of exponentials and target logits together
    (float32); over split rows it reduces the sum of losses and the count of labels.
    """
    layout = layouts[0]
    assert layout is not None
    axes = [axis for axis, size in enumerate(mesh_shape) if size > 1]
    rows = inputs[0].shape[0]
    for axis in axes:
        if layout[axis] == Shard(0):
            rows //= mesh_shape[axis]
    classes = [axis for axis in axes if layout[axis] == Shard(1)]
    found = [InnerCollective(kind="all_reduce", axis=axis, nbytes=4 * rows) for axis in classes]
    found += [InnerCollective(kind="all_reduce", axis=axis, nbytes=8 * rows) for axis in classes]
    found += [InnerCollective(kind="all_reduce", axis=axis, nbytes=8) for axis in axes if layout[axis] == Shard(0)]
    return tuple(found)


def piece_shape(value: Value, layout: Layout | None, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one device's piece; a plain value (None) is whole everywhere."""
    if layout is None:
        return value.shape
    counts = shard_counts(layout, mesh_shape, len(value.shape))
    return tuple(length // count for length, count in zip(value.shape, counts, strict=True))


def work_split(layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int:
    """Return over how many ranks an op's work is divided: every axis on which any of its tensors is split."""
    split = 1
    for axis, size in enumerate(mesh_shape):
        one = [(layout[axis],) for layout in layouts if layout is not None]
        if any(split_factor(layout, (size,)) > 1 for layout in one):
            split *= size
    return split
