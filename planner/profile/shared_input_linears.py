"""Shared-input linears: linear layers that read the same tensor and accumulate its gradient inside their GEMMs.

In the backward the last of these layers writes the gradient of their common input. Each earlier one adds to it in its
own GEMM (``beta=1``), so that autograd runs no addition. `executor.ops.shared_input_linears` carries this out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from planner.graph.op_graph import LINEAR, OpGraph, later_uses
from planner.regions.regions import block_of


class GradientSums(NamedTuple):
    """Positions of an op's inputs whose gradient is added to that of another use; see `planner.profile.op_profile`."""

    autograd_sums: tuple[int, ...] = ()
    gemm_sums: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


def gradient_sums(graph: OpGraph, *, shared_input_linears: bool) -> dict[str, GradientSums]:
    """Return op name -> its inputs whose gradient is added to that of another use; ops without any are left out.

    Args:
        shared_input_linears: whether the linear layers of a block that read the same tensor accumulate its gradient in
            their GEMMs. All of them together are then one use of the tensor. Layers of different blocks do not join:
            under checkpointing a block reads tensors of its own in its recomputation.
    """
    accumulating, followers = _accumulating_linears(graph) if shared_input_linears else ({}, frozenset[str]())
    sums = {}
    for name, positions in later_uses(graph).items():
        by_autograd = tuple(position for position in positions if position or name not in followers)
        by_gemm, in_place = name in accumulating, accumulating.get(name, False)
        if by_autograd or by_gemm:
            sums[name] = GradientSums(by_autograd, (0,) if by_gemm else (), (0,) if in_place else ())
    return sums


def _accumulating_linears(graph: OpGraph) -> tuple[dict[str, bool], frozenset[str]]:
    """Return (layer -> whether its GEMM adds in place, all layers but the first of each group).

    The mapping has the linear layers whose GEMM adds to an existing gradient. A GEMM adds in place if the layers of its
    group are the only uses of the tensor: then no other gradient of the tensor exists at that time.
    """
    readers: dict[tuple[str | None, str], list[str]] = defaultdict(list)
    uses: dict[str, int] = defaultdict(int)
    for op in graph.ops:
        for name in op.inputs:
            uses[name] += any(graph.values[output].requires_grad for output in op.outputs)
        value = graph.values[op.inputs[0]] if op.inputs else None
        if op.target_name == LINEAR and value is not None and value.requires_grad and value.kind != "input":
            readers[block_of(graph.calls[op.call].fqn), value.name].append(op.name)
    accumulating = {name: uses[value] == len(ops) for (_, value), ops in readers.items() for name in ops[:-1]}
    return accumulating, frozenset(name for ops in readers.values() for name in ops[1:])
