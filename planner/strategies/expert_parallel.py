"""Experts spread over an axis that splits the tokens as well: each token goes to its experts' ranks, and comes back.

Per call of the op that is, in all-to-alls: how many rows each expert gets from each rank, the rows, their weights, and
the results back; in the backward the results' gradients, and those of weights and rows back. A row is a token at one
of its experts. How many go where is in the data; priced, and run on meta, are experts that are equally busy.
``executor.ops.token_exchange`` moves the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import Layout
from planner.graph.op_graph import Op, Value
from planner.model_rewrites import experts
from planner.strategies.inner_collectives import InnerCollective

S0 = Shard(0)

_COUNT_NBYTES = 8


def exchange_axes(op: Op, layouts: Sequence[Layout | None]) -> list[int]:
    """Return the axes on which tokens and experts are both split, in ``layouts`` of the inputs."""
    if op.target_name != experts.OP_NAME or layouts[0] is None or layouts[4] is None:
        return []
    return [axis for axis, both in enumerate(zip(layouts[0], layouts[4], strict=True)) if both == (S0, S0)]


def exchange_ranks(op: Op, layouts: Sequence[Layout | None], mesh_shape: Sequence[int]) -> int:
    """Return among how many ranks tokens change places; 1: none does."""
    axes = exchange_axes(op, layouts)
    return mesh_shape[axes[0]] if axes else 1


def collectives(
    op: Op,
    inputs: Sequence[Value],
    layouts: Sequence[Layout | None],
    shapes: Sequence[tuple[int, ...]],
    mesh_shape: Sequence[int],
) -> tuple[InnerCollective, ...]:
    """Return what the op communicates on pieces of ``shapes``."""
    axes, ranks = exchange_axes(op, layouts), exchange_ranks(op, layouts, mesh_shape)
    if ranks == 1:
        return ()
    hidden, _, weights, *matrices = inputs
    work = experts.ExpertsWork.from_shapes(shapes, inputs[4].shape[0], hidden.dtype.itemsize, ranks)
    rows, of_weights = work.rows * work.width * work.itemsize, work.rows * weights.dtype.itemsize
    forward = [_COUNT_NBYTES * ranks * work.experts, rows, of_weights, rows]
    backward = []
    if any(value.requires_grad for value in (hidden, weights, *matrices)):
        backward = [rows] + [of_weights] * weights.requires_grad + [rows] * hidden.requires_grad
    return (
        *(InnerCollective(kind="all_to_all", axis=axes[0], nbytes=n) for n in forward),
        *(InnerCollective(kind="all_to_all", axis=axes[0], nbytes=n, phase="backward") for n in backward),
    )
