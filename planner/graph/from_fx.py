"""From a module and its inputs to an `OpGraph`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.graph.capture import (
    CapturedGraph,
    ExampleInputs,
    as_target,
    export,
    module_names,
    path_text,
    symbolic_trace,
)
from planner.graph.fold import repeats_of, without_repeats
from planner.graph.op_graph import Crossing, ModelInput, ModelOutput, Op, OpGraph, Ref, Value, ValueKind, build_digraph
from planner.graph.unroll import unroll


def trace(module: nn.Module, inputs: ExampleInputs) -> OpGraph:
    """Return the op graph of one call of ``module``.

    Args:
        module: any module; see `to_meta`.
        inputs: the arguments of the call, on the meta device.

    Raises:
        ModelError: neither torch.export nor torch.fx can capture it; the message names the module and the reason.
    """
    folded = _folded(module, inputs)
    if folded is not None:
        return folded
    try:
        captured = export(module, inputs)
    except Exception as refusal:  # noqa: BLE001  whatever forward or export raises is the reason to report
        try:
            captured = symbolic_trace(module, inputs)
        except Exception as second:  # noqa: BLE001
            raise ModelError(
                f"cannot trace {type(module).__name__}{_culprit(module, refusal)}: "
                f"torch.export says {_reason(refusal)}; torch.fx says {_reason(second)}.",
                what_to_do="Check that it runs on these inputs, and keep data-dependent control flow out of forward.",
            ) from refusal
    return _Reader(module, captured).read()


def _folded(module: nn.Module, inputs: ExampleInputs) -> OpGraph | None:
    """Return the op graph of a module with repeats, of which only a few blocks are traced; None where it has none."""
    repeats = repeats_of(module, inputs)
    if not repeats:
        return None
    names: dict[int, list[str]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    try:
        with without_repeats(module, repeats):
            short = _Reader(module, export(module, inputs)).read()
        return unroll(short, repeats, [tuple(fqns) for fqns in names.values()])
    except Exception:  # noqa: BLE001  tracing in full reports what there is to report
        return None


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def _culprit(module: nn.Module, error: BaseException) -> str:
    """Name the innermost submodule whose forward raised ``error``."""
    names = module_names(module)
    found, frame = "", error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names and frame.tb_frame.f_code.co_name == "forward":
            found = f", in its module {names[owner] or '(root)'!r} ({type(owner).__name__})"
        frame = frame.tb_next
    return found


@dataclass(slots=True)
class _Arrival:
    """A value as seen at one point of the fx graph: what it is, and the boundaries crossed since it was made."""

    value: str
    crossings: tuple[Crossing, ...]


class _Reader:
    """Reads the captured fx graph into an `OpGraph`: markers become crossings, the rest become ops and values."""

    def __init__(self, module: nn.Module, captured: CapturedGraph) -> None:
        self._module = module
        self._captured = captured
        self._values: dict[str, Value] = {}
        self._arrivals: dict[torch.fx.Node, Any] = {}
        self._ops: list[Op] = []
        self._parameters: dict[str, str] = {}
        self._inputs: list[ModelInput] = []
        self._outputs: list[ModelOutput] = []
        self._stack: list[int] = [0]

    def read(self) -> OpGraph:
        for node in self._captured.graph.nodes:
            getattr(self, f"_read_{node.op}")(node)
        fqns: dict[int, list[str]] = {}
        for fqn, parameter in self._module.named_parameters(remove_duplicate=False):
            fqns.setdefault(id(parameter), []).append(fqn)
        state = dict(self._module.named_parameters(remove_duplicate=False))
        return OpGraph(
            digraph=build_digraph(self._ops),
            values=self._values,
            calls=self._captured.calls,
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            parameters={value: tuple(fqns[id(state[fqn])]) for value, fqn in self._parameters.items()},
        )

    def _add_value(self, name: str, tensor: torch.Tensor, kind: ValueKind, requires_grad: bool) -> None:
        shape = tuple(map(int, tensor.shape))
        self._values[name] = Value(name=name, shape=shape, dtype=tensor.dtype, kind=kind, requires_grad=requires_grad)

    def _read_placeholder(self, node: torch.fx.Node) -> None:
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            self._arrivals[node] = tensor
            return
        if node.name in self._captured.parameters:
            self._read_parameter(node, tensor)
            return
        kind: ValueKind = "plain" if node.name in self._captured.buffers else "input"
        self._add_value(node.name, tensor, kind, False)
        self._arrivals[node] = _Arrival(node.name, ())

    def _read_parameter(self, node: torch.fx.Node, tensor: torch.Tensor) -> None:
        fqn = self._captured.parameters[node.name]
        state = dict(self._module.named_parameters(remove_duplicate=False))
        parameter = state[fqn]
        known = next((value for value, name in self._parameters.items() if state[name] is parameter), None)
        if known is None:
            self._add_value(node.name, tensor, "parameter", parameter.requires_grad)
            self._parameters[node.name] = fqn
        self._arrivals[node] = _Arrival(known or node.name, ())

    def _read_get_attr(self, node: torch.fx.Node) -> None:
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            self._add_value(node.name, tensor, "plain", False)
            self._arrivals[node] = _Arrival(node.name, ())
        else:
            owner: Any = self._captured.owner
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            self._arrivals[node] = owner

    def _read_call_function(self, node: torch.fx.Node) -> None:
        if node.target is torch.ops.shardplan.boundary.default or node.target is torch.ops.shardplan.boundary:
            self._read_marker(node)
        elif "_assert" in str(node.target) or "sym_constrain" in str(node.target):
            return
        elif (
            getattr(node.target, "__name__", "") == "getitem"
            and not isinstance(node.meta.get("val"), torch.fx.Proxy)
            and self._is_list(node)
        ):
            source = self._arrivals[node.args[0]]  # type: ignore[index]
            self._arrivals[node] = source[node.args[1]]
        else:
            self._read_op(node, node.target)

    def _is_list(self, node: torch.fx.Node) -> bool:
        source = node.args[0]
        return isinstance(source, torch.fx.Node) and isinstance(self._arrivals.get(source), (list, tuple))

    def _read_marker(self, node: torch.fx.Node) -> None:
        direction, call_text, path = str(node.args[1]).split("|", 2)
        call = int(call_text)
        arrival = self._arrivals[node.args[0]]  # type: ignore[index]
        if direction == "input":
            self._enter(call)
            if call == 0 and arrival.crossings == ():
                self._inputs.append(ModelInput(value=arrival.value, path=path))
        else:
            self._leave(call)
        side: Literal["input", "output"] = "input" if direction == "input" else "output"
        self._arrivals[node] = _Arrival(
            arrival.value, (*arrival.crossings, Crossing(call=call, direction=side, path=path))
        )

    def _enter(self, call: int) -> None:
        if call not in self._stack:
            # Calls without tensor arguments leave no marker of their own: enter them on the way down.
            chain = []
            index: int | None = call
            while index is not None:
                chain.append(index)
                index = self._captured.calls[index].parent
            self._stack = chain[::-1]

    def _leave(self, call: int) -> None:
        if call in self._stack:
            self._stack = self._stack[: self._stack.index(call)] or [0]

    def _read_op(self, node: torch.fx.Node, target: Any) -> None:
        result = node.meta.get("val")
        grad_enabled = True
        args: tuple[Any, ...] = node.args
        if "wrap_with_set_grad_enabled" in str(target):
            grad_enabled, submodule_node, *rest = args
            target, args = self._arrivals[submodule_node], tuple(rest)
            result = submodule_node.meta.get("val", result) if result is None else result
            if result is None:
                result = _outputs_of(target)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not tensors:
            self._arrivals[node] = result
            return
        inputs, crossings = [], []

        def substitute(leaf: Any) -> Any:
            if not isinstance(leaf, torch.fx.Node):
                return leaf
            arrival = self._arrivals[leaf]
            if not isinstance(arrival, _Arrival):
                return pytree.tree_map(replace_arrival, arrival, is_leaf=lambda x: isinstance(x, _Arrival))
            return replace_arrival(arrival)

        def replace_arrival(arrival: Any) -> Any:
            if not isinstance(arrival, _Arrival):
                return arrival
            inputs.append(arrival.value)
            crossings.append(arrival.crossings)
            return Ref(arrival.value)

        template = pytree.tree_map(substitute, tuple(args), is_leaf=lambda x: isinstance(x, torch.fx.Node))
        kwargs = pytree.tree_map(substitute, dict(node.kwargs), is_leaf=lambda x: isinstance(x, torch.fx.Node))
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        self._finish_op(node, target, template, kwargs, inputs, crossings, result, grad_enabled)

    def _finish_op(
        self,
        node: torch.fx.Node,
        target: Any,
        template: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[str],
        crossings: list[tuple[Crossing, ...]],
        result: Any,
        grad_enabled: bool,
    ) -> None:
        sources = [self._values[name] for name in inputs]
        kind: ValueKind = "plain" if all(source.kind == "plain" for source in sources) else "activation"
        differentiable = grad_enabled and any(source.requires_grad for source in sources)
        outputs: list[str] = []

        def add(path: tuple[Any, ...], tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            suffix = path_text(path)
            name = f"{node.name}.{suffix}" if suffix else node.name
            needs_grad = differentiable and tensor.is_floating_point() and "detach" not in str(target)
            self._add_value(name, tensor, kind, needs_grad)
            outputs.append(name)
            return _Arrival(name, ())

        self._arrivals[node] = pytree.tree_map_with_path(add, result)
        self._ops.append(
            Op(
                name=node.name,
                target=as_target(target),
                args=template,
                kwargs=kwargs,
                call=self._stack[-1],
                inputs=tuple(inputs),
                crossings=tuple(crossings),
                outputs=tuple(outputs),
                grad_enabled=grad_enabled,
            )
        )

    def _read_output(self, node: torch.fx.Node) -> None:
        leaves = pytree.tree_leaves(node.args, is_leaf=lambda x: isinstance(x, torch.fx.Node))
        arrivals = [self._arrivals[leaf] for leaf in leaves if isinstance(leaf, torch.fx.Node)]
        flat = [
            a
            for a in pytree.tree_leaves(arrivals, is_leaf=lambda x: isinstance(x, _Arrival))
            if isinstance(a, _Arrival)
        ]
        scalars = [a for a in flat if self._values[a.value].shape == () and self._values[a.value].requires_grad]
        for arrival in flat:
            path = arrival.crossings[-1].path if arrival.crossings else ""
            is_loss = bool(scalars) and arrival is scalars[0]
            self._outputs.append(
                ModelOutput(value=arrival.value, path=path, crossings=arrival.crossings, is_loss=is_loss)
            )


def _outputs_of(graph_module: torch.fx.GraphModule) -> Any:
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    return pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, torch.fx.Node) else n, output.args[0])
