"""Which module reads each parameter, under which of its names: often not the module that has the parameter.

`nn.MultiheadAttention` reads the weight of its child ``out_proj``, which is never called. The compute layout of a
parameter holds during the forward of its *reader*: the module whose call contains all reads under one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.graph.op_graph import Op, OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReaders:
    """The reads of parameters in a graph.

    Attributes:
        names: (op, value of a parameter) -> the FQN by which the op reads it.
        levels: FQN -> how many levels above the parameter's module its reader is; FQNs at level 0 are left out.
        calls: (op, value) -> the call of the reader.
        tied: FQN by which a parameter is read -> its other FQNs inside of the reader by which nothing else reads it: a
            graph does not tell by which of them the reader does.
    """

    names: Mapping[tuple[str, str], str]
    levels: Mapping[str, int]
    calls: Mapping[tuple[str, str], int]
    tied: Mapping[str, tuple[str, ...]]


def find_parameter_readers(graph: OpGraph) -> ParameterReaders:
    """Return who reads the parameters of ``graph``."""
    reading_calls = {
        (op.name, value): _reading_call(graph, op, position)
        for op in graph.ops
        for position, value in enumerate(op.inputs)
        if value in graph.parameters
    }
    names: dict[tuple[str, str], str] = {}
    readers: dict[str, list[str]] = {}
    for read, call in reading_calls.items():
        fqn = graph.calls[call].fqn
        name = names[read] = _name_read_by(fqn, graph.parameters[read[1]])
        around = readers.setdefault(name, _components(name)[:-1])
        readers[name] = _common(around, _components(fqn))
    tied: dict[str, tuple[str, ...]] = {}
    chosen = set(names.values())
    for (_, value), name in names.items():
        inside = (n for n in graph.parameters[value] if _common(_components(n), readers[name]) == readers[name])
        tied[name] = tuple(n for n in inside if n not in chosen)
    readers.update({alias: readers[name] for name, aliases in tied.items() for alias in aliases})
    calls = {read: _call_of(graph, reading_calls[read], ".".join(readers[names[read]])) for read in names}
    levels = {name: len(_components(name)) - 1 - len(reader) for name, reader in readers.items()}
    return ParameterReaders(
        names=names, levels={n: level for n, level in levels.items() if level}, calls=calls, tied=tied
    )


def _reading_call(graph: OpGraph, op: Op, position: int) -> int:
    """Return the call whose code takes the parameter: that of ``op``, or one around it that passes it on."""
    for crossing in op.crossings[position]:
        if crossing.direction == "input":
            return graph.calls[crossing.call].parent or 0
    return op.call


def _name_read_by(fqn: str, names: Iterable[str]) -> str:
    """Return the name whose module is ``fqn``, or the nearest around it, or else the nearest by its path."""
    reader = _components(fqn)

    def nearness(name: str) -> tuple[int, int]:
        owner = _components(name)[:-1]
        common = len(_common(owner, reader))
        return common, -(len(owner) - common)

    return max(names, key=nearness)


def _call_of(graph: OpGraph, call: int, fqn: str) -> int:
    """Return the call of module ``fqn`` that contains ``call``; the root's where there is none."""
    current: int | None = call
    while current is not None:
        if graph.calls[current].fqn == fqn:
            return current
        current = graph.calls[current].parent
    return 0


def _components(fqn: str) -> list[str]:
    return fqn.split(".") if fqn else []


def _common(a: list[str], b: list[str]) -> list[str]:
    """Return the components with which both paths begin."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
