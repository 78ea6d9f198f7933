"""From a module and its inputs to an `OpGraph`: the one file that captures graphs.

`torch.export` runs the module's forward on meta tensors; what it refuses, `torch.fx` traces first. Hooks on every
module pass each tensor that crosses a module boundary through a marker op, so that the captured graph itself says where
layouts may change, and under which argument.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from planner.eager_masks import unpacked_sequences
from planner.errors import ModelError
from planner.graph import Call, Crossing, ModelInput, ModelOutput, Op, OpGraph, Ref, Value, ValueKind, build_digraph


@torch.library.custom_op("shardplan::boundary", mutates_args=())
def _boundary(tensor: torch.Tensor, marker: str) -> torch.Tensor:
    return tensor.clone()


@_boundary.register_fake
def _(tensor: torch.Tensor, marker: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """Arguments of one call of the root module, on the meta device."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def path_text(path: tuple[Any, ...]) -> str:
    """Return a pytree path as ``position_embeddings.0``: keys, indices and attribute names joined by dots."""
    parts = []
    for key in path:
        parts.append(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))))
    return ".".join(parts)


def module_names(module: nn.Module) -> dict[nn.Module, str]:
    """Map every module to its first FQN (a module registered twice goes by the first)."""
    return {submodule: name for name, submodule in module.named_modules()}


def to_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of ``module`` on the meta device, floating-point parameters in ``dtype``; ties stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        data = torch.empty_like(parameter, device="meta", dtype=wanted)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


class _Boundaries:
    """Hooks that mark each tensor as it crosses a module boundary, and number the calls."""

    def __init__(self, module: nn.Module) -> None:
        self._names = module_names(module)
        self._stack: list[int] = []
        self.calls: list[Call] = []

    def enter_root(self) -> None:
        """Number the root's call: torch.fx runs its forward without its hooks."""
        self.calls.append(Call(index=0, fqn="", parent=None))
        self._stack.append(0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        handles = []
        for submodule in self._names:
            handles.append(submodule.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(submodule.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, tree: Any, call: int, direction: str) -> Any:
        def mark(path: tuple[Any, ...], leaf: Any) -> Any:
            if isinstance(leaf, (torch.Tensor, torch.fx.Proxy)):
                return torch.ops.shardplan.boundary(leaf, f"{direction}|{call}|{path_text(path)}")
            return leaf

        return pytree.tree_map_with_path(mark, tree)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = Call(index=len(self.calls), fqn=self._names[module], parent=self._stack[-1] if self._stack else None)
        self.calls.append(call)
        self._stack.append(call.index)
        return self._mark(args, call.index, "input"), self._mark(kwargs, call.index, "input")

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._mark(output, self._stack.pop(), "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What a tracer yields: an fx graph with markers, the module that owns its state, and names of its placeholders."""

    graph: torch.fx.Graph
    owner: nn.Module
    parameters: Mapping[str, str]
    buffers: frozenset[str]
    calls: tuple[Call, ...]


def _export(module: nn.Module, inputs: ExampleInputs) -> _Captured:
    boundaries = _Boundaries(module)
    with boundaries.attached(), unpacked_sequences():
        program = torch.export.export(module, inputs.args, dict(inputs.kwargs), strict=False)
    return _captured(program, boundaries)


def _captured(program: torch.export.ExportedProgram, boundaries: _Boundaries) -> _Captured:
    signature = program.graph_signature
    return _Captured(
        graph=program.graph,
        owner=program.graph_module,
        parameters=dict(signature.inputs_to_parameters),
        buffers=frozenset(signature.inputs_to_buffers) | frozenset(signature.inputs_to_lifted_tensor_constants),
        calls=tuple(boundaries.calls),
    )


class _WholeTracer(torch.fx.Tracer):
    """Traces into every module, so that the hooks of leaf modules run too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _symbolic_trace(module: nn.Module, inputs: ExampleInputs) -> _Captured:
    boundaries = _Boundaries(module)
    boundaries.enter_root()
    with boundaries.attached():
        graph = _WholeTracer().trace(module)
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    bound = dict(zip(names, inputs.args, strict=False)) | dict(inputs.kwargs)
    missing = [
        name for name in names if name not in bound and not any(n.target == name and n.args for n in graph.nodes)
    ]
    if missing:
        raise ValueError(f"no example input for {', '.join(map(str, missing))}")
    _mark_root(graph, inputs)
    # What fx wrote down is plain calls of functions, which export reads as it does any module.
    program = torch.export.export(torch.fx.GraphModule(module, graph), inputs.args, dict(inputs.kwargs), strict=False)
    return _captured(program, boundaries)


def _mark_root(graph: torch.fx.Graph, inputs: ExampleInputs) -> None:
    """Pass the inputs and outputs of the root module through markers, as the hooks of other modules do."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(placeholders[-1].next):
        for position, node in enumerate(placeholders):
            by_position = position < len(inputs.args)
            value = inputs.args[position] if by_position else inputs.kwargs.get(str(node.target))
            if isinstance(value, torch.Tensor):
                path = str(position) if by_position else str(node.target)
                marker = graph.call_function(torch.ops.shardplan.boundary.default, (node, f"input|0|{path}"))
                node.replace_all_uses_with(marker, delete_user_cb=lambda user, own=marker: user is not own)
    output = graph.output_node()

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.fx.Node):
            return leaf
        return graph.call_function(torch.ops.shardplan.boundary.default, (leaf, f"output|0|{path_text(path[1:])}"))

    with graph.inserting_before(output):
        output.args = pytree.tree_map_with_path(mark, output.args[:1], is_leaf=lambda x: isinstance(x, torch.fx.Node))


def trace(module: nn.Module, inputs: ExampleInputs) -> OpGraph:
    """Return the op graph of one call of ``module``.

    Args:
        module: any module; see `to_meta`.
        inputs: the arguments of the call, on the meta device.

    Raises:
        ModelError: neither torch.export nor torch.fx can capture it; the message names the module and the reason.
    """
    try:
        captured = _export(module, inputs)
    except Exception as refusal:  # noqa: BLE001  whatever forward or export raises is the reason to report
        try:
            captured = _symbolic_trace(module, inputs)
        except Exception as second:  # noqa: BLE001
            raise ModelError(
                f"cannot trace {type(module).__name__}{_culprit(module, refusal)}: "
                f"torch.export says {_reason(refusal)}; torch.fx says {_reason(second)}.",
                what_to_do="Check that it runs on these inputs, and keep data-dependent control flow out of forward.",
            ) from refusal
    return _Reader(module, captured).read()


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

    def __init__(self, module: nn.Module, captured: _Captured) -> None:
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
                target=target,
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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what tracing logs about models that it goes on to capture."""
    import logging

    with ExitStack() as stack:
        logger = logging.getLogger("torch._export")
        level = logger.level
        logger.setLevel(logging.ERROR)
        stack.callback(logger.setLevel, level)
        yield
