"""Graph capture: converts a module and its inputs to a `torch.fx` graph in which module boundaries are marked.

`torch.export` runs the forward on meta tensors. Where it fails, `torch.fx` traces the module and `torch.export` runs
the resulting graph. Hooks on every module pass each tensor that crosses a module boundary through a marker op, so the
captured graph shows where layouts may change, and for which argument. No other file captures graphs.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.export._trace  # otherwise imported, slowly, at the first export
import torch.fx.experimental._config
from torch import nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from planner.counting.activation_costs import activation_costs
from planner.graph.nested_graph import NestedGraph, NestedOp
from planner.graph.op_graph import SAME_TENSOR, Call, Ref
from planner.model_rewrites.cache_argument import is_cache
from planner.model_rewrites.eager_masks import masks_by_broadcasting, unpacked_sequences
from planner.model_rewrites.experts.modules import experts_as_one_op
from planner.model_rewrites.image_sizes.in_trace import sizes_known
from planner.model_rewrites.image_sizes.values import is_numbers
from planner.model_rewrites.mla import mla_keys_concatenated
from planner.model_rewrites.random_branches import likelier_branches
from planner.model_rewrites.replaced_calls.assigned_buffers import assigned_buffers_written
from planner.model_rewrites.replaced_calls.checkpoints import without_own_checkpoints
from planner.model_rewrites.replaced_calls.in_trace import calls_as_ops, without_checks
from planner.model_rewrites.replaced_calls.split_and_cat import Parts
from planner.model_rewrites.sync_batch_norm import batch_norm_for_sync, norms_in_dtype_of_statistics
from planner.model_rewrites.torch_attention import attention_as_planned
from planner.model_rewrites.tree_paths import computed_tensors, look_into_dataclasses, path_text


@torch.library.custom_op("shardplan::boundary", mutates_args=())
def _boundary(tensor: torch.Tensor, marker: str) -> torch.Tensor:
    return tensor.clone()


@_boundary.register_fake
def _(tensor: torch.Tensor, marker: str) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """The arguments of one call of the root module, on the meta device."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def module_names(module: nn.Module) -> dict[nn.Module, str]:
    """Return module -> FQN for every submodule. A module that is registered twice has its first FQN."""
    return {submodule: name for name, submodule in module.named_modules()}


def to_meta(
    module: nn.Module,
    dtype: torch.dtype | None,
    *,
    trained: bool = True,
    only: Mapping[nn.Module, Collection[str]] | None = None,
    copies: Mapping[int, Any] | None = None,
) -> nn.Module:
    """Return a copy of ``module`` on the meta device, in which tied parameters stay tied.

    Args:
        module: any module.
        dtype: dtype of the copy's floating-point parameters; None keeps the dtypes of ``module``.
        trained: False returns a copy in evaluation mode, whose parameters need no gradients.
        only: submodule -> names of its children that are copied, for submodules whose other children are left out. It
            has the default ``copy.deepcopy`` (`has_default_deepcopy`). None: all children are copied.
        copies: ``id`` of an object that modules refer to -> the object that takes its place in the copy.
    """
    only = only or {}
    memo: dict[int, Any] = dict(copies or {})
    for parameter in module.parameters():
        new_dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        data = torch.empty_like(parameter, device="meta", dtype=new_dtype)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=trained and parameter.requires_grad)
    for tensor in (*module.buffers(), *computed_tensors(module)):
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    submodules = [item for item in _copied_modules(module, only, set()) if has_default_deepcopy(type(item))]
    for submodule in submodules:
        memo[id(submodule)] = object.__new__(type(submodule))
    for submodule in submodules:
        values = dict(vars(submodule))
        if submodule in only:
            values["_modules"] = {name: values["_modules"][name] for name in only[submodule]}
        vars(memo[id(submodule)]).update({name: _deepcopy(value, memo) for name, value in values.items()})
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied if trained else copied.eval()


def _copied_modules(
    module: nn.Module, only: Mapping[nn.Module, Collection[str]], seen: set[nn.Module]
) -> Iterator[nn.Module]:
    """Yield ``module`` and its submodules, each once, without those that ``only`` leaves out (see `to_meta`)."""
    seen.add(module)
    yield module
    for name, child in module.named_children():
        if child not in seen and name in only.get(module, (name,)):
            yield from _copied_modules(child, only, seen)


