"""Sharding rules of the executor's own ops: ops that DTensor refuses, all-gathers for or gets wrong, and fused ops.

The executor runs these ops by the same rules (``executor.ops.dispatch``).

`embedding`  DTensor's lookup in a vocabulary-sharded table leaves a replicated gradient of full size.
`embedding_bag`  DTensor has no rule.
`conv1d` to `conv3d`, `conv_transpose1d` to `3d`  DTensor refuses most of them, and a batch that is sharded
on two axes.
`cross_entropy_loss`  DTensor all-gathers vocabulary-sharded logits, and averages over ranks that ignore different
numbers of labels.
`sum`, `mean` to one number or over the first dim, losses  `planner.strategies.reduction_rules`.
`scaled_dot_product_attention`  DTensor decomposes it where it has no rule for the kernel. The rules shard the batch,
heads, or the sequence (context parallelism: `planner.strategies.context_parallel`).
`matmul`, `mm` of two activations  DTensor would gather one factor unasked (`planner.strategies.matmul_rules`).
`where` (a plain condition and a number, as in learned masks)  DTensor reduces a partial gradient inside the backward.
`shardplan.experts`  The rules shard tokens, experts, both (`planner.strategies.expert_parallel`), or the inner dim of
each expert.
`shardplan.rms_norm`, `.gated`, `.gated_pairs`, `.rotary`, `.cross_entropy`  Fused ops
(`planner.model_rewrites.fused_kernels`). The rules shard every dim except the dim that a norm reduces or a rotation
pairs. The rules of the loss are those of `cross_entropy_loss`.

`shardplan.opaque`  Modules that cannot be traced, and local ops (`planner.strategies.local_ops`).

`shardplan.cached_state`, `.with_new_token`  What layers keep, in a step of decoding (`planner.graph.layer_caches`).

`batch_norm`, `instance_norm`, writes to buffers  DTensor loses the writes, or refuses them
(`planner.strategies.buffer_updates`).

Each rule holds on one mesh axis. A strategy on several axes has one rule for each axis; `axis_rules_combine` lists the
exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout
from cost_model.layouts.products import gathered_axes, product_layout
from planner.graph.layer_caches import decoding_step
from planner.graph.op_graph import Op, Value, writes_plain
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts import experts_op
from planner.model_rewrites.experts.experts_op import ExpertsArguments
from planner.model_rewrites.experts.placements import experts_placements
from planner.strategies import buffer_updates, context_parallel, expert_parallel
from planner.strategies import reduction_rules as reductions
from planner.strategies.axis_rule import AxisRule
from planner.strategies.local_ops import local_rules, opaque_rules
from planner.strategies.matmul_rules import PRODUCTS, product_rules

R = Replicate()
P = Partial()

_EXPERTS_WEIGHTS = 3
"""Position of the first of the weights among the inputs of the op of experts."""


def _embedding(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    ids = inputs[1]
    width = len(ids.shape)
    rules = [
        AxisRule(inputs=(R, R), outputs=(R,), output_gradients=(R,), input_gradients=(R, None)),
        AxisRule(inputs=(R, R), outputs=(R,), output_gradients=(P,), input_gradients=(P, None)),
        AxisRule(inputs=(Shard(0), R), outputs=(P,), output_gradients=(R,), input_gradients=(Shard(0), None)),
        AxisRule(
            inputs=(Shard(1), R),
            outputs=(Shard(width),),
            output_gradients=(Shard(width),),
            input_gradients=(Shard(1), None),
        ),
    ]
    for dim in range(width):
        rules.append(
            AxisRule(
                inputs=(R, Shard(dim)), outputs=(Shard(dim),), output_gradients=(Shard(dim),), input_gradients=(P, None)
            )
        )
    if ids.kind == "plain":
        rules += [
            AxisRule(
                inputs=(rule.inputs[0], None),
                outputs=rule.outputs,
                output_gradients=rule.output_gradients,
                input_gradients=rule.input_gradients,
            )
            for rule in rules
            if rule.inputs[1] == R
        ]
    return rules


_MAX_BAG = 2
"""`mode` of ``aten.embedding_bag`` that takes the largest value of each bag."""


def _embedding_bag(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rules of bags without weights: those of a lookup, whose ids are flat, with offsets that are whole."""
    (by_frequency, mode, sparse), ids, offsets = op.args[3:6], inputs[1], inputs[2]
    if len(inputs) != 3 or by_frequency or sparse:
        return None
    # Bags in [bags, bag] have offsets that torch makes, plain ones. Bags of a caller's offsets are not split.
    splits_bags = offsets.kind == "plain" and ids.shape[0] % offsets.shape[0] == 0
    rules = [
        rule
        for rule in _embedding(op, inputs[:2])
        if (splits_bags or rule.inputs[1] != Shard(0)) and (mode != _MAX_BAG or rule.inputs[0] != Shard(0))
    ]
    whole = None if offsets.kind == "plain" else R
    return [
        AxisRule(
            inputs=(*rule.inputs, whole),
            outputs=(*rule.outputs, R, R, R),
            output_gradients=(*rule.output_gradients, None, None, None),
            input_gradients=(*rule.input_gradients, None),
        )
        for rule in rules
    ]


