"""Reading of a document's module calls, and of the module boundaries that values cross between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from planner.errors import GraphFormatError
from planner.graph.op_graph import Call, Crossing
from planner.wire.document import GraphDocument

MAX_CALL_DEPTH: Final = 50
MAX_PASSED: Final = 200_000
"""Most crossings of module boundaries by all values together; Llama-3.1 405B has five thousand."""
OUTSIDE: Final = -1
"""In place of a call: the caller of the root module, which passes the inputs and gets the outputs."""


def read_calls(document: GraphDocument) -> tuple[Call, ...]:
    """Return the module calls: first the root module's, then calls that are each within an earlier one.

    Raises:
        GraphFormatError: the calls are not in this order, or nested too deeply.
    """
    modules, depths, calls = document.model.modules, list[int](), list[Call]()
    for index, (module, parent) in enumerate(document.calls):
        where = f"calls[{index}]"
        if module >= len(modules):
            raise GraphFormatError.at(where, f"there is no module {module}")
        if (parent is None) != (index == 0) or (parent is not None and parent >= index):
            raise GraphFormatError.at(where, "the first call is the root's, and each other one is within another")
        depths.append(0 if parent is None else depths[parent] + 1)
        if depths[-1] > MAX_CALL_DEPTH:
            raise GraphFormatError.at(where, f"calls are nested deeper than {MAX_CALL_DEPTH}")
        calls.append(Call(index=index, fqn=modules[module], parent=parent))
    if calls[0].fqn != "":
        raise GraphFormatError.at("calls[0]", 'the root module is ""')
    return tuple(calls)


class Routes:
    """Follows values over the module boundaries of one graph."""

    def __init__(self, document: GraphDocument, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._left = MAX_PASSED
        self._crossings = [Crossing(call=c.call, direction=c.direction, path=c.path) for c in document.crossings]
        for index, crossing in enumerate(self._crossings):
            if crossing.call >= len(calls):
                raise GraphFormatError.at(f"crossings[{index}].call", "there is no such call")

    def follow(self, row: Sequence[int], start: int, end: int, where: str) -> tuple[Crossing, ...]:
        """Return the crossings that ``row`` lists, after checking that they lead from one call to the other.

        Args:
            row: positions among the document's crossings, in the order in which the value crosses the boundaries.
            start: the call in which the value is computed.
            end: the call in which the value is used; `OUTSIDE` for an output of the model.
            where: place in the document, for messages.

        Raises:
            GraphFormatError: the crossings do not lead there, or there are too many of them.
        """
        self._left -= len(row)
        if self._left < 0:
            raise GraphFormatError.at(where, f"values pass more than {MAX_PASSED} boundaries")
        passed, at = [], start
        for index in row:
            if index >= len(self._crossings):
                raise GraphFormatError.at(where, f"there is no crossing {index}")
            passed.append(self._crossings[index])
            at = self._beyond(passed[-1], at, where)
        if passed and end != OUTSIDE and not self._is_within(end, at):
            raise GraphFormatError.at(where, f"it does not lead to call {end}")
        return tuple(passed)

    def _beyond(self, crossing: Crossing, at: int, where: str) -> int:
        """Return the call that a value is in after ``crossing``, if it was in call ``at`` before."""
        enters = crossing.direction == "input"
        # Boundaries of modules without tensors among their arguments or results are not recorded: they may be skipped.
        inside, around = (crossing.call, at) if enters else (at, crossing.call)
        if not self._is_within(inside, around):
            raise GraphFormatError.at(where, f"{crossing.direction} of call {crossing.call} is not on the way")
        parent = self._calls[crossing.call].parent
        return crossing.call if enters else OUTSIDE if parent is None else parent

    def _is_within(self, call: int, around: int) -> bool:
        """Return whether ``call`` is ``around`` or within it."""
        while call > around:
            parent = self._calls[call].parent
            call = OUTSIDE if parent is None else parent
        return call == around
