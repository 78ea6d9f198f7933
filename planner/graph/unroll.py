"""The graph of a whole model from that of its folded form: see `planner.graph.fold`.

Of a repeat, the folded graph has blocks A, B and C. Each further block is a copy of C: what C makes, the copy makes
anew; what C takes from B, the copy takes from the block before it; what comes from elsewhere stays, but has passed
through one more block if it passed through B on its way to C. What comes after the repeat takes from the last copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from planner.graph.fold import TRACED_BLOCKS, RepeatedBlocks, fqn_in_whole
from planner.graph.op_graph import Call, Crossing, ModelOutput, Op, OpGraph, Ref, Value, build_digraph, with_refs

Crossings = tuple[Crossing, ...]

Copied = Callable[[int], tuple[str, Crossings]]
"""Number of a copy -> the value that it reads in place of one that C does, and the boundaries that passes there."""


class CannotUnrollError(ValueError):
    """The folded graph has something that does not repeat; the model is to be traced in full."""


def unroll(graph: OpGraph, repeats: Sequence[RepeatedBlocks], parameters: Sequence[tuple[str, ...]]) -> OpGraph:
    """Return the graph of the whole model.

    Args:
        graph: of the model without all but `TRACED_BLOCKS` blocks of each repeat, FQNs as in that shorter model.
        repeats: what was left out.
        parameters: every FQN of each of the whole model's parameters.

    Raises:
        CannotUnrollError: something in a block does not repeat.
    """
    graph = _with_fqns(graph, repeats)
    for repeat in repeats:
        graph = _Unrolling(graph, repeat).whole()
    return _with_parameters(graph, parameters)


def _with_fqns(graph: OpGraph, repeats: Sequence[RepeatedBlocks]) -> OpGraph:
    """Return the graph with every FQN as it is in the whole model."""
    indices: dict[tuple[str, int], int] = {}
    for container in {repeat.container for repeat in repeats}:
        dropped = 0
        own = sorted((r for r in repeats if r.container == container), key=lambda r: r.first)
        ends = [(repeat.first + TRACED_BLOCKS, repeat.length - TRACED_BLOCKS) for repeat in own]
        for index in range(_length_of(graph, container)):
            while ends and index + dropped >= ends[0][0]:
                dropped += ends.pop(0)[1]
            indices[container, index] = index + dropped
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
    """Return the graph with its parameters in the order of the module, each known to be one of the module's."""
    value_of = {names[0]: value for value, names in graph.parameters.items()}
    if not set(parameters).issuperset(graph.parameters.values()):
        raise CannotUnrollError("a parameter that is shared between blocks")
    ordered = {value_of[names[0]]: names for names in parameters if names[0] in value_of}
    values = {value: graph.values[value] for value in ordered}
    return dataclasses.replace(graph, parameters=ordered, values={**values, **graph.values})