def _convolution(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    has_bias = len(inputs) == 3
    needs_image_gradient = inputs[0].requires_grad
    is_transposed = "transpose" in op.target_name
    if len(inputs[0].shape) != len(inputs[1].shape) or _pads_unevenly(op, inputs[1]):
        return None

    def rule(
        image: Placement,
        weight: Placement,
        output: Placement,
        output_gradient: Placement,
        image_gradient: Placement,
        weight_gradient: Placement,
    ) -> AxisRule:
        def of_bias(placement: Placement) -> tuple[Placement, ...]:
            return ((Shard(0) if isinstance(placement, Shard) else placement),) if has_bias else ()

        needed = (needs_image_gradient, inputs[1].requires_grad, has_bias and inputs[-1].requires_grad)
        gradients = (image_gradient, weight_gradient, *of_bias(weight_gradient))
        return AxisRule(
            inputs=(image, weight, *of_bias(weight)),
            outputs=(output,),
            output_gradients=(output_gradient,),
            input_gradients=tuple(place if need else None for place, need in zip(gradients, needed, strict=False)),
        )

    rules = [rule(R, R, R, R, R, R), rule(R, R, R, P, P, P), rule(Shard(0), R, Shard(0), Shard(0), Shard(0), P)]
    if _groups(op) == 1:
        channels = Shard(1 if is_transposed else 0)
        rules.append(rule(R, channels, Shard(1), Shard(1), P, channels))
    return rules


def _groups(op: Op) -> int:
    """Return the number of groups of a convolution, transposed or not."""
    groups = op.kwargs.get("groups", op.args[6] if len(op.args) > 6 else 1)
    return int(groups)


def _pads_unevenly(op: Op, weight: Value) -> bool:
    """Return whether a convolution pads one side more than the other, which ``padding="same"`` may ask for."""
    if op.kwargs.get("padding", op.args[4] if len(op.args) > 4 else 0) != "same":
        return False
    dilation = op.kwargs.get("dilation", op.args[5] if len(op.args) > 5 else 1)
    spacing = [dilation] if isinstance(dilation, int) else list(dilation)
    spacing = spacing * (len(weight.shape) - 2) if len(spacing) == 1 else spacing
    return any(step * (length - 1) % 2 for step, length in zip(spacing, weight.shape[2:], strict=True))


def _cross_entropy(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    if not is_shardable_cross_entropy(op, inputs):
        return reductions.reduction_rules(op, inputs)

    def rule(logits: Placement, labels: Placement) -> AxisRule:
        given = None if inputs[1].kind == "plain" else labels
        return AxisRule(inputs=(logits, given), outputs=(R,), output_gradients=(R,), input_gradients=(logits, None))

    return [rule(R, R), rule(Shard(0), Shard(0)), rule(Shard(1), R)]


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
            outputs=(placement,),
            output_gradients=(placement,),
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
    needs_gradient = tensor.requires_grad
    rules = [
        AxisRule(
            inputs=(None, R),
            outputs=(R,),
            output_gradients=(gradient,),
            input_gradients=(None, gradient if needs_gradient else None),
        )
        for gradient in (R, P)
    ]
    for dim in range(len(tensor.shape)):
        split = Shard(dim)
        rules.append(
            AxisRule(
                inputs=(None, split),
                outputs=(split,),
                output_gradients=(split,),
                input_gradients=(None, split if needs_gradient else None),
            )
        )
    return rules


def _experts(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    rules = []
    for place in experts_placements(ExpertsArguments(*op.args).form):
        gradients = (place.tokens_gradient, None, place.tokens_gradient, *place.weight_gradients)[: len(inputs)]
        needed = [value.requires_grad for value in inputs]
        rules.append(
            AxisRule(
                inputs=(place.tokens, place.tokens, place.tokens, *place.weights)[: len(inputs)],
                outputs=(place.result,),
                # A partial result has a replicated gradient.
                output_gradients=(place.result if isinstance(place.result, Shard) else R,),
                input_gradients=tuple(each if need else None for each, need in zip(gradients, needed, strict=True)),
            )
        )
    return rules


def _rms_norm(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    splits = [Shard(dim) for dim in range(len(inputs[0].shape) - 1)]
    rules = [(R, R, R), (R, P, P), *((split, split, P) for split in splits)]
    return [
        _fused_rule(inputs, (placement, R), gradient, (gradient, weight_gradient))
        for placement, gradient, weight_gradient in rules
    ]


def _gated(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    splits = [Shard(dim) for dim in range(len(inputs[0].shape))]
    rules = [(R, R), (R, P), *((split, split) for split in splits)]
    return [
        _fused_rule(inputs, (placement, placement), gradient, (gradient, gradient)) for placement, gradient in rules
    ]


def _gated_pairs(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    # Gate and up alternate along the last dim: a shard of that dim has whole pairs, and the result is sharded evenly.
    splits = [Shard(dim) for dim in range(len(inputs[0].shape))]
    rules = [(R, R), (R, P), *((split, split) for split in splits)]
    return [_fused_rule(inputs, (placement,), gradient, (gradient,)) for placement, gradient in rules]


def _rotary(op: Op, inputs: Sequence[Value]) -> list[AxisRule]:
    shape, angles_shape = inputs[0].shape, inputs[1].shape
    batch_of_angles = Shard(0) if angles_shape[0] == shape[0] > 1 else R
    rules = [
        (R, R, R),
        (R, R, P),
        (Shard(0), batch_of_angles, Shard(0)),
        (Shard(1), R, Shard(1)),
        (Shard(2), Shard(1), Shard(2)),
    ]
    return [
        _fused_rule(inputs, (placement, angles_placement, angles_placement), gradient, (gradient, None, None))
        for placement, angles_placement, gradient in rules
    ]


def _fused_rule(
    inputs: Sequence[Value],
    placements: tuple[Placement, ...],
    output_gradient: Placement,
    input_gradients: tuple[Placement | None, ...],
) -> AxisRule:
    """Return the rule of a fused op, whose output has the placement of its first input."""
    return AxisRule(
        inputs=tuple(
            None if value.kind == "plain" else placement for value, placement in zip(inputs, placements, strict=True)
        ),
        outputs=(placements[0],),
        output_gradients=(output_gradient,),
        input_gradients=tuple(
            placement if value.requires_grad else None for value, placement in zip(inputs, input_gradients, strict=True)
        ),
    )


def strided_placements(op: Op, position: int) -> tuple[Placement, ...]:
    """Return the strided shards that a rule of ``op`` has for the input at ``position``."""
    if op.target_name != experts_op.OP_NAME or position < _EXPERTS_WEIGHTS:
        return ()
    places = experts_placements(ExpertsArguments(*op.args).form)
    weights = (place.weights[position - _EXPERTS_WEIGHTS] for place in places)
    return tuple(weight for weight in weights if isinstance(weight, _StridedShard))


def is_shardable_cross_entropy(op: Op, inputs: Sequence[Value]) -> bool:
    """Return whether the executor can run a loss sharded: class indices, 2-dim logits, mean or sum, no smoothing."""
    if op.target_name == fused_kernels.CROSS_ENTROPY:
        return True
    if len(inputs) != 2 or len(inputs[0].shape) != 2 or inputs[1].dtype.is_floating_point:
        return False
    reduction = op.args[3] if len(op.args) > 3 else op.kwargs.get("reduction", 1)
    smoothing = op.args[5] if len(op.args) > 5 else op.kwargs.get("label_smoothing", 0.0)
    return reduction in (1, 2) and not smoothing


_RULES: dict[str, Callable[[Op, Sequence[Value]], list[AxisRule] | None]] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.embedding_bag.default": _embedding_bag,
    **{
        f"aten.{name}": _convolution
        for dims in ("1d", "2d", "3d")
        for name in (f"conv{dims}.default", f"conv{dims}.padding")
    },
    "aten.conv_transpose1d.default": _convolution,
    "aten.conv_transpose2d.input": _convolution,
    "aten.conv_transpose3d.input": _convolution,
    "aten.cross_entropy_loss.default": _cross_entropy,
    **dict.fromkeys(reductions.NAMES, reductions.reduction_rules),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.where.ScalarOther": _where,
    **dict.fromkeys(PRODUCTS, product_rules),
    experts_op.OP_NAME: _experts,
    opaque_op.OP_NAME: opaque_rules,
    decoding_step.OP_NAME: buffer_updates.cached_state_rules,
    decoding_step.APPEND: buffer_updates.append_rules,
    fused_kernels.RMS_NORM: _rms_norm,
    fused_kernels.GATED: _gated,
    fused_kernels.GATED_PAIRS: _gated_pairs,
    fused_kernels.ROTARY: _rotary,
    fused_kernels.CROSS_ENTROPY: _cross_entropy,
    buffer_updates.BATCH_NORM: buffer_updates.batch_norm_rules,
    buffer_updates.INSTANCE_NORM: buffer_updates.instance_norm_rules,
}


def own_rules(op: Op, inputs: Sequence[Value]) -> list[AxisRule] | None:
    """Return the rules of ``op``; None for an op that DTensor runs."""
    if op.target_name == "aten.embedding.default" and len(op.args) > 4 and op.args[4]:
        return None  # sparse gradients
    if op.is_local:
        return local_rules(op, inputs)
    if writes_plain(op, inputs):
        return buffer_updates.write_rules(op, inputs)
    builder = _RULES.get(op.target_name)
    return builder(op, inputs) if builder is not None else None


def dtensor_may_run(op: Op, placements: Sequence[Placement | None]) -> bool:
    """Return whether DTensor is asked to run ``op`` with inputs in these placements on one axis.

    Partial inputs are excluded unless all inputs are partial: a linear op on a partial and a replicated tensor is no
    better than a reduction of the partial tensor at the preceding boundary.
    """
    sharded = [placement for placement in placements if placement is not None]
    return all(placement == P for placement in sharded) or P not in sharded


def axis_rules_combine(op: Op, layouts: Sequence[Layout | None]) -> bool:
    """Return whether an op whose rules allow ``layouts`` on each axis also runs in ``layouts`` on the whole mesh."""
    if op.target_name == context_parallel.OP_NAME:
        return context_parallel.splits_one_axis_at_most(layouts)
    if op.target_name in PRODUCTS and None not in layouts:
        first, second = (layout for layout in layouts if layout is not None)
        return not gathered_axes(first, second) or product_layout(first, second) is not None
    return len(expert_parallel.exchange_axes(op, layouts)) <= 1