def has_default_deepcopy(kind: type[nn.Module]) -> bool:
    """Return whether ``copy.deepcopy`` of a module of this class copies its ``__dict__`` and nothing else."""
    methods = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__slots__")
    return all(getattr(kind, method, None) is getattr(nn.Module, method, None) for method in methods)


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    """Return ``copy.deepcopy(value, memo)``, with a fast path for scalars and empty containers (most attributes)."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return value
    if kind in (dict, OrderedDict, set, list) and not value and id(value) not in memo:
        memo[id(value)] = kind()
    return copy.deepcopy(value, memo)


class _BoundaryMarkers:
    """Hooks that mark each tensor that crosses a module boundary, and number the module calls."""

    def __init__(self, module: nn.Module) -> None:
        self._names = module_names(module)
        self._stack: list[int] = []
        self.calls: list[Call] = []

    def enter_root(self) -> None:
        """Record the call of the root module, whose hooks torch.fx does not run."""
        self.calls.append(Call(index=0, fqn="", parent=None))
        self._stack.append(0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        handles = []
        for submodule, name in self._names.items():
            # torch.export calls hooks with stand-ins of modules where one is registered under two names.
            enter = functools.partial(self._enter, name)
            handles.append(submodule.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            handles.append(submodule.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, trees: tuple[Any, ...], call: int, direction: str) -> tuple[Any, ...]:
        """Return ``trees`` with their tensors marked; a tensor that is there twice has one marker, with both paths.

        Code may ask whether two arguments are one tensor, as `nn.MultiheadAttention` does.
        """
        paths: dict[int, list[str]] = {}
        look_into_dataclasses(trees)
        for tree in trees:
            for path, leaf in pytree.tree_leaves_with_path(tree):
                paths.setdefault(id(leaf), []).append(path_text(path))
        marked: dict[int, Any] = {}

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, (torch.Tensor, torch.fx.Proxy)) or is_numbers(leaf):
                return leaf
            if id(leaf) not in marked:
                text = SAME_TENSOR.join(paths[id(leaf)])
                marked[id(leaf)] = torch.ops.shardplan.boundary(leaf, f"{direction}|{call}|{text}")
            return marked[id(leaf)]

        return tuple(pytree.tree_map(mark, tree) for tree in trees)

    def _enter(self, fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        call = Call(index=len(self.calls), fqn=fqn, parent=self._stack[-1] if self._stack else None)
        self.calls.append(call)
        self._stack.append(call.index)
        marked_args, marked_kwargs = self._mark((args, kwargs), call.index, "input")
        return marked_args, marked_kwargs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        index = self._stack.pop()
        if self.calls[index].parent is None:
            # torch.export refuses a cache among the results, which in a planned call nobody reads.
            output = pytree.tree_map(_as_result, output)
        return self._mark((output,), index, "output")[0]


def _as_result(leaf: Any) -> Any:
    if isinstance(leaf, Parts):
        return leaf.whole
    return None if is_cache(leaf) or is_numbers(leaf) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A captured graph.

    Attributes:
        graph: the fx graph, with boundary markers.
        owner: the module whose attributes the graph's ``get_attr`` nodes read.
        parameters: placeholder -> FQN of the parameter.
        buffers: placeholders that are buffers or constants.
        calls: the module calls that the markers refer to.
    """

    graph: torch.fx.Graph
    owner: nn.Module
    parameters: Mapping[str, str]
    buffers: frozenset[str]
    calls: tuple[Call, ...]


def export(module: nn.Module, inputs: ExampleInputs) -> CapturedGraph:
    """Return the graph that torch.export captures. Exceptions of torch.export and of the forward propagate.

    Args:
        module: the copy that `to_meta` returned, which may be changed.
        inputs: the arguments of the call.
    """
    markers = _BoundaryMarkers(module)
    batch_norm_for_sync(module)
    norms_in_dtype_of_statistics(module)
    with (
        experts_as_one_op(module, activation_costs),  # which calls activations, before they have markers
        assigned_buffers_written(module),
        markers.attached(),
        sizes_known(module, inputs.args, inputs.kwargs),
        unpacked_sequences(),
        attention_as_planned(),
        without_own_checkpoints(warn=True),
        likelier_branches(),
        masks_by_broadcasting(),
        calls_as_ops(),
        mla_keys_concatenated(module),
        _without_code_generation(),
    ):
        program = torch.export.export(module, inputs.args, dict(inputs.kwargs), strict=False)
    return _captured_graph(program, markers)


@contextmanager
def _without_code_generation() -> Iterator[None]:
    """Within this context, torch.export is a third faster: it generates no Python code and records no stack traces."""
    with _use_lazy_graph_module(True), mock.patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
        yield


@contextmanager
def masks_select_all() -> Iterator[None]:
    """Within this context, a mask on meta selects all elements: how many it selects is a matter of values."""
    with mock.patch.object(torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True):
        yield


def _captured_graph(program: torch.export.ExportedProgram, markers: _BoundaryMarkers) -> CapturedGraph:
    signature = program.graph_signature
    return CapturedGraph(
        graph=without_checks(program.graph),
        owner=program.graph_module,
        parameters=dict(signature.inputs_to_parameters),
        buffers=frozenset(signature.inputs_to_buffers) | frozenset(signature.inputs_to_lifted_tensor_constants),
        calls=tuple(markers.calls),
    )


