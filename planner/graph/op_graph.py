"""`OpGraph`: the traced model as ops, the values (tensors) between them, and the module calls that contain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import networkx as nx
import torch

ValueKind = Literal["input", "parameter", "plain", "activation"]
"""An ``activation`` is computed from inputs or parameters. A ``plain`` value depends on neither (masks, positions,
buffers): it stays unsharded, except as a module input of an op that reads only plain values and parameters."""

LINEAR = "aten.linear.default"
"""`Op.target_name` of linear layers."""


SAME_TENSOR = "="
"""Between the paths of one tensor in a `Crossing`."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value. An argument template is the arguments of an op, with a `Ref` in place of each tensor."""

    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the graph, with its global shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: ValueKind
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module.

    Attributes:
        index: position among the calls of the forward, in the order in which they begin.
        fqn: FQN of the module.
        parent: index of the call that contains this one; None for the call of the root module.
    """

    index: int
    fqn: str
    parent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A module boundary that a value crosses.

    Attributes:
        call: index of the module call.
        direction: "input" where the value enters the call, "output" where it leaves.
        path: path of the argument or result, such as ``position_embeddings.0`` (`tree_paths.path_text`);
            several, joined by `SAME_TENSOR`, where one tensor is passed in several places.
    """

    call: int
    direction: Literal["input", "output"]
    path: str

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the tensor, of which the first names it."""
        return tuple(self.path.split(SAME_TENSOR))


ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_OVERLOAD_NAMES: dict[int, tuple[torch._ops.OpOverload, str]] = {}


def overload_name(target: torch._ops.OpOverload) -> str:
    """Return ``str(target)``, cached by identity: torch assembles the string, and a hash, on every call."""
    found = _OVERLOAD_NAMES.get(id(target))
    if found is None:
        found = _OVERLOAD_NAMES[id(target)] = target, str(target)
    return found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCache:
    """What a layer of a decoder keeps of earlier tokens.

    Attributes:
        window: of attention, the most tokens of which it keeps keys and values; None: all.
        latents: of attention, widths of the latents and of the rotary keys that it keeps in place of them (MLA).
        state_nbytes: bytes of recurrent states for one sequence; the op's first result has the batch as dim 0.
        kv_nbytes: of attention that is no single op, bytes of keys and values of one, split as the op's first result.
    """

    window: int | None = None
    latents: tuple[int, int] | None = None
    state_nbytes: int = 0
    kv_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: ``target`` applied to ``args`` and ``kwargs``, in which a `Ref` stands for a value.

    Attributes:
        name: unique in the graph.
        target: an op of torch, a custom op of shardplan, or a `planner.graph.nested_graph.NestedGraph`.
        args: positional arguments.
        kwargs: keyword arguments.
        call: index of the innermost module call that contains the op.
        inputs: the values that ``args`` and ``kwargs`` refer to, in order.
        crossings: for each input, the module boundaries between its producer and this op, in order.
        outputs: names of the results.
        grad_enabled: False inside ``torch.no_grad()``.
        is_zigzag: of an attention op, whether its sequences are in zigzag token order wherever they are sharded
            (`planner.plan.token_order`).
        is_local: whether ranks run the op on their local tensors, since DTensor has no rule for it
            (`planner.strategies.local_ops`).
        cache: what the op's layer keeps of earlier tokens in inference; None: keys and values of all, or nothing.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: int
    inputs: tuple[str, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    outputs: tuple[str, ...]
    grad_enabled: bool = True
    is_zigzag: bool = False
    is_local: bool = False
    cache: OpCache | None = None

    @property
    def target_name(self) -> str:
        """The op's name, as in ``aten.linear.default``."""
        if isinstance(self.target, torch._ops.OpOverload):
            return overload_name(self.target)
        return str(getattr(self.target, "__name__", self.target))


def written_input(target: Any, inputs: int) -> int | None:
    """Return the position of the tensor that an op writes to, among its ``inputs`` tensors; None for other ops.

    In-place ops write to their first tensor, ``out`` overloads to their last.
    """
    if not isinstance(target, torch._ops.OpOverload) or not inputs or not target._schema.is_mutable:
        return None
    name = target._overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__"):
        return 0
    return inputs - 1 if sum(argument.is_out for argument in target._schema.arguments) == 1 else None


