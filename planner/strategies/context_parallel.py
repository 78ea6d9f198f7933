"""Context parallelism: attention with the sequence split on one mesh axis, by all-gathering keys and values inside it.

Every rank saves its own shard of keys and values. The forward all-gathers keys and values. The backward all-gathers
them again and reduce-scatters their gradients.

Under a causal mask, the last rank's queries would see the most keys. Each rank's shard is therefore cut into two
chunks, and rank r of n computes the zigzag chunks r and 2n - 1 - r in place of its chunks 2r and 2r + 1: every such
pair sees equally many keys. All-to-alls exchange whole chunks of the queries, of the results, and of the gradients of
both. A chunk of c rows that starts at row s runs as two kernels: one over all keys before s, and one over its own c
keys with a square causal mask. The two results are merged by their log-sum-exps. ``executor.ops.context_parallel`` runs
this algorithm.

No chunks are exchanged if the model has its sequences in zigzag order throughout (`planner.plan.token_order`). One
causal kernel then computes both chunks of a rank over the rank's own keys, and overlaps with the all-gather. In the
backward, this kernel runs for about half of the heads while keys are all-gathered, and for the other heads while the
gradients of keys are reduce-scattered. The keys of other ranks are copied into the order in which the rank's chunks see
them, and need no mask. ``executor.ops.context_parallel.zigzag_attention`` runs this algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.distributed.tensor import Shard

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.strategies.axis_rule import InnerCollective, Kernel
from planner.strategies.context_parallel_work import ContextParallelWork, is_causal

OP_NAME = "aten.scaled_dot_product_attention.default"
SEQUENCE = Shard(2)
"""Placement of queries, keys and values, [batch, heads, seq, head_dim], with the sequence split."""


def dropout_of(op: Op) -> float:
    """Return attention's dropout probability in training."""
    return float(op.kwargs.get("dropout_p", op.args[4] if len(op.args) > 4 else 0.0))


def may_split(op: Op, inputs: Sequence[Value]) -> bool:
    """Return whether the sequence of attention can be split.

    Attention with dropout cannot be split: each kernel would have to draw the dropout pattern again. Attention with a
    learned mask cannot: the mask's gradient is not computed. Inference cannot: a KV cache has whole sequences. A causal
    mask has to be square. Tensors have four dims: batch, heads, sequence and features.

    Args:
        inputs: query, key, value, and the mask if there is one.
    """
    query, key, _ = inputs[:3]
    if len(query.shape) != 4:
        return False
    masks_need_gradients = any(mask.requires_grad for mask in inputs[3:])
    trained = all(value.requires_grad for value in inputs[:3])
    square = query.shape[2] == key.shape[2] and query.shape[2] > 1
    return not dropout_of(op) and not masks_need_gradients and trained and (square or not is_causal(op))


def splits_one_axis_at_most(layouts: Sequence[Layout | None]) -> bool:
    """Return whether attention with inputs in ``layouts`` has its sequence split on one mesh axis at most."""
    return all(layout is None or sum(place == SEQUENCE for place in layout) <= 1 for layout in layouts[:1])


def split_axis(op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int | None:
    """Return the mesh axis on which attention's sequence is split; None where it is not, or ``op`` is no attention."""
    if op.target_name != OP_NAME or layouts[0] is None:
        return None
    axes = [axis for axis, place in enumerate(layouts[0]) if place == SEQUENCE and mesh_shape[axis] > 1]
    return axes[0] if axes else None


def collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    shapes: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
) -> tuple[InnerCollective, ...]:
    """Return the collectives inside attention.

    Args:
        layouts: layouts of the inputs.
        shapes: local shapes of the inputs.
    """
    axis = split_axis(op, layouts, mesh_shape)
    if axis is None:
        return ()
    work = ContextParallelWork.of(op, shapes, inputs[0].dtype.itemsize, mesh_shape[axis])

    def of_keys(
        kind: CollectiveKind, phase: Literal["forward", "backward"], overlapped_with: Kernel | None
    ) -> InnerCollective:
        nbytes = work.gathered_nbytes
        return InnerCollective(kind=kind, axis=axis, nbytes=nbytes, phase=phase, overlapped_with=overlapped_with)

    first, *rest = work.own_backward_kernels if work.own_keys_first else (None, None)
    inner = [of_keys("all_gather", "forward", work.kernels[0] if work.own_keys_first else None)]
    if inputs[0].requires_grad:
        inner += [
            of_keys("all_gather", "backward", first),
            of_keys("reduce_scatter", "backward", rest[0] if rest else None),
        ]
    if work.exchanges_chunks:
        inner += [
            InnerCollective(kind="all_to_all", axis=axis, nbytes=nbytes, phase=phase)
            for phase in dict.fromkeys(collective.phase for collective in inner)
            for nbytes in (work.query_nbytes, work.result_nbytes)
        ]
    return tuple(inner)
