"""The module calls of a graph's document, and the boundaries that values pass on their way between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from planner.errors import GraphFormatError
from planner.graph.op_graph import Call, Crossing
from planner.wire.document import GraphDocument

MAX_CALL_DEPTH: Final = 50
MAX_PASSED: Final = 200_000
"""Boundaries passed by all values together; in Llama-3.1 405B it is five thousand."""
OUTSIDE: Final = -1
"""Where the model's inputs come from and its outputs go to."""


def read_calls(document: GraphDocument) -> tuple[Call, ...]:
    """Return the calls, each within an earlier one, the first of them the root's.

    Raises:
        GraphFormatError: they are no tree.
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
    """Follows values over the boundaries of one graph."""

    def __init__(self, document: GraphDocument, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._left = MAX_PASSED
        self._crossings = [Crossing(call=c.call, direction=c.direction, path=c.path) for c in document.crossings]
        for index, crossing in enumerate(self._crossings):
            if crossing.call >= len(calls):
                raise GraphFormatError.at(f"crossings[{index}].call", "there is no such call")

    def follow(self, row: Sequence[int], start: int, end: int, where: str) -> tuple[Crossing, ...]:
        """Return the boundaries that ``row`` counts up, which are to lead from one module to the next.

        Args:
            row: positions among the document's crossings.
            start: the call in which the value is made.
            end: the call in which it is used.

        Raises:
            GraphFormatError: they lead nowhere, or are too many.
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
        """Return the call that a value in call ``at`` is in once it has passed a boundary."""
        enters = crossing.direction == "input"
        # A module whose arguments or results hold no tensors leaves no mark, so a boundary may be passed unseen.
        inside, around = (crossing.call, at) if enters else (at, crossing.call)
        if not self._is_within(inside, around):
            raise GraphFormatError.at(where, f"{crossing.direction} of call {crossing.call} is not on the way")
        parent = self._calls[crossing.call].parent
        return crossing.call if enters else OUTSIDE if parent is None else parent

    def _is_within(self, call: int, around: int) -> bool:
        """Tell whether ``call`` is ``around``, or within it."""
        while call > around:
            parent = self._calls[call].parent
            call = OUTSIDE if parent is None else parent
        return call == around
