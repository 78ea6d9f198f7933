"""`trace`: converts a module and its inputs to an `OpGraph`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.capture import (
    CapturedGraph,
    ExampleInputs,
    export,
    op_target,
    outputs_of,
    symbolic_trace,
    writes_in_place,
)
from planner.graph.fold import find_repeated_blocks, without_repeated_blocks
from planner.graph.meta_ops import selects_by_values
from planner.graph.op_graph import (
    Crossing,
    ModelInput,
    ModelOutput,
    Op,
    OpGraph,
    Ref,
    Value,
    ValueKind,
    build_digraph,
    output_value,
)
from planner.graph.overwritten import Overwritten
from planner.graph.sample_loops import SampleLoopError
from planner.graph.trace_errors import cannot_trace, shape_by_values, vectorized, written_in_parts
from planner.graph.unroll import unroll
from planner.model_rewrites.tree_paths import path_text


def trace(module: nn.Module, inputs: ExampleInputs) -> OpGraph:
    """Return the op graph of one call of ``module``.

    Args:
        module: on the meta device, as `to_meta` returns it.
        inputs: the arguments of the call, on the meta device.

    Raises:
        ModelError: neither torch.export nor torch.fx can capture it. The message names the submodule and both reasons.
        SampleLoopError: within `NoSampleLoops`, a loop over the samples.
    """
    folded = _trace_folded(module, inputs)
    if folded is not None:
        return folded
    try:
        captured = export(module, inputs)
    except SampleLoopError:
        raise
    except Exception as export_error:  # noqa: BLE001  the reason to report, whatever forward or export raises
        try:
            captured = symbolic_trace(module, inputs)
        except Exception as fx_error:  # noqa: BLE001
            raise cannot_trace(module, export_error, fx_error) from export_error
    return _GraphBuilder(module, captured).build()


def _trace_folded(module: nn.Module, inputs: ExampleInputs) -> OpGraph | None:
    """Return the op graph, traced with only three of the repeated blocks; None if there are none, or if that fails."""
    repeats = find_repeated_blocks(module, inputs)
    if not repeats:
        return None
    try:
        with without_repeated_blocks(module, repeats):
            short = _GraphBuilder(module, export(module, inputs)).build()
        return unroll(short, repeats, list(_parameter_fqns(module).values()))
    except SampleLoopError:
        raise
    except Exception:  # noqa: BLE001  the full trace, which follows, reports the error
        return None


def _parameter_fqns(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return id of a parameter -> all of its FQNs, in the module's order."""
    fqns: dict[int, list[str]] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        fqns.setdefault(id(parameter), []).append(fqn)
    return {key: tuple(names) for key, names in fqns.items()}


_MAY_RETURN_ITS_INPUT = frozenset(
    {
        *(getattr(torch.ops.aten.to, overload) for overload in torch.ops.aten.to.overloads()),
        torch.ops.aten.contiguous.default,
    }
)


@dataclass(slots=True)
class _ValueInModule:
    """A value at one node of the fx graph, with the module boundaries between its producer and that node."""

    name: str
    crossings: tuple[Crossing, ...]


