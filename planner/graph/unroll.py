"""Unrolling: converts the graph of a shortened model to the graph of the whole model.

The shortened model has only the first three of each run of repeated blocks (`planner.graph.fold`): A, B and C. Every
further block is a copy of C:

- the copy has its own results and its own parameters;
- where C reads a value of B, the copy reads the corresponding value of the preceding block;
- where C reads a value from elsewhere, the copy reads the same value; if the value crosses the boundary of B on its way
  to C, it crosses the boundaries of all preceding copies too.

Code after the repeated blocks reads values of the last copy where the traced graph reads values of C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from planner.graph.fold import TRACED_BLOCKS, RepeatedBlocks, fqn_in_whole
from planner.graph.op_graph import Call, Crossing, ModelOutput, Op, OpGraph, Ref, Value, build_digraph, with_refs

_A, _B, _C = range(TRACED_BLOCKS)

Crossings = tuple[Crossing, ...]

CopiedInput = Callable[[int], tuple[str, Crossings]]
"""Number of a copy -> the value that the copy reads in place of an input of C, and the boundaries that it crosses."""


class CannotUnrollError(ValueError):
    """A part of a repeated block does not repeat; the model has to be traced in full."""


def unroll(graph: OpGraph, repeats: Sequence[RepeatedBlocks], parameters: Sequence[tuple[str, ...]]) -> OpGraph:
    """Return the graph of the whole model.

    Args:
        graph: the graph of the shortened model, with the FQNs of the shortened model.
        repeats: the repeated blocks of the whole model.
        parameters: the FQNs of each parameter of the whole model; a tied parameter has several.

    Raises:
        CannotUnrollError: a part of a block does not repeat.
    """
    graph = _with_fqns(graph, repeats)
    for repeat in repeats:
        graph = _Unrolling(graph, repeat).whole()
    return _with_parameters(graph, parameters)


def _with_fqns(graph: OpGraph, repeats: Sequence[RepeatedBlocks]) -> OpGraph:
    """Return the graph with the FQNs of the whole model."""
    indices: dict[tuple[str, int], int] = {}
    for container in {repeat.container for repeat in repeats}:
        removed = 0
        in_container = sorted((r for r in repeats if r.container == container), key=lambda r: r.first)
        ends = [(repeat.first + TRACED_BLOCKS, repeat.length - TRACED_BLOCKS) for repeat in in_container]
        for index in range(_length_of(graph, container)):
            while ends and index + removed >= ends[0][0]:
                removed += ends.pop(0)[1]
            indices[container, index] = index + removed
    return dataclasses.replace(
        graph,
        calls=tuple(dataclasses.replace(call, fqn=fqn_in_whole(call.fqn, indices)) for call in graph.calls),
        parameters={
            value: tuple(fqn_in_whole(fqn, indices) for fqn in names) for value, names in graph.parameters.items()
        },
    )


def _length_of(graph: OpGraph, container: str) -> int:
    prefix = f"{container}." if container else ""
    names = {call.fqn[len(prefix) :].partition(".")[0] for call in graph.calls if call.fqn.startswith(prefix)}
    return 1 + max((int(name) for name in names if name.isdigit()), default=-1)


def _with_parameters(graph: OpGraph, parameters: Sequence[tuple[str, ...]]) -> OpGraph:
    """Return the graph with its parameters in the module's order.

    Raises:
        CannotUnrollError: a parameter of the graph is not among the module's ``parameters``.
    """
    value_of = {names[0]: value for value, names in graph.parameters.items()}
    if not set(parameters).issuperset(graph.parameters.values()):
        raise CannotUnrollError("blocks share a parameter")
    ordered = {value_of[names[0]]: names for names in parameters if names[0] in value_of}
    values = {value: graph.values[value] for value in ordered}
    return dataclasses.replace(graph, parameters=ordered, values={**values, **graph.values})


class _Unrolling:
    """Adds the missing blocks of one repeat to a graph."""

    def __init__(self, graph: OpGraph, repeat: RepeatedBlocks) -> None:
        self._graph = graph
        self._repeat = repeat
        self._copies = repeat.length - TRACED_BLOCKS
        prefix = f"{repeat.container}." if repeat.container else ""
        self._fqns = [f"{prefix}{repeat.first + offset}" for offset in range(repeat.length)]
        self._calls = [self._calls_of(fqn) for fqn in self._fqns[:TRACED_BLOCKS]]
        self._places = {call: (block, i) for block, calls in enumerate(self._calls) for i, call in enumerate(calls)}
        if len(self._calls[_B]) != len(self._calls[_C]):
            raise CannotUnrollError("blocks call different modules")
        self._c_end = self._calls[_C][-1]
        self._ops = [[op for op in graph.ops if op.call in calls] for calls in map(set, self._calls)]
        self._owner = self._owners()
        self._b_to_c = self._counterparts()

    def _calls_of(self, fqn: str) -> list[int]:
        calls = [call.index for call in self._graph.calls if (call.fqn + ".").startswith(fqn + ".")]
        if not calls or calls != list(range(calls[0], calls[-1] + 1)):
            raise CannotUnrollError(f"{fqn} is not called exactly once")
        return calls

    def _owners(self) -> dict[str, int]:
        """Return value -> the traced block (0 to 2) that owns it.

        The block that computes a value owns it. A parameter or buffer is owned by the only block that uses it.
        """
        owner: dict[str, int] = {}
        produced = {name for op in self._graph.ops for name in op.outputs}
        for block, ops in enumerate(self._ops):
            owner.update({name: block for op in ops for name in op.outputs})
        users: dict[str, set[int | None]] = {}
        for op in self._graph.ops:
            place = self._places.get(op.call)
            for name in op.inputs:
                users.setdefault(name, set()).add(None if place is None else place[0])
        model_inputs = {model_input.value for model_input in self._graph.inputs}
        for name, blocks in users.items():
            (only, *other_blocks) = blocks
            if name not in produced and name not in model_inputs and not other_blocks and only is not None:
                owner[name] = only
        return owner

    def _counterparts(self) -> dict[str, str]:
        """Return value that B owns -> the corresponding value of C."""
        b, c = self._ops[_B], self._ops[_C]
        if [op.target_name for op in b] != [op.target_name for op in c]:
            raise CannotUnrollError("blocks run different ops")
        counterparts: dict[str, str] = {}
        for op, other in zip(b, c, strict=True):
            if len(op.inputs) != len(other.inputs) or self._places[op.call][1] != self._places[other.call][1]:
                raise CannotUnrollError("blocks run different ops")
            counterparts.update(zip(op.outputs, other.outputs, strict=True))
            pairs = zip(op.inputs, other.inputs, strict=True)
            counterparts.update({x: y for x, y in pairs if self._owner.get(x) == _B and self._owner.get(y) == _C})
        return counterparts

    # --- calls, values and crossings of a copy (copies count from 1; 0 is C itself, -1 is B) ---

    def _call_in_copy(self, index: int, copy: int) -> int:
        """Return the whole graph's index of the call in ``copy`` that corresponds to the call ``index`` of C."""
        return index + copy * len(self._calls[_C])

    def _call_in_whole(self, index: int) -> int:
        """Return the whole graph's index of a call of the traced graph."""
        return index if index <= self._c_end else index + self._copies * len(self._calls[_C])

    @staticmethod
    def _value_in_copy(name: str, copy: int) -> str:
        return name if copy == 0 else f"{name}@{copy}"

    def _block(self, crossing: Crossing) -> int | None:
        place = self._places.get(crossing.call)
        return None if place is None else place[0]

    def _in_copy(self, crossings: Sequence[Crossing], copy: int) -> list[Crossing]:
        offset = copy * len(self._calls[_C])
        return [Crossing(call=c.call + offset, direction=c.direction, path=c.path) for c in crossings]

    def _in_whole(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        return [Crossing(call=self._call_in_whole(c.call), direction=c.direction, path=c.path) for c in crossings]

    def _as_in_c(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return crossings of B's calls as crossings of the corresponding calls of C."""
        return [dataclasses.replace(c, call=self._calls[_C][self._places[c.call][1]]) for c in crossings]

    def _input(self, name: str, crossings: Crossings) -> CopiedInput:
        """Return what each copy reads in place of the value ``name``, which an op of C reads through ``crossings``."""
        owner = self._owner.get(name)
        into = [c for c in crossings if self._block(c) == _C]
        through = [c for c in crossings if self._block(c) == _B]
        before = [c for c in crossings if self._block(c) not in (_B, _C)]
        if [*before, *through, *into] != list(crossings):
            raise CannotUnrollError("a tensor crosses between blocks back and forth")
        if owner == _C:
            return lambda copy: (self._value_in_copy(name, copy), tuple(self._in_copy(crossings, copy)))
        in_c = self._as_in_c(through)
        if owner == _B:
            if name not in self._b_to_c or before:
                raise CannotUnrollError("a tensor of the preceding block has no counterpart")
            counterpart = self._b_to_c[name]
            return lambda copy: (
                self._value_in_copy(counterpart, copy - 1),
                (*self._in_copy(in_c, copy - 1), *self._in_copy(into, copy)),
            )
        if owner == _A and not through:
            raise CannotUnrollError("a tensor comes from two blocks before")

        def from_elsewhere(copy: int) -> tuple[str, Crossings]:
            through_copies = [c for j in range(copy) for c in self._in_copy(in_c, j)] if in_c else []
            return name, (*before, *through, *through_copies, *self._in_copy(into, copy))

        return from_elsewhere

    def _from_last(self, name: str, crossings: Crossings) -> tuple[str, Crossings]:
        """Return the value and the crossings that replace ``name`` and ``crossings`` in the whole graph.

        The value is an input of an op after the repeated blocks, or a model output.
        """
        owner = self._owner.get(name)
        through = [c for c in crossings if self._block(c) == _C]
        if owner == _C:
            inside = [
                *self._in_copy(through, self._copies),
                *self._in_whole([c for c in crossings if self._block(c) != _C]),
            ]
            return self._value_in_copy(name, self._copies), tuple(inside)
        if owner in (_A, _B) and not through:
            raise CannotUnrollError("a tensor of an inner block is used after the repeated blocks")
        if not through:
            return name, tuple(self._in_whole(crossings))
        start = crossings.index(through[0])
        before, after = crossings[:start], crossings[start + len(through) :]
        if list(crossings[start : start + len(through)]) != through:
            raise CannotUnrollError("a tensor crosses between blocks back and forth")
        through_copies = [c for j in range(self._copies + 1) for c in self._in_copy(through, j)]
        return name, (*before, *through_copies, *self._in_whole(after))

    # --- the graph ---

    def whole(self) -> OpGraph:
        graph = self._graph
        last_op = self._ops[_C][-1].name
        position = next(i for i, op in enumerate(graph.ops) if op.name == last_op)
        ops, ops_after = list(graph.ops[: position + 1]), graph.ops[position + 1 :]
        inputs = [[self._input(*pair) for pair in zip(op.inputs, op.crossings, strict=True)] for op in self._ops[_C]]
        for copy in range(1, self._copies + 1):
            ops += [self._copied(op, op_inputs, copy) for op, op_inputs in zip(self._ops[_C], inputs, strict=True)]
        ops += [self._op_after(op) for op in ops_after]
        values = dict(graph.values)
        for name, owner in self._owner.items():
            if owner == _C:
                for copy in range(1, self._copies + 1):
                    values[self._value_in_copy(name, copy)] = self._named(graph.values[name], copy)
        return dataclasses.replace(
            graph,
            digraph=build_digraph(ops),
            values=values,
            calls=self._all_calls(),
            outputs=tuple(self._output(output) for output in graph.outputs),
            parameters=self._parameters(),
        )

    def _named(self, value: Value, copy: int) -> Value:
        return Value(
            name=self._value_in_copy(value.name, copy),
            shape=value.shape,
            dtype=value.dtype,
            kind=value.kind,
            requires_grad=value.requires_grad,
        )

    def _copied(self, op: Op, inputs: Sequence[CopiedInput], copy: int) -> Op:
        outputs = tuple(self._value_in_copy(name, copy) for name in op.outputs)
        copied_inputs = [input_(copy) for input_ in inputs]
        return self._rewired(op, self._call_in_copy(op.call, copy), copied_inputs, f"{op.name}@{copy}", outputs)

    def _op_after(self, op: Op) -> Op:
        inputs = [self._from_last(*pair) for pair in zip(op.inputs, op.crossings, strict=True)]
        return self._rewired(op, self._call_in_whole(op.call), inputs, op.name, op.outputs)

    @staticmethod
    def _rewired(op: Op, call: int, inputs: Sequence[tuple[str, Crossings]], name: str, outputs: tuple[str, ...]) -> Op:
        names = iter([value for value, _ in inputs])
        args, kwargs = with_refs((op.args, op.kwargs), lambda _: Ref(next(names)))
        return Op(
            name=name,
            target=op.target,
            args=args,
            kwargs=kwargs,
            call=call,
            inputs=tuple([value for value, _ in inputs]),
            crossings=tuple([crossings for _, crossings in inputs]),
            outputs=outputs,
            grad_enabled=op.grad_enabled,
        )

    def _all_calls(self) -> tuple[Call, ...]:
        calls = list(self._graph.calls[: self._c_end + 1])
        calls_of_c = [self._graph.calls[index] for index in self._calls[_C]]
        for copy in range(1, self._copies + 1):
            fqn = self._fqns[TRACED_BLOCKS - 1 + copy]
            for call in calls_of_c:
                inner = call.fqn[len(self._fqns[TRACED_BLOCKS - 1]) :]
                outermost = call.index == calls_of_c[0].index
                assert call.parent is not None
                parent: int | None = call.parent if outermost else self._call_in_copy(call.parent, copy)
                calls.append(Call(index=self._call_in_copy(call.index, copy), fqn=fqn + inner, parent=parent))
        for call in self._graph.calls[self._c_end + 1 :]:
            parent = None if call.parent is None else self._call_in_whole(call.parent)
            calls.append(Call(index=self._call_in_whole(call.index), fqn=call.fqn, parent=parent))
        return tuple(calls)

    def _parameters(self) -> Mapping[str, tuple[str, ...]]:
        parameters = dict(self._graph.parameters)
        own = self._fqns[TRACED_BLOCKS - 1] + "."
        for value, names in self._graph.parameters.items():
            inside = any(name.startswith(own) for name in names)
            if (self._owner.get(value) == _C) != inside or (inside and not all(n.startswith(own) for n in names)):
                raise CannotUnrollError("blocks share a parameter")
            if inside:
                for copy in range(1, self._copies + 1):
                    prefix = self._fqns[TRACED_BLOCKS - 1 + copy] + "."
                    parameters[self._value_in_copy(value, copy)] = tuple(prefix + name[len(own) :] for name in names)
        return parameters

    def _output(self, output: ModelOutput) -> ModelOutput:
        value, crossings = self._from_last(output.value, output.crossings)
        return dataclasses.replace(output, value=value, crossings=crossings)