class _Unrolling:
    """Puts the missing blocks of one repeat into a graph."""

    def __init__(self, graph: OpGraph, repeat: RepeatedBlocks) -> None:
        self._graph = graph
        self._repeat = repeat
        self._copies = repeat.length - TRACED_BLOCKS
        prefix = f"{repeat.container}." if repeat.container else ""
        self._fqns = [f"{prefix}{repeat.first + offset}" for offset in range(repeat.length)]
        self._calls = [self._calls_of(fqn) for fqn in self._fqns[:TRACED_BLOCKS]]
        self._place = {call: (block, i) for block, calls in enumerate(self._calls) for i, call in enumerate(calls)}
        if len(self._calls[1]) != len(self._calls[2]):
            raise CannotUnrollError("blocks that call different modules")
        self._c_end = self._calls[2][-1]
        self._ops = [[op for op in graph.ops if op.call in calls] for calls in map(set, self._calls)]
        self._owner = self._owners()
        self._b_to_c = self._counterparts()

    def _calls_of(self, fqn: str) -> list[int]:
        calls = [call.index for call in self._graph.calls if (call.fqn + ".").startswith(fqn + ".")]
        if not calls or calls != list(range(calls[0], calls[-1] + 1)):
            raise CannotUnrollError(f"{fqn} is not called once")
        return calls

    def _owners(self) -> dict[str, int]:
        """Return value -> which of the kept blocks makes it, or alone uses it where no op makes it."""
        owner: dict[str, int] = {}
        made = {name for op in self._graph.ops for name in op.outputs}
        for block, ops in enumerate(self._ops):
            owner.update({name: block for op in ops for name in op.outputs})
        users: dict[str, set[int | None]] = {}
        for op in self._graph.ops:
            place = self._place.get(op.call)
            for name in op.inputs:
                users.setdefault(name, set()).add(None if place is None else place[0])
        given = {model_input.value for model_input in self._graph.inputs}
        for name, blocks in users.items():
            (only, *others) = blocks
            if name not in made and name not in given and not others and only is not None:
                owner[name] = only
        return owner

    def _counterparts(self) -> dict[str, str]:
        """Return what B makes or has -> what C makes or has in its place."""
        b, c = self._ops[1], self._ops[2]
        if [op.target_name for op in b] != [op.target_name for op in c]:
            raise CannotUnrollError("blocks that run different ops")
        found: dict[str, str] = {}
        for op, other in zip(b, c, strict=True):
            if len(op.inputs) != len(other.inputs) or self._place[op.call][1] != self._place[other.call][1]:
                raise CannotUnrollError("blocks that run different ops")
            found.update(zip(op.outputs, other.outputs, strict=True))
            pairs = zip(op.inputs, other.inputs, strict=True)
            found.update({x: y for x, y in pairs if self._owner.get(x) == 1 and self._owner.get(y) == 2})
        return found

    # --- names in the j-th copy (j from 1; 0 is C itself, -1 is B) ---

    def _call(self, index: int, copy: int) -> int:
        """Return the index of the call in the whole graph that is to copy ``copy`` what ``index`` is to C."""
        return index + copy * len(self._calls[2])

    def _after(self, index: int) -> int:
        """Return where a call of the folded graph is in the whole one."""
        return index if index <= self._c_end else index + self._copies * len(self._calls[2])

    @staticmethod
    def _value(name: str, copy: int) -> str:
        return name if copy == 0 else f"{name}@{copy}"

    def _block(self, crossing: Crossing) -> int | None:
        place = self._place.get(crossing.call)
        return None if place is None else place[0]

    def _moved(self, crossings: Sequence[Crossing], copy: int) -> list[Crossing]:
        further = copy * len(self._calls[2])
        return [Crossing(call=c.call + further, direction=c.direction, path=c.path) for c in crossings]

    def _settled(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        return [Crossing(call=self._after(c.call), direction=c.direction, path=c.path) for c in crossings]

    def _as_in_c(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return crossings of B as they would be of C."""
        return [dataclasses.replace(c, call=self._calls[2][self._place[c.call][1]]) for c in crossings]

    def _input(self, name: str, crossings: Crossings) -> Copied:
        """Return what an input of an op of C is in a copy."""
        owner = self._owner.get(name)
        into = [c for c in crossings if self._block(c) == 2]
        through = [c for c in crossings if self._block(c) == 1]
        before = [c for c in crossings if self._block(c) not in (1, 2)]
        if [*before, *through, *into] != list(crossings):
            raise CannotUnrollError("a tensor that goes back and forth between blocks")
        if owner == 2:
            return lambda copy: (self._value(name, copy), tuple(self._moved(crossings, copy)))
        in_c = self._as_in_c(through)
        if owner == 1:
            if name not in self._b_to_c or before:
                raise CannotUnrollError("a tensor of the block before that has no counterpart")
            made = self._b_to_c[name]
            return lambda copy: (
                self._value(made, copy - 1),
                (*self._moved(in_c, copy - 1), *self._moved(into, copy)),
            )
        if owner == 0 and not through:
            raise CannotUnrollError("a tensor from two blocks before")

        def passed_on(copy: int) -> tuple[str, Crossings]:
            further = [c for j in range(copy) for c in self._moved(in_c, j)] if in_c else []
            return name, (*before, *through, *further, *self._moved(into, copy))

        return passed_on

    def _from_last(self, name: str, crossings: Crossings) -> tuple[str, Crossings]:
        """Return an input of something after the repeat."""
        owner = self._owner.get(name)
        through = [c for c in crossings if self._block(c) == 2]
        if owner == 2:
            inside = [
                *self._moved(through, self._copies),
                *self._settled([c for c in crossings if self._block(c) != 2]),
            ]
            return self._value(name, self._copies), tuple(inside)
        if owner in (0, 1) and not through:
            raise CannotUnrollError("a tensor of an inner block that is used after the repeat")
        if not through:
            return name, tuple(self._settled(crossings))
        start = crossings.index(through[0])
        ahead, behind = crossings[:start], crossings[start + len(through) :]
        if list(crossings[start : start + len(through)]) != through:
            raise CannotUnrollError("a tensor that goes back and forth between blocks")
        passed = [c for j in range(self._copies + 1) for c in self._moved(through, j)]
        return name, (*ahead, *passed, *self._settled(behind))

    # --- the graph ---

    def whole(self) -> OpGraph:
        graph = self._graph
        last_op = self._ops[2][-1].name
        position = next(i for i, op in enumerate(graph.ops) if op.name == last_op)
        before, after = graph.ops[: position + 1], graph.ops[position + 1 :]
        ops = list(before)
        inputs = [[self._input(*pair) for pair in zip(op.inputs, op.crossings, strict=True)] for op in self._ops[2]]
        for copy in range(1, self._copies + 1):
            ops += [self._copied(op, found, copy) for op, found in zip(self._ops[2], inputs, strict=True)]
        ops += [self._settled_op(op) for op in after]
        values = dict(graph.values)
        for name, owner in self._owner.items():
            if owner == 2:
                for copy in range(1, self._copies + 1):
                    values[self._value(name, copy)] = self._named(graph.values[name], copy)
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
            name=self._value(value.name, copy),
            shape=value.shape,
            dtype=value.dtype,
            kind=value.kind,
            requires_grad=value.requires_grad,
        )

    def _copied(self, op: Op, inputs: Sequence[Copied], copy: int) -> Op:
        outputs = tuple(self._value(name, copy) for name in op.outputs)
        found = [input_(copy) for input_ in inputs]
        return self._rewired(op, self._call(op.call, copy), found, f"{op.name}@{copy}", outputs)

    def _settled_op(self, op: Op) -> Op:
        inputs = [self._from_last(*pair) for pair in zip(op.inputs, op.crossings, strict=True)]
        return self._rewired(op, self._after(op.call), inputs, op.name, op.outputs)

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
        own = [self._graph.calls[index] for index in self._calls[2]]
        for copy in range(1, self._copies + 1):
            fqn = self._fqns[TRACED_BLOCKS - 1 + copy]
            for call in own:
                inner = call.fqn[len(self._fqns[TRACED_BLOCKS - 1]) :]
                outermost = call.index == own[0].index
                assert call.parent is not None
                parent = call.parent if outermost else self._call(call.parent, copy)
                calls.append(Call(index=self._call(call.index, copy), fqn=fqn + inner, parent=parent))
        for call in self._graph.calls[self._c_end + 1 :]:
            above = None if call.parent is None else self._after(call.parent)
            calls.append(Call(index=self._after(call.index), fqn=call.fqn, parent=above))
        return tuple(calls)

    def _parameters(self) -> Mapping[str, tuple[str, ...]]:
        found = dict(self._graph.parameters)
        own = self._fqns[TRACED_BLOCKS - 1] + "."
        for value, names in self._graph.parameters.items():
            inside = any(name.startswith(own) for name in names)
            if (self._owner.get(value) == 2) != inside or (inside and not all(n.startswith(own) for n in names)):
                raise CannotUnrollError("a parameter that is shared between blocks")
            if inside:
                for copy in range(1, self._copies + 1):
                    prefix = self._fqns[TRACED_BLOCKS - 1 + copy] + "."
                    found[self._value(value, copy)] = tuple(prefix + name[len(own) :] for name in names)
        return found

    def _output(self, output: ModelOutput) -> ModelOutput:
        value, crossings = self._from_last(output.value, output.crossings)
        return dataclasses.replace(output, value=value, crossings=crossings)
