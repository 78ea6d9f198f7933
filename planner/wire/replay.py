"""The check that the ops of a graph from outside run, and return the tensors that the graph states.

The ops run on meta tensors, which hold no data, so the check takes neither memory nor a device. It is done in the
process that solves, which may be ended, and before anything is planned.
"""

from __future__ import annotations

import torch

from planner.errors import GraphFormatError
from planner.graph.op_graph import Op, OpGraph, at_batch
from planner.graph.run_op import run_op
from planner.graph.trace_module import BASE_BATCH, TracedModule
from planner.model_rewrites.tree_paths import tensors_in


def check_runs(module: TracedModule) -> None:
    """Check that all ops of a graph run, and return tensors of the stated shapes and dtypes.

    Raises:
        GraphFormatError: an op does not. The message names the first such op.
    """
    graph = at_batch(module.graph, module.traced_batch, BASE_BATCH) if module.any_batch else module.graph
    with torch.enable_grad():
        _run(graph)


def _run(graph: OpGraph) -> None:
    op_outputs = {name for op in graph.ops for name in op.outputs}
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(value.requires_grad)
        for name, value in graph.values.items()
        if name not in op_outputs
    }
    for op in graph.ops:
        results = _results(op, [tensors[name] for name in op.inputs])
        declared_values = [graph.values[name] for name in op.outputs]
        signatures = [(tuple(tensor.shape), tensor.dtype) for tensor in results]
        if signatures != [(value.shape, value.dtype) for value in declared_values]:
            what = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in signatures[:3])
            raise GraphFormatError.at(
                f"op {op.name[:100]}", f"it makes {what or 'no tensor'}, which is not what it says"
            )
        if any(tensor.device.type != "meta" for tensor in results):
            raise GraphFormatError.at(f"op {op.name[:100]}", "it makes a tensor that is not on the meta device")
        tensors.update(zip(op.outputs, results, strict=True))


def _results(op: Op, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        result = run_op(op, inputs)
    except Exception as error:  # whatever torch raises over arguments that do not go together
        message = " ".join(str(error).split())[:200]
        raise GraphFormatError.at(
            f"op {op.name[:100]}", f"it does not run: {type(error).__name__}: {message}"
        ) from error
    return tensors_in(result)
