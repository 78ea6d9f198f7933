"""From a module and its inputs to an fx graph with markers: the one file that captures graphs.

`torch.export` runs the module's forward on meta tensors; what it refuses, `torch.fx` traces first. Hooks on every
module pass each tensor that crosses a module boundary through a marker op, so that the captured graph itself says where
layouts may change, and under which argument.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.export._trace  # torch would import this half at the first export
import torch.fx
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from planner.graph.nested_graph import NestedGraph, NestedOp
from planner.graph.op_graph import Call, Ref
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.model_rewrites.experts import experts_as_one_op
from planner.model_rewrites.mla import mla_keys_concatenated


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


def to_meta(module: nn.Module, dtype: torch.dtype | None, *, trained: bool = True) -> nn.Module:
    """Return a copy of ``module`` on the meta device, floating-point parameters in ``dtype``; ties stay tied.

    Where it is not to be ``trained`` nothing needs a gradient, and modules are in evaluation mode.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        data = torch.empty_like(parameter, device="meta", dtype=wanted)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=trained and parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    plain = [submodule for submodule in module.modules() if _is_plain(type(submodule))]
    for submodule in plain:
        memo[id(submodule)] = object.__new__(type(submodule))
    for submodule in plain:
        vars(memo[id(submodule)]).update({name: _copied(value, memo) for name, value in vars(submodule).items()})
    found: nn.Module = copy.deepcopy(module, memo)
    return found if trained else found.eval()


def _is_plain(kind: type[nn.Module]) -> bool:
    """Tell whether ``copy.deepcopy`` copies what modules of a class hold, name by name, and nothing else."""
    ways = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__slots__")
    return all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in ways)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return what ``copy.deepcopy`` does; of what most modules hold (numbers, no hooks) without asking how."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return value
    if kind in (dict, OrderedDict, set, list) and not value and id(value) not in memo:
        memo[id(value)] = kind()
    return copy.deepcopy(value, memo)


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
class CapturedGraph:
    """What a tracer yields: an fx graph with markers, the module that owns its state, and names of its placeholders."""

    graph: torch.fx.Graph
    owner: nn.Module
    parameters: Mapping[str, str]
    buffers: frozenset[str]
    calls: tuple[Call, ...]


def export(module: nn.Module, inputs: ExampleInputs) -> CapturedGraph:
    """Return the graph that torch.export captures; whatever it or the module's forward raises passes through."""
    boundaries = _Boundaries(module)
    with (
        boundaries.attached(),
        unpacked_sequences(),
        experts_as_one_op(module),
        mla_keys_concatenated(module),
        _nothing_but_the_graph(),
    ):
        program = torch.export.export(module, inputs.args, dict(inputs.kwargs), strict=False)
    return _captured(program, boundaries)


@contextmanager
def _nothing_but_the_graph() -> Iterator[None]:
    """Have torch.export write no Python code of its graphs and note no stack traces: a third of its time."""
    with _use_lazy_graph_module(True), mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
        yield


def _captured(program: torch.export.ExportedProgram, boundaries: _Boundaries) -> CapturedGraph:
    signature = program.graph_signature
    return CapturedGraph(
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


def symbolic_trace(module: nn.Module, inputs: ExampleInputs) -> CapturedGraph:
    """Return the graph of what torch.fx writes down of the module; whatever either raises passes through."""
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


def as_target(target: Any) -> Any:
    """Return the target of an op: of a captured submodule its `NestedGraph`, unless it holds another submodule."""
    if not isinstance(target, torch.fx.GraphModule) or any(node.op == "get_attr" for node in target.graph.nodes):
        return target

    def refer(template: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: Ref(leaf.name) if isinstance(leaf, torch.fx.Node) else leaf,
            template,
            is_leaf=lambda leaf: isinstance(leaf, torch.fx.Node),
        )

    steps = [
        NestedOp(
            name=node.name,
            target=None if node.target is operator.getitem else node.target,
            args=refer(tuple(node.args)),
            kwargs=refer({key: value for key, value in node.kwargs.items() if key != "pin_memory"}),
        )
        for node in target.graph.nodes
        if node.op == "call_function" and "_assert" not in str(node.target)  # checks of what is known here
    ]
    inputs = tuple(node.name for node in target.graph.nodes if node.op == "placeholder")
    return NestedGraph(inputs=inputs, steps=tuple(steps), outputs=refer(target.graph.output_node().args[0]))


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence what tracing logs about models that it goes on to capture."""
    with ExitStack() as stack:
        logger = logging.getLogger("torch._export")
        level = logger.level
        logger.setLevel(logging.ERROR)
        stack.callback(logger.setLevel, level)
        yield
