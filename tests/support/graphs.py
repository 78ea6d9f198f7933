"""What two graphs have to agree in to be one graph, whatever their values are called."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from planner.graph.op_graph import OpGraph, Ref


def canonical(graph: OpGraph) -> dict[str, Any]:
    """Return ``graph`` with parameters by FQN, inputs by path, and every other value by the order in which it comes."""
    names: dict[str, Any] = {value: ("parameter", fqns) for value, fqns in graph.parameters.items()}
    names.update({given.value: ("input", given.path) for given in graph.inputs})

    def described(name: str) -> Any:
        value = graph.values[name]
        number = names.setdefault(name, ("value", len(names)))
        return number, value.shape, value.dtype, value.kind, value.requires_grad

    def leaf(item: Any) -> Any:
        return described(item.value) if isinstance(item, Ref) else repr(item)

    ops = [
        (
            getattr(op.target, "code", op.target),
            pytree.tree_map(leaf, (op.args, dict(op.kwargs)), is_leaf=lambda item: isinstance(item, Ref)),
            op.call,
            [described(name) for name in op.inputs],
            op.crossings,
            [described(name) for name in op.outputs],
            op.grad_enabled,
        )
        for op in graph.ops
    ]
    return {
        "ops": ops,
        "calls": graph.calls,
        "inputs": [described(given.value) for given in graph.inputs],
        "outputs": [(described(out.value), out.path, out.crossings, out.is_loss) for out in graph.outputs],
        "parameters": [(fqns, described(value)) for value, fqns in graph.parameters.items()],
        "values": len(graph.values),
        "edges": graph.digraph.number_of_edges(),
    }
