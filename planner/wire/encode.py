"""Writing of a traced module as a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from planner.errors import GraphFormatError, ModelError
from planner.graph.nested_graph import NestedGraph, NestedOp
from planner.graph.op_graph import Crossing, Op, OpCache, Value
from planner.graph.trace_module import TracedModule
from planner.plan.fingerprint import torch_fingerprint
from planner.wire.allowed_ops import name_of
from planner.wire.arguments import CannotWriteError, dtype_name, written
from planner.wire.decode import made_value
from planner.wire.document import (
    FORMAT,
    FORMAT_VERSION,
    CacheDocument,
    CrossingDocument,
    GraphDocument,
    InputDocument,
    ModelDocument,
    NestedGraphDocument,
    NestedOpDocument,
    OpDocument,
    OutputDocument,
    ParameterDocument,
    TraceDocument,
    ValueDocument,
)
from planner.wire.schemas import check_arguments, returns_list

_LOCALLY = "Plan it on this machine, with planner.build_plan; only graphs of torch's usual ops can be sent."


def document_of(module: TracedModule) -> GraphDocument:
    """Return the document of ``module``.

    Raises:
        ModelError: a document cannot hold an op or an argument of the graph. The message names the op and its module.
    """
    return _Writer(module).write()


class _Writer:
    def __init__(self, module: TracedModule) -> None:
        self._module = module
        self._graph = module.graph
        self._crossings: dict[Crossing, int] = {}
        self._bodies: dict[str, int] = {}
        self._body_documents: list[NestedGraphDocument] = []

    def write(self) -> GraphDocument:
        module, graph = self._module, self._graph
        positions = {fqn: index for index, fqn in reversed(list(enumerate(module.names.modules)))}
        ops = [self._op(op) for op in graph.ops]
        outputs = [
            OutputDocument(value=o.value, path=o.path, crossings=self._row(o.crossings), is_loss=o.is_loss)
            for o in graph.outputs
        ]
        return GraphDocument(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            torch=torch_fingerprint(),
            model=self._model(),
            trace=TraceDocument(
                dtype=module.dtype,  # type: ignore[arg-type]
                samples=module.samples,
                batch=module.traced_batch,
                any_batch=module.any_batch,
                fused_ops=module.fused_ops,
                fused_projections=module.fused_projections,
            ),
            values=self._values(),
            calls=[(positions[call.fqn], call.parent) for call in graph.calls],
            crossings=[CrossingDocument(call=c.call, direction=c.direction, path=c.path) for c in self._crossings],
            inputs=[InputDocument(value=model_input.value, path=model_input.path) for model_input in graph.inputs],
            outputs=outputs,
            parameters=[ParameterDocument(value=v, names=list(names)) for v, names in graph.parameters.items()],
            bodies=self._body_documents,
            ops=ops,
        )

    def _model(self) -> ModelDocument:
        module = self._module
        tp_plan = None if module.tp_plan is None else {str(k): str(v) for k, v in module.tp_plan.items()}
        return ModelDocument(
            name=module.name,
            fingerprint=module.fingerprint,
            parameters=list(module.names.parameters),
            modules=list(module.names.modules),
            tp_plan=tp_plan,
        )

    def _values(self) -> list[ValueDocument]:
        producers = {name: op for op in self._graph.ops for name in op.outputs}
        documents = []
        for name, value in self._graph.values.items():
            is_source = name not in producers
            if not is_source:
                self._check_made(value, producers[name])
            documents.append(
                ValueDocument(
                    name=name,
                    shape=list(value.shape),
                    dtype=self._dtype(value),
                    kind=value.kind if is_source else None,  # type: ignore[arg-type]
                    requires_grad=value.requires_grad if is_source else None,
                )
            )
        return documents

    def _check_made(self, value: Value, op: Op) -> None:
        """Check that a reader derives ``value`` from ``op``: a document has neither its kind nor ``requires_grad``."""
        sources = [self._graph.values[name] for name in op.inputs]
        made = made_value(value.name, value.shape, value.dtype, op, sources)
        # A reader finds out again which values lead to nothing that is differentiated.
        assert replace(made, requires_grad=value.requires_grad) == value, value

    def _dtype(self, value: Value) -> str:
        try:
            return dtype_name(value.dtype)
        except CannotWriteError as error:
            raise ModelError(f"the tensor {value.name} cannot be sent: {error}.", what_to_do=_LOCALLY) from error

    def _op(self, op: Op) -> OpDocument:
        try:
            body = self._body(op.target) if isinstance(op.target, NestedGraph) else None
            name = None if body is not None else _name(op.target, op.args, op.kwargs)
            args, kwargs = _arguments(op.args, op.kwargs)
        except (CannotWriteError, GraphFormatError) as error:
            fqn = self._graph.calls[op.call].fqn
            reason = error.detail if isinstance(error, GraphFormatError) else str(error)
            raise ModelError(
                f"the op {op.name} in module {fqn or '(root)'!r} cannot be sent: {reason.rstrip('.')}.",
                what_to_do=_LOCALLY,
                module=fqn,
            ) from error
        return OpDocument(
            name=op.name,
            op=name,
            body=body,
            args=args,
            kwargs=kwargs,
            call=op.call,
            crossings=[self._row(passed) for passed in op.crossings] if any(op.crossings) else None,
            outputs=list(op.outputs),
            no_grad=not op.grad_enabled,
            cache=_cache(op.cache),
        )

    def _row(self, crossings: Iterable[Crossing]) -> list[int]:
        return [self._crossings.setdefault(crossing, len(self._crossings)) for crossing in crossings]

    def _body(self, body: NestedGraph) -> int:
        if body.code not in self._bodies:
            document = NestedGraphDocument(
                inputs=list(body.inputs),
                steps=[_step(step) for step in body.ops],
                outputs=written(body.outputs),
            )
            self._bodies[body.code] = len(self._body_documents)
            self._body_documents.append(document)
        return self._bodies[body.code]


def _cache(cache: OpCache | None) -> CacheDocument | None:
    if cache is None:
        return None
    latents = None if cache.latents is None else list(cache.latents)
    return CacheDocument(
        window=cache.window, latents=latents, state_nbytes=cache.state_nbytes, kv_nbytes=cache.kv_nbytes
    )


def _step(step: NestedOp) -> NestedOpDocument:
    name = None if step.target is None else _name(step.target, step.args, step.kwargs)
    if name is not None and returns_list(step.target):
        raise CannotWriteError(f"its body runs {name}, which returns a list of tensors")
    args, kwargs = _arguments(step.args, step.kwargs)
    return NestedOpDocument(name=step.name, op=name, args=args, kwargs=kwargs)


def _name(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    name = name_of(target)
    if name is None:
        raise CannotWriteError(f"it runs {str(target).splitlines()[0][:100]}")
    check_arguments(target, args, kwargs, "")
    return name


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [written(item) for item in args], {key: written(item) for key, item in kwargs.items()}
