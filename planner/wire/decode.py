"""Reading of a document as a traced module. Every name, number and op in it is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from planner.errors import GraphFormatError
from planner.graph.layer_caches import decoding_step
from planner.graph.nested_graph import NestedGraph, NestedOp, referenced_values
from planner.graph.op_graph import (
    ATTENTION,
    Crossing,
    ModelInput,
    ModelOutput,
    Op,
    OpCache,
    OpGraph,
    Value,
    build_digraph,
    output_value,
    with_results,
)
from planner.graph.trace_module import TRACE_BATCH, ModuleNames, TracedModule
from planner.plan.fingerprint import torch_fingerprint
from planner.wire.allowed_ops import find_op
from planner.wire.arguments import DTYPES, ArgumentReader
from planner.wire.document import (
    CacheDocument,
    GraphDocument,
    NestedGraphDocument,
    NestedOpDocument,
    OpDocument,
    ValueDocument,
)
from planner.wire.module_calls import OUTSIDE, Routes, read_calls
from planner.wire.schemas import check_arguments, count_of, returns_list

MAX_NBYTES: Final = 2**58
"""Most bytes of one tensor: far more than real tensors have, and far less than what overflows 64 bits."""
MAX_STEPS: Final = 200_000
"""Most ops of all nested graphs together. A nested graph counts once for each op that runs it."""

Shape = tuple[int, ...]


def made_value(name: str, shape: Shape, dtype: torch.dtype, op: Op, sources: Sequence[Value]) -> Value:
    """Return an output of ``op``. Its kind and whether it requires a gradient follow from the inputs, ``sources``."""
    return output_value(name, shape, dtype, op.target, op.grad_enabled, sources)


def read_document(document: GraphDocument) -> TracedModule:
    """Return the traced module in ``document``.

    Raises:
        GraphFormatError: the document is invalid. The message names the place that is wrong.
    """
    if document.torch != torch_fingerprint():
        raise GraphFormatError.at(
            "torch",
            f"it was traced by torch {document.torch}, and here is {torch_fingerprint()}",
            what_to_do="Use the same torch on both sides.",
        )
    model, at = document.model, document.trace
    if at.any_batch and at.batch != TRACE_BATCH:
        raise GraphFormatError.at("trace.batch", f"a graph for any batch is traced at {TRACE_BATCH}")
    _distinct(model.parameters, "model.parameters")
    _distinct(model.modules, "model.modules")
    return TracedModule(
        name=model.name,
        names=ModuleNames(parameters=tuple(model.parameters), modules=tuple(model.modules)),
        fingerprint=model.fingerprint,
        tp_plan=model.tp_plan,
        graph=with_results(_Reader(document).read(), training=True),
        dtype=at.dtype,
        samples=at.samples,
        traced_batch=at.batch,
        any_batch=at.any_batch,
        fused_ops=at.fused_ops,
        fused_projections=at.fused_projections,
    )


def _distinct(names: Sequence[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise GraphFormatError.at(where, "a name is there twice")


class _Reader:
    def __init__(self, document: GraphDocument) -> None:
        self._document = document
        self._declared: dict[str, ValueDocument] = {}
        self._values: dict[str, Value] = {}
        self._home: dict[str, int] = {}
        """Value -> index of the module call that computes it."""
        self._calls = read_calls(document)
        self._routes = Routes(document, self._calls)
        self._steps_left = MAX_STEPS
        self._arguments = ArgumentReader(self._values.__contains__)

    def read(self) -> OpGraph:
        self._read_given()
        inputs, parameters = self._read_inputs(), self._read_parameters()
        bodies = [_read_body(body, f"bodies[{index}]") for index, body in enumerate(self._document.bodies)]
        ops = self._read_ops(bodies)
        if missing := self._declared.keys() - self._values.keys():
            raise GraphFormatError.at("values", f"no op makes {sorted(missing)[0]!r}, and it has no kind")
        return OpGraph(
            digraph=build_digraph(ops),
            values={name: self._values[name] for name in self._declared},
            calls=self._calls,
            inputs=inputs,
            outputs=self._read_outputs(),
            parameters=parameters,
        )

    def _read_given(self) -> None:
        """Read the values that no op computes, and the declared shapes and dtypes of all values."""
        for index, value in enumerate(self._document.values):
            where = f"values[{index}]"
            if value.name in self._declared:
                raise GraphFormatError.at(where, f"{value.name!r} is there twice")
            self._declared[value.name] = value
            if (value.kind is None) != (value.requires_grad is None):
                raise GraphFormatError.at(where, "kind and requires_grad go together")
            dtype = _dtype_of(value, where)
            if value.kind is None:
                continue
            if value.requires_grad and not (dtype.is_floating_point and value.kind == "parameter"):
                raise GraphFormatError.at(where, "only floating-point parameters require a gradient")
            self._values[value.name] = Value(
                name=value.name,
                shape=tuple(value.shape),
                dtype=dtype,
                kind=value.kind,
                requires_grad=bool(value.requires_grad),
            )

    def _of_kind(self, name: str, kind: str, where: str) -> str:
        if name not in self._values or self._values[name].kind != kind:
            raise GraphFormatError.at(where, f"there is no {kind} {name[:100]!r}")
        return name

    def _read_inputs(self) -> tuple[ModelInput, ...]:
        inputs = self._document.inputs
        _distinct([item.value for item in inputs], "inputs")
        self._home.update({item.value: OUTSIDE for item in inputs})
        return tuple(
            ModelInput(value=self._of_kind(item.value, "input", f"inputs[{index}]"), path=item.path)
            for index, item in enumerate(inputs)
        )

    def _read_parameters(self) -> Mapping[str, tuple[str, ...]]:
        model_parameters = set(self._document.model.parameters)
        names_by_value: dict[str, tuple[str, ...]] = {}
        for index, item in enumerate(self._document.parameters):
            where = f"parameters[{index}]"
            value = self._of_kind(item.value, "parameter", where)
            if value in names_by_value:
                raise GraphFormatError.at(where, f"{value[:100]!r} is there twice")
            if unknown := [name for name in item.names if name not in model_parameters]:
                raise GraphFormatError.at(where, f"the model has no {unknown[0][:100]!r}")
            names_by_value[value] = tuple(item.names)
        _distinct([name for names in names_by_value.values() for name in names], "parameters")
        nameless = [
            value.name
            for value in self._values.values()
            if value.kind == "parameter" and value.name not in names_by_value
        ]
        if nameless:
            raise GraphFormatError.at("parameters", f"{nameless[0][:100]!r} has no name")
        return names_by_value

    def _read_outputs(self) -> tuple[ModelOutput, ...]:
        outputs = []
        for index, output in enumerate(self._document.outputs):
            where = f"outputs[{index}]"
            value = self._values.get(output.value)
            if value is None:
                raise GraphFormatError.at(where, f"there is no value {output.value[:100]!r}")
            if output.is_loss and (value.shape != () or not value.requires_grad):
                raise GraphFormatError.at(where, "a loss is one number that requires a gradient")
            crossings = self._follow(output.value, output.crossings, OUTSIDE, where)
            outputs.append(
                ModelOutput(value=output.value, path=output.path, crossings=crossings, is_loss=output.is_loss)
            )
        if sum(output.is_loss for output in outputs) > 1:
            raise GraphFormatError.at("outputs", "there is more than one loss")
        return tuple(outputs)

    # --- ops ---

    def _read_ops(self, bodies: Sequence[NestedGraph]) -> list[Op]:
        _distinct([op.name for op in self._document.ops], "ops")
        return [self._read_op(op, bodies, f"ops[{index}]") for index, op in enumerate(self._document.ops)]

    def _read_op(self, document: OpDocument, bodies: Sequence[NestedGraph], where: str) -> Op:
        if document.call >= len(self._calls):
            raise GraphFormatError.at(f"{where}.call", "there is no such call")
        args = tuple(self._arguments.read(item, f"{where}.args[{i}]") for i, item in enumerate(document.args))
        kwargs = {name: self._arguments.read(item, f"{where}.kwargs.{name}") for name, item in document.kwargs.items()}
        inputs = referenced_values((args, kwargs))
        op = Op(
            name=document.name,
            target=_target(document, bodies, where),
            args=args,
            kwargs=kwargs,
            call=document.call,
            inputs=tuple(inputs),
            crossings=self._crossings(document, inputs, where),
            outputs=tuple(document.outputs),
            grad_enabled=not document.no_grad,
            cache=_cache(document.cache),
        )
        self._check(op, where)
        self._make(op, where)
        self._check_cache(op, where)
        return op

    def _check_cache(self, op: Op, where: str) -> None:
        if op.cache is None:
            return
        if (op.cache.state_nbytes or op.cache.kv_nbytes) and not self._values[op.outputs[0]].shape:
            raise GraphFormatError.at(f"{where}.cache", "states are kept for each sample, and its result has no dims")
        if op.cache.latents is None and op.cache.window is None:
            return
        keys = self._values[op.inputs[1]].shape if op.target is ATTENTION else ()
        if len(keys) != 4 or (op.cache.latents is not None and op.cache.latents[1] >= keys[3]):
            raise GraphFormatError.at(f"{where}.cache", "it is no attention with keys of such a width")

    def _check(self, op: Op, where: str) -> None:
        if isinstance(op.target, NestedGraph):
            self._steps_left -= len(op.target.ops)
            if self._steps_left < 0:
                raise GraphFormatError.at(where, f"its bodies run more than {MAX_STEPS} ops")
            if len(op.args) != len(op.target.inputs) or op.kwargs:
                raise GraphFormatError.at(where, f"its body takes {len(op.target.inputs)} arguments")
            return
        check_arguments(op.target, op.args, op.kwargs, where)
        if op.target_name == decoding_step.OP_NAME and not decoding_step.is_well_formed(op):
            raise GraphFormatError.at(where, f"{op.target} does not say what a layer keeps")
        try:
            count = count_of(op.target, op.args, op.kwargs, self._values[op.inputs[0]].shape if op.inputs else ())
        except ValueError as error:
            raise GraphFormatError.at(where, f"{op.target}: {error}") from error
        if count != len(op.outputs):
            raise GraphFormatError.at(where, f"{op.target} makes {count} tensors here, and it has {len(op.outputs)}")

    def _make(self, op: Op, where: str) -> None:
        sources = [self._values[name] for name in op.inputs]
        for name in op.outputs:
            declared = self._declared.get(name)
            if declared is None or name in self._values:
                what = "is no value of the graph" if declared is None else "is there before the op"
                raise GraphFormatError.at(f"{where}.outputs", f"{name[:100]!r} {what}")
            dtype = DTYPES[declared.dtype]
            self._values[name] = made_value(name, tuple(declared.shape), dtype, op, sources)
            self._home[name] = op.call

    def _crossings(self, document: OpDocument, inputs: Sequence[str], where: str) -> tuple[tuple[Crossing, ...], ...]:
        rows = document.crossings if document.crossings is not None else [[]] * len(inputs)
        if len(rows) != len(inputs):
            raise GraphFormatError.at(f"{where}.crossings", f"there are {len(rows)} of {len(inputs)} values")
        return tuple(
            self._follow(value, row, document.call, f"{where}.crossings[{index}]")
            for index, (value, row) in enumerate(zip(inputs, rows, strict=True))
        )

    def _follow(self, value: str, row: Sequence[int], end: int, where: str) -> tuple[Crossing, ...]:
        return self._routes.follow(row, self._home.get(value, OUTSIDE), end, where)


def _dtype_of(value: ValueDocument, where: str) -> torch.dtype:
    if value.dtype not in DTYPES:
        raise GraphFormatError.at(f"{where}.dtype", f"{value.dtype[:50]!r} is no dtype")
    dtype = DTYPES[value.dtype]
    if math.prod(value.shape) * dtype.itemsize > MAX_NBYTES:
        raise GraphFormatError.at(f"{where}.shape", f"the tensor has more than {MAX_NBYTES} bytes")
    return dtype


def _cache(document: CacheDocument | None) -> OpCache | None:
    if document is None:
        return None
    latents = None if document.latents is None else (document.latents[0], document.latents[1])
    return OpCache(
        window=document.window,
        latents=latents,
        state_nbytes=document.state_nbytes,
        kv_nbytes=document.kv_nbytes,
    )


def _target(document: OpDocument, bodies: Sequence[NestedGraph], where: str) -> Any:
    if (document.op is None) == (document.body is None):
        raise GraphFormatError.at(where, "it has one of op and body")
    if document.body is not None:
        if document.body >= len(bodies):
            raise GraphFormatError.at(f"{where}.body", "there is no such body")
        return bodies[document.body]
    return _find(document.op, where)


def _find(name: str | None, where: str) -> torch._ops.OpOverload:
    op = None if name is None else find_op(name)
    if op is None:
        advice = "Only torch's usual ops are planned for; planner.build_plan takes any."
        raise GraphFormatError.at(f"{where}.op", f"{str(name)[:100]!r} is no op that is known", what_to_do=advice)
    return op


def _read_body(document: NestedGraphDocument, where: str) -> NestedGraph:
    _distinct([*document.inputs, *(step.name for step in document.steps)], where)
    value_names = set(document.inputs)
    reader = ArgumentReader(value_names.__contains__)
    steps = []
    for index, step in enumerate(document.steps):
        steps.append(_read_step(step, reader, f"{where}.steps[{index}]"))
        value_names.add(step.name)
    outputs = reader.read(document.outputs, f"{where}.outputs")
    return NestedGraph(inputs=tuple(document.inputs), ops=tuple(steps), outputs=outputs)


def _read_step(document: NestedOpDocument, reader: ArgumentReader, where: str) -> NestedOp:
    args = tuple(reader.read(item, f"{where}.args[{i}]") for i, item in enumerate(document.args))
    kwargs = {name: reader.read(item, f"{where}.kwargs.{name}") for name, item in document.kwargs.items()}
    if document.op is None:
        if len(args) != 2 or type(args[1]) is not int or not referenced_values(args[:1]) or kwargs:
            raise GraphFormatError.at(where, "an item is taken of a value, by a whole number")
        return NestedOp(name=document.name, target=None, args=args, kwargs={})
    op = _find(document.op, where)
    check_arguments(op, args, kwargs, where)
    if returns_list(op):
        raise GraphFormatError.at(where, f"{op} returns a list of tensors, which is left out of bodies")
    return NestedOp(name=document.name, target=op, args=args, kwargs=kwargs)