def writes_plain(op: Op, inputs: Sequence[Value]) -> bool:
    """Return whether ``op`` writes other ``inputs``, which are not plain, to a plain tensor, such as a buffer."""
    written = written_input(op.target, len(inputs))
    return written is not None and inputs[written].kind == "plain" and any(v.kind != "plain" for v in inputs)


_WITHOUT_GRADIENT = frozenset({
    *("detach", "detach_", "detach_copy"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
})  # fmt: skip
"""Ops whose results need no gradient, whatever their inputs need."""

_LIKE_ANOTHER = frozenset({"type_as", "to", "view_as", "expand_as", "reshape_as"})
"""Ops that read only the shape or the dtype of their second tensor, which gets no gradient from them."""


def _differentiated(target: Any, sources: Sequence[Value]) -> Sequence[Value]:
    name = target._overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""
    return () if name in _WITHOUT_GRADIENT else sources[:1] if name in _LIKE_ANOTHER else sources


def output_value(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, target: Any, grad_enabled: bool, sources: Sequence[Value]
) -> Value:
    """Return the `Value` of one output of an op; its kind and ``requires_grad`` follow from the inputs, ``sources``.

    The output of an op that writes to an input is that input: what is written to a plain tensor becomes plain.
    """
    written = written_input(target, len(sources))
    decisive = sources if written is None else [sources[written]]
    kind: ValueKind = "plain" if all(source.kind == "plain" for source in decisive) else "activation"
    differentiable = grad_enabled and any(source.requires_grad for source in _differentiated(target, sources))
    has_gradient = dtype.is_floating_point or dtype.is_complex
    requires_grad = differentiable and kind != "plain" and has_gradient
    return Value(name=name, shape=shape, dtype=dtype, kind=kind, requires_grad=requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """An input of the root module: its value, and the path of the argument."""

    value: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """An output of the root module.

    Attributes:
        value: the name of the value.
        path: path of the result, as in `Crossing`.
        crossings: the module boundaries between the producer and the caller of the root module.
        is_loss: whether the value is the scalar loss that training differentiates.
        is_sent: whether a pipeline stage sends the value to the next stage, and receives its gradient.
        is_result: whether the caller uses the value, whose layout must then not be ``Partial``. In training the caller
            computes the loss from it, and its gradient comes in its own layout.
    """

    value: str
    path: str
    crossings: tuple[Crossing, ...]
    is_loss: bool
    is_sent: bool = False
    is_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A traced model.

    Attributes:
        digraph: a node for every op, an edge for every tensor between two ops (`build_digraph`).
        values: every tensor by name.
        calls: every module call, by index.
        inputs: tensor arguments of the root module.
        outputs: tensors that the root module returns.
        parameters: parameter value -> its FQNs; a tied parameter has several.
        rounded: length of a dim that is rounded up (`planner.graph.uneven_lengths`) -> its true length.
    """

    digraph: nx.MultiDiGraph[str]
    values: Mapping[str, Value]
    calls: tuple[Call, ...]
    inputs: tuple[ModelInput, ...]
    outputs: tuple[ModelOutput, ...]
    parameters: Mapping[str, tuple[str, ...]]
    rounded: Mapping[int, int] = field(default_factory=dict)

    @property
    def ops(self) -> list[Op]:
        """All ops, in the order of execution."""
        ops: list[Op] = self.digraph.graph["ops"]
        return ops


def build_digraph(ops: list[Op]) -> nx.MultiDiGraph[str]:
    """Return the graph of ``ops``: nodes in the order of execution, an edge for every tensor from producer to user."""
    graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(ops=ops)
    producers: dict[str, str] = {}
    for op in ops:
        graph.add_node(op.name, op=op)
        for value in op.inputs:
            if value in producers:
                graph.add_edge(producers[value], op.name, value=value)
        producers.update(dict.fromkeys(op.outputs, op.name))
    return graph


def later_uses(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Return op -> positions of its inputs whose gradient the backward adds to the gradient of an earlier use.

    The earlier use is an earlier op, or an earlier argument of the same op. Only ops with a backward count.
    """
    used: set[str] = set()
    positions: dict[str, tuple[int, ...]] = {}
    for op in graph.ops:
        has_backward = any(graph.values[name].requires_grad for name in op.outputs)
        reused = []
        for position, name in enumerate(op.inputs):
            if has_backward and graph.values[name].requires_grad:
                if name in used:
                    reused.append(position)
                used.add(name)
        positions[op.name] = tuple(reused)
    return positions


def leaves_of(template: Any) -> list[Any]:
    """Return the leaves of an argument template, in order: all parts that are not a tuple, list or mapping."""
    leaves: list[Any] = []
    _collect(template, leaves)
    return leaves


_LEAF_TYPES = frozenset({Ref, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""The common types of leaves. They are checked first, because ``isinstance(x, Mapping)`` is slow for other objects."""


def _collect(template: Any, into: list[Any]) -> None:
    if type(template) in _LEAF_TYPES:
        into.append(template)
    elif isinstance(template, (tuple, list)):
        for part in template:
            _collect(part, into)
    elif isinstance(template, Mapping):
        for part in template.values():
            _collect(part, into)
    else:
        into.append(template)


def with_refs(template: Any, substitute: Callable[[Ref], Any]) -> Any:
    """Return a copy of nested op arguments in which each `Ref` (to a value of the graph) is ``substitute(ref)``.

    Refs are visited depth first, from left to right.
    """
    if type(template) in _LEAF_TYPES:
        return substitute(template) if isinstance(template, Ref) else template
    if isinstance(template, (tuple, list)):
        return type(template)([with_refs(part, substitute) for part in template])
    if isinstance(template, Mapping):
        return {key: with_refs(part, substitute) for key, part in template.items()}
    return template


def scaled(item: Any, traced_batch: int, batch: int) -> Any:
    """Return a shape, size or argument with every multiple of ``traced_batch`` rescaled to ``batch``."""
    if isinstance(item, (tuple, list)):
        return type(item)(scaled(part, traced_batch, batch) for part in item)
    if isinstance(item, Mapping):
        return {key: scaled(part, traced_batch, batch) for key, part in item.items()}
    if isinstance(item, int) and not isinstance(item, bool) and item > 0 and item % traced_batch == 0:
        return item // traced_batch * batch
    return item


def at_batch(graph: OpGraph, traced_batch: int, batch: int) -> OpGraph:
    """Return ``graph`` as it would be traced at ``batch``.

    Args:
        graph: traced at a batch of ``traced_batch``.
        traced_batch: a prime of which no other size in the model is a multiple. Every size that is a multiple of the
            prime is therefore proportional to the batch, and one trace serves all numbers of micro-batches.
        batch: samples in the returned graph.
    """
    ops = [
        replace(
            op,
            target=op.target.at_batch(traced_batch, batch) if hasattr(op.target, "at_batch") else op.target,
            args=scaled(op.args, traced_batch, batch),
            kwargs=scaled(dict(op.kwargs), traced_batch, batch),
        )
        for op in graph.ops
    ]
    values = {name: replace(v, shape=scaled(v.shape, traced_batch, batch)) for name, v in graph.values.items()}
    return replace(graph, digraph=build_digraph(ops), values=values)


def with_results(graph: OpGraph, *, training: bool) -> OpGraph:
    """Return ``graph`` with its results marked (`ModelOutput.is_result`), and gradients only where a backward comes.

    In inference all activations that it returns are results. In training, where it returns no loss, these are the
    numbers that need a gradient, or else all tensors that do.
    """

    def marked(is_result: Callable[[Value], bool]) -> OpGraph:
        outputs = tuple(replace(output, is_result=is_result(graph.values[output.value])) for output in graph.outputs)
        return replace(graph, outputs=outputs)

    if not training:
        return marked(lambda value: value.kind == "activation")
    if not any(output.is_loss for output in graph.outputs):
        differentiable = [graph.values[output.value] for output in graph.outputs]
        has_numbers = any(value.requires_grad and value.shape == () for value in differentiable)
        graph = marked(lambda value: value.requires_grad and (value.shape == () or not has_numbers))
    return _without_dead_gradients(graph)


def _without_dead_gradients(graph: OpGraph) -> OpGraph:
    """Return ``graph`` in which only values that lead to what is differentiated need a gradient."""
    needed = {output.value for output in graph.outputs if output.is_loss or output.is_result or output.is_sent}
    for op in reversed(graph.ops):
        written = written_input(op.target, len(op.inputs))
        leads = any(name in needed and graph.values[name].requires_grad for name in op.outputs)
        if leads or (written is not None and op.inputs[written] in needed):
            needed.update(op.inputs)
    values = {
        name: value if name in needed or not value.requires_grad else replace(value, requires_grad=False)
        for name, value in graph.values.items()
    }
    return replace(graph, values=values)
