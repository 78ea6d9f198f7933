"""Expert parallelism: experts sharded over a mesh axis that also shards tokens; ranks exchange tokens by all-to-all.

Each forward call runs four all-to-alls: the number of rows for each expert from each rank, the rows, their routing
weights, and the results back. A row is a token at one of its experts. The backward exchanges the gradients of results,
of weights and of rows. The number of rows depends on the data; the planner prices experts with equal loads.
``executor.ops.token_exchange`` moves the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.model_rewrites.experts.experts_op import OP_NAME, ExpertsArguments
from planner.model_rewrites.experts.work import ExpertsWork
from planner.strategies.axis_rule import InnerCollective

S0 = Shard(0)

_COUNT_NBYTES = 8


def exchange_axes(op: Op, layouts: Sequence[Layout | None]) -> list[int]:
    """Return the mesh axes that shard both tokens and experts, with the op's inputs in ``layouts``."""
    if op.target_name != OP_NAME or layouts[0] is None or layouts[4] is None:
        return []
    return [axis for axis, both in enumerate(zip(layouts[0], layouts[4], strict=True)) if both == (S0, S0)]


def exchange_ranks(op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int:
    """Return the number of ranks that exchange tokens; 1 where none do."""
    axes = exchange_axes(op, layouts)
    return mesh_shape[axes[0]] if axes else 1


def collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    shapes: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
) -> tuple[InnerCollective, ...]:
    """Return the all-to-alls inside the experts' op.

    Args:
        layouts: layouts of the inputs.
        shapes: local shapes of the inputs.
    """
    axes, ranks = exchange_axes(op, layouts), exchange_ranks(op, layouts, mesh_shape)
    if ranks == 1:
        return ()
    hidden, _, weights, *matrices = inputs
    work = ExpertsWork.from_shapes(
        ExpertsArguments(*op.args).form, shapes, inputs[4].shape[0], hidden.dtype.itemsize, ranks
    )
    counts_nbytes = _COUNT_NBYTES * ranks * work.experts
    rows_nbytes, weights_nbytes = work.rows * work.width * work.itemsize, work.rows * weights.dtype.itemsize
    forward = [counts_nbytes, rows_nbytes, weights_nbytes, rows_nbytes]
    backward = []
    if any(value.requires_grad for value in (hidden, weights, *matrices)):
        backward.append(rows_nbytes)
        backward += [weights_nbytes] * weights.requires_grad + [rows_nbytes] * hidden.requires_grad
    return (
        *(InnerCollective(kind="all_to_all", axis=axes[0], nbytes=nbytes) for nbytes in forward),
        *(InnerCollective(kind="all_to_all", axis=axes[0], nbytes=nbytes, phase="backward") for nbytes in backward),
    )