class _TracerWithoutLeaves(torch.fx.Tracer):
    """Traces into every module, so that the hooks of leaf modules run too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def symbolic_trace(module: nn.Module, inputs: ExampleInputs) -> CapturedGraph:
    """Return the graph that torch.export captures from the torch.fx trace of ``module``; errors of both propagate."""
    markers = _BoundaryMarkers(module)
    markers.enter_root()
    with markers.attached(), without_own_checkpoints(warn=True), likelier_branches():
        graph = _TracerWithoutLeaves().trace(module)
    names = [node.target for node in graph.nodes if node.op == "placeholder"]
    bound = dict(zip(names, inputs.args, strict=False)) | dict(inputs.kwargs)
    missing = [
        name for name in names if name not in bound and not any(n.target == name and n.args for n in graph.nodes)
    ]
    if missing:
        raise ValueError(f"no example input for {', '.join(map(str, missing))}")
    _mark_root(graph, inputs)
    # The traced graph module has no control flow, so torch.export accepts it and adds shapes.
    program = torch.export.export(torch.fx.GraphModule(module, graph), inputs.args, dict(inputs.kwargs), strict=False)
    return _captured_graph(program, markers)


def _mark_root(graph: torch.fx.Graph, inputs: ExampleInputs) -> None:
    """Mark the inputs and outputs of the root module, whose hooks torch.fx does not run."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(placeholders[-1].next):
        for position, node in enumerate(placeholders):
            by_position = position < len(inputs.args)
            value = inputs.args[position] if by_position else inputs.kwargs.get(str(node.target))
            if isinstance(value, torch.Tensor):
                path = str(position) if by_position else str(node.target)
                marker = graph.call_function(torch.ops.shardplan.boundary.default, (node, f"input|0|{path}"))
                node.replace_all_uses_with(marker, delete_user_cb=lambda user, marker=marker: user is not marker)
    output = graph.output_node()

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.fx.Node):
            return leaf
        return graph.call_function(torch.ops.shardplan.boundary.default, (leaf, f"output|0|{path_text(path[1:])}"))

    with graph.inserting_before(output):
        output.args = pytree.tree_map_with_path(mark, output.args[:1], is_leaf=lambda x: isinstance(x, torch.fx.Node))


def op_target(target: Any) -> Any:
    """Return the target of an op: a captured submodule becomes a `NestedGraph`, unless it calls another submodule."""
    if not isinstance(target, torch.fx.GraphModule) or any(node.op == "get_attr" for node in target.graph.nodes):
        return target

    def refer(template: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: Ref(leaf.name) if isinstance(leaf, torch.fx.Node) else leaf,
            template,
            is_leaf=lambda leaf: isinstance(leaf, torch.fx.Node),
        )

    ops = [
        NestedOp(
            name=node.name,
            target=None if node.target is operator.getitem else node.target,
            args=refer(tuple(node.args)),
            kwargs=refer({key: value for key, value in node.kwargs.items() if key != "pin_memory"}),
        )
        for node in target.graph.nodes
        if node.op == "call_function" and "_assert" not in str(node.target)  # runtime checks of static shapes
    ]
    inputs = tuple(node.name for node in target.graph.nodes if node.op == "placeholder")
    return NestedGraph(inputs=inputs, ops=tuple(ops), outputs=refer(target.graph.output_node().args[0]))


_LOGGED = {
    "torch._export": logging.ERROR,
    "torch._subclasses.fake_tensor": logging.CRITICAL,
    "torch.fx.experimental.symbolic_shapes": logging.ERROR,
}


@contextmanager
def quiet_export() -> Iterator[None]:
    """Within this context, torch logs no warnings of models that are captured anyway, and no tracebacks."""
    with ExitStack() as stack:
        for name, least in _LOGGED.items():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(least)
        # torch.export prints the graph of a forward that it cannot finish.
        stack.enter_context(mock.patch.object(torch.export._trace, "print", mock.Mock(), create=True))
        stack.enter_context(warnings.catch_warnings())
        # Recurrent layers keep their parameters in a list as well.
        warnings.filterwarnings("ignore", "The tensor attributes? .*_flat_weights", UserWarning)
        yield


def writes_in_place(body: torch.fx.GraphModule) -> bool:
    """Return whether a nested graph writes to a tensor, which may be a buffer."""
    return any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in body.graph.nodes)


def outputs_of(graph_module: torch.fx.GraphModule) -> Any:
    """Return the results of a nested graph, with meta tensors."""
    results = graph_module.graph.output_node().args[0]
    return pytree.tree_map(lambda n: n.meta["val"] if isinstance(n, torch.fx.Node) else n, results)