class _GraphBuilder:
    """Converts a captured fx graph to an `OpGraph`: markers become crossings, other nodes become ops and values."""

    def __init__(self, module: nn.Module, captured: CapturedGraph) -> None:
        self._module = module
        self._captured = captured
        self._values: dict[str, Value] = {}
        self._node_values: dict[torch.fx.Node, Any] = {}
        self._ops: list[Op] = []
        self._parameters: dict[str, str] = {}
        self._inputs: list[ModelInput] = []
        self._outputs: list[ModelOutput] = []
        self._open_calls: list[int] = [0]
        self._prefix = ""
        self._grad_enabled = True
        self._overwritten = Overwritten()
        self._busy: set[int] = set()
        """Calls in which there are ops."""

    def build(self) -> OpGraph:
        for node in self._captured.graph.nodes:
            getattr(self, f"_read_{node.op}")(node)
        fqns = _parameter_fqns(self._module)
        state = dict(self._module.named_parameters(remove_duplicate=False))
        return OpGraph(
            digraph=build_digraph(self._ops),
            values=self._values,
            calls=self._captured.calls,
            inputs=tuple(self._inputs),
            outputs=tuple(self._outputs),
            parameters={value: fqns[id(state[fqn])] for value, fqn in self._parameters.items()},
        )

    def _add_value(self, name: str, tensor: torch.Tensor, kind: ValueKind, requires_grad: bool) -> None:
        shape = tuple(map(int, tensor.shape))
        self._values[name] = Value(name=name, shape=shape, dtype=tensor.dtype, kind=kind, requires_grad=requires_grad)

    def _read_placeholder(self, node: torch.fx.Node) -> None:
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            self._node_values[node] = tensor
            return
        if node.name in self._captured.parameters:
            self._read_parameter(node, tensor)
            return
        kind: ValueKind = "plain" if node.name in self._captured.buffers else "input"
        self._add_value(node.name, tensor, kind, False)
        self._node_values[node] = _ValueInModule(node.name, ())

    def _read_parameter(self, node: torch.fx.Node, tensor: torch.Tensor) -> None:
        fqn = self._captured.parameters[node.name]
        state = dict(self._module.named_parameters(remove_duplicate=False))
        parameter = state[fqn]
        tied_value = next((value for value, name in self._parameters.items() if state[name] is parameter), None)
        if tied_value is None:
            self._add_value(node.name, tensor, "parameter", parameter.requires_grad)
            self._parameters[node.name] = fqn
        self._node_values[node] = _ValueInModule(tied_value or node.name, ())

    def _read_get_attr(self, node: torch.fx.Node) -> None:
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor):
            self._add_value(node.name, tensor, "plain", False)
            self._node_values[node] = _ValueInModule(node.name, ())
        else:
            owner: Any = self._captured.owner
            for part in str(node.target).split("."):
                owner = getattr(owner, part)
            self._node_values[node] = owner

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
            source = self._node_values[node.args[0]]  # type: ignore[index]
            self._node_values[node] = source[node.args[1]]
        elif self._is_the_parameter(node):
            self._node_values[node] = self._node_values[node.args[0]]  # type: ignore[index]
        else:
            self._read_op(node, node.target)

    def _is_list(self, node: torch.fx.Node) -> bool:
        source = node.args[0]
        return isinstance(source, torch.fx.Node) and isinstance(self._node_values.get(source), (list, tuple))

    def _is_the_parameter(self, node: torch.fx.Node) -> bool:
        """Return whether an op returns the parameter that it is given, as a cast to the parameter's own dtype does.

        A trace takes all later uses of the parameter, in any module, for uses of this result.
        """
        if node.target not in _MAY_RETURN_ITS_INPUT or any(a is True for a in (*node.args, *node.kwargs.values())):
            return False  # with copy=True it never does
        given: Any = node.args[0]
        source, kept = self._node_values[given], [each.meta["val"] for each in (given, node) if "val" in each.meta]
        is_parameter = _is_value(source) and self._values[source.name].kind == "parameter"
        return is_parameter and len({(each.dtype, each.stride()) for each in kept}) == 1

    def _read_marker(self, node: torch.fx.Node) -> None:
        direction, call_text, path = str(node.args[1]).split("|", 2)
        call = int(call_text)
        value = self._node_values[node.args[0]]  # type: ignore[index]
        if direction == "input":
            self._enter(call)
            if call == 0 and value.crossings == ():
                self._inputs.append(ModelInput(value=value.name, path=path))
        else:
            last = value.crossings[-1] if value.crossings else None
            if last is not None and (last.call, last.direction) == (call, "input") and call not in self._busy:
                value = self._handed_on(node.name, value, call)
            self._leave(call)
        side: Literal["input", "output"] = "input" if direction == "input" else "output"
        self._node_values[node] = _ValueInModule(
            value.name, (*value.crossings, Crossing(call=call, direction=side, path=path))
        )

    def _handed_on(self, name: str, value: _ValueInModule, call: int) -> _ValueInModule:
        """Return the result of a module that does nothing with its argument, as a value with a layout of its own."""
        source = self._values[value.name]
        target = torch.ops.aten.alias.default
        self._values[name] = output_value(name, source.shape, source.dtype, target, self._grad_enabled, [source])
        self._busy.update(self._open_calls)
        self._ops.append(
            Op(
                name=name,
                target=target,
                args=(Ref(value.name),),
                kwargs={},
                call=call,
                inputs=(value.name,),
                crossings=(value.crossings,),
                outputs=(name,),
                grad_enabled=self._grad_enabled,
            )
        )
        return _ValueInModule(name, ())

    def _enter(self, call: int) -> None:
        if call not in self._open_calls:
            # A call without tensor arguments has no input marker: it is entered together with a call inside it.
            ancestors = []
            index: int | None = call
            while index is not None:
                ancestors.append(index)
                index = self._captured.calls[index].parent
            self._open_calls = ancestors[::-1]

    def _leave(self, call: int) -> None:
        if call in self._open_calls:
            self._open_calls = self._open_calls[: self._open_calls.index(call)] or [0]

    def _read_op(self, node: torch.fx.Node, target: Any) -> None:
        if "functorch" in str(getattr(target, "__module__", "")):
            raise vectorized(self._captured.calls[self._open_calls[-1]].fqn)
        result = node.meta.get("val")
        grad_enabled = self._grad_enabled
        args: tuple[Any, ...] = node.args
        if "wrap_with_set_grad_enabled" in str(target):
            grad_enabled, submodule_node, *rest = args
            target, args = self._node_values[submodule_node], tuple(rest)
            if writes_in_place(target) or self._reads_more_than_plain(args):
                self._node_values[node] = self._read_body(node.name, target, args, grad_enabled)
                return
            result = submodule_node.meta.get("val", result) if result is None else result
            if result is None:
                result = outputs_of(target)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._node_values[node] = result
            return
        inputs: list[_ValueInModule] = []

        def to_ref(value: Any) -> Any:
            if not isinstance(value, _ValueInModule):
                return value
            inputs.append(value)
            return Ref(value.name)

        def substitute(leaf: Any) -> Any:
            if not isinstance(leaf, torch.fx.Node):
                return leaf
            return pytree.tree_map(to_ref, self._node_values[leaf], is_leaf=_is_value)

        template = pytree.tree_map(substitute, tuple(args), is_leaf=_is_node)
        kwargs = pytree.tree_map(substitute, dict(node.kwargs), is_leaf=_is_node)
        self._busy.update(self._open_calls)
        outputs = self._add_results(node, target, result, inputs, grad_enabled)
        self._ops.append(
            Op(
                name=self._prefix + node.name,
                target=op_target(target),
                args=template,
                kwargs={key: value for key, value in kwargs.items() if key != "pin_memory"},
                call=self._open_calls[-1],
                inputs=tuple(value.name for value in inputs),
                crossings=tuple(value.crossings for value in inputs),
                outputs=outputs,
                grad_enabled=grad_enabled,
            )
        )
        sources = [self._values[value.name] for value in inputs]
        fqn = self._captured.calls[self._open_calls[-1]].fqn
        results = [self._values[name] for name in outputs]
        module = self._overwritten.add_op(target, sources, results, fqn, grad_enabled=grad_enabled)
        if module is not None:
            raise written_in_parts(module)

    def _reads_more_than_plain(self, args: Sequence[Any]) -> bool:
        """Return whether any of these nodes is a tensor that depends on inputs or parameters, and so has a layout."""
        leaves = pytree.tree_leaves([self._node_values[arg] for arg in args if _is_node(arg)], is_leaf=_is_value)
        return any(_is_value(leaf) and self._values[leaf.name].kind != "plain" for leaf in leaves)

    def _read_body(self, name: str, body: torch.fx.GraphModule, args: tuple[Any, ...], grad_enabled: bool) -> Any:
        """Add the ops of a nested graph one by one, and return its results."""
        before = self._prefix, self._grad_enabled
        self._prefix, self._grad_enabled = f"{self._prefix}{name}.", grad_enabled
        values = (self._node_values[arg] if _is_node(arg) else arg for arg in args)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self._node_values[node] = next(values)
            elif node.op != "output":
                getattr(self, f"_read_{node.op}")(node)
        self._prefix, self._grad_enabled = before
        return pytree.tree_map(
            lambda leaf: self._node_values[leaf] if _is_node(leaf) else leaf,
            body.graph.output_node().args[0],
            is_leaf=_is_node,
        )

    def _add_results(
        self, node: torch.fx.Node, target: Any, result: Any, inputs: list[_ValueInModule], grad_enabled: bool
    ) -> tuple[str, ...]:
        """Return the names of the tensors that an op returns, which are added to the graph's values."""
        sources = [self._values[value.name] for value in inputs]
        names: list[str] = []

        def add(path: tuple[Any, ...], tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            suffix = path_text(path)
            name = self._prefix + (f"{node.name}.{suffix}" if suffix else node.name)
            shape = self._static_shape(tensor, target, sources)
            self._values[name] = output_value(name, shape, tensor.dtype, target, grad_enabled, sources)
            names.append(name)
            return _ValueInModule(name, ())

        self._node_values[node] = pytree.tree_map_with_path(add, result)
        return tuple(names)

    def _static_shape(self, tensor: torch.Tensor, target: Any, sources: Sequence[Value]) -> tuple[int, ...]:
        """Return the shape of a result of ``target``; a `ModelError` says that it depends on the values of tensors."""
        with suppress(Exception):
            if not selects_by_values(target, [source.dtype for source in sources]):
                return tuple(map(int, tensor.shape))
        raise shape_by_values(op_target(target), self._captured.calls[self._open_calls[-1]].fqn)

    def _read_output(self, node: torch.fx.Node) -> None:
        nodes = [leaf for leaf in pytree.tree_leaves(node.args, is_leaf=_is_node) if _is_node(leaf)]
        leaves = pytree.tree_leaves([self._node_values[output] for output in nodes], is_leaf=_is_value)
        outputs = [leaf for leaf in leaves if isinstance(leaf, _ValueInModule)]
        for leaf in outputs:
            if self._overwritten.is_outdated(leaf.name):
                raise written_in_parts(self._overwritten.module_of(leaf.name))
        scalars = [v for v in outputs if self._values[v.name].shape == () and self._values[v.name].requires_grad]
        named = [v for v in scalars if _path_of(v).rpartition(".")[2] == "loss"]
        # Of several numbers without a name, the caller may differentiate all.
        losses = named[:1] or (scalars if len({v.name for v in scalars}) == 1 else [])
        loss = next((position for position, value in enumerate(outputs) if losses and value is losses[0]), None)
        for position, value in enumerate(outputs):
            is_loss = position == loss
            self._outputs.append(
                ModelOutput(value=value.name, path=_path_of(value), crossings=value.crossings, is_loss=is_loss)
            )


def _path_of(value: _ValueInModule) -> str:
    return value.crossings[-1].path if value.crossings else ""


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, torch.fx.Node)


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, _ValueInModule)
