"""Vocabularies that no axis divides, such as 50,257, planned as if they were a little longer.

torch splits a dim of any length, into pieces of which the last may be shorter. A plan with such pieces is that of a
graph in which the length is rounded up: its bytes, FLOPs and messages follow from the largest piece. Nothing is padded
when the plan runs. True lengths are in `OpGraph.rounded`, for the bytes of collectives and the rows of GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from cost_model import ClusterSpec
from cost_model.layouts.uneven import rounded_length
from planner.graph.op_graph import LINEAR, Op, OpGraph, build_digraph
from planner.graph.trace_module import TRACE_BATCH, TracedModule
from planner.model_rewrites import fused_kernels

_LOOKUP = "aten.embedding.default"

_OPS = frozenset({
    *(_LOOKUP, LINEAR, "aten.cross_entropy_loss.default", fused_kernels.CROSS_ENTROPY),
    *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.slice.Tensor"),
    *("aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default", "aten.contiguous.default"),
    *("aten.detach.default", "aten.alias.default"),
})  # fmt: skip
"""Ops that run on uneven pieces of a vocabulary, as elementwise ops do."""


def with_rounded_lengths(module: TracedModule, cluster: ClusterSpec) -> TracedModule:
    """Return ``module`` with each vocabulary that the devices of a node do not divide rounded up to what all divide.

    A vocabulary is dim 0 of a table of embeddings, and only ops in `_OPS` and elementwise ops read it. `rounded_length`
    says how far it is rounded up.
    """
    graph = module.graph
    longest = {
        length: rounded_length(length, cluster.devices_per_node, cluster.size) for length in _vocabularies(graph)
    }
    # A length that is not rounded up is in the graph, too.
    others = {length for value in graph.values.values() for length in value.shape}
    lengths = {length: longer for length, longer in longest.items() if longer not in others and longer % TRACE_BATCH}
    if not lengths:
        return module
    ops = [replace(op, args=_with(op.args, lengths), kwargs=_with(dict(op.kwargs), lengths)) for op in graph.ops]
    values = {name: replace(value, shape=_with(value.shape, lengths)) for name, value in graph.values.items()}
    rounded = {longer: length for length, longer in lengths.items()}
    return replace(module, graph=replace(graph, digraph=build_digraph(ops), values=values, rounded=rounded))


def _vocabularies(graph: OpGraph) -> set[int]:
    tables = {op.inputs[0] for op in graph.ops if op.target_name == _LOOKUP}
    found = {graph.values[table].shape[0] for table in tables if graph.values[table].kind == "parameter"}
    for op in graph.ops:
        if not _runs_uneven(op):
            found -= set(_lengths(graph, op))
    return found


def _lengths(graph: OpGraph, op: Op) -> Iterable[int]:
    return (length for name in (*op.inputs, *op.outputs) for length in graph.values[name].shape)


def _runs_uneven(op: Op) -> bool:
    is_elementwise = isinstance(op.target, torch._ops.OpOverload) and torch.Tag.pointwise in op.target.tags
    return is_elementwise or op.target_name in _OPS


def _with(template: Any, lengths: Mapping[int, int]) -> Any:
    """Return a shape, or an op's arguments, with each of ``lengths`` rounded up."""
    if isinstance(template, (tuple, list)):
        return type(template)(_with(part, lengths) for part in template)
    if isinstance(template, Mapping):
        return {key: _with(part, lengths) for key, part in template.items()}
    return lengths.get(template, template) if type(template) is int else template
