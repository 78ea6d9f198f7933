"""Module bodies: which tensors each module call sees, and through which boundary each of them enters.

A *body* is the code of one module call; code outside of the root module is the body `OUTSIDE`. A tensor is at *home* in
the body whose op computes it. It is an *entry* of another body if it crosses a module boundary on its way to an op, or
to a model output, of that body.
"""

from __future__ import annotations

from planner.graph.op_graph import Crossing, OpGraph

SlotKey = tuple[str, int]
"""(value, index of the module call in whose body it is seen); the index may be `OUTSIDE`."""

OUTSIDE = -1


class ModuleBodies:
    """The tensors that enter each module body.

    Attributes:
        home: value -> index of the call whose body computes it; `OUTSIDE` for model inputs.
        entries: entry -> the slot that it comes from (None: a model input), and the boundary that it crosses last.
        results: values that the model's caller uses.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self.results = {output.value for output in graph.outputs if output.is_result}
        self.home: dict[str, int] = {}
        for model_input in graph.inputs:
            self.home[model_input.value] = OUTSIDE
        for op in graph.ops:
            self.home.update(dict.fromkeys(op.outputs, op.call))
        self.entries: dict[SlotKey, tuple[SlotKey | None, Crossing]] = {}
        self._paths: dict[SlotKey, tuple[Crossing, ...]] = {}
        for op in graph.ops:
            for value, crossings in zip(op.inputs, op.crossings, strict=True):
                if crossings and graph.values[value].kind != "parameter":
                    self._paths[value, op.call] = crossings
        for output in graph.outputs:
            if output.is_loss or output.is_sent or output.is_result:
                self._paths[output.value, OUTSIDE] = output.crossings
        for model_input in graph.inputs:
            crossing = Crossing(call=0, direction="input", path=model_input.path)
            self._paths[model_input.value, 0] = (crossing,)
        self._add_entries_of_repeated_calls()
        for key, crossings in self._paths.items():
            self.entries[key] = (self._source(key, crossings), crossings[-1])

    def _add_entries_of_repeated_calls(self) -> None:
        """Add entries for tensors that only pass through a boundary, if another call of the module has an entry there.

        A plan has one key for all calls of a module, so a redistribution at the boundary happens in each call.
        """
        keys = {self._plan_key(crossings[-1]) for crossings in self._paths.values()}
        for (value, _), crossings in list(self._paths.items()):
            if self._graph.values[value].kind == "plain":
                continue
            for position, crossing in enumerate(crossings[:-1]):
                if self._plan_key(crossing) in keys:
                    self._paths.setdefault((value, self._body_behind(crossing)), crossings[: position + 1])

    def _plan_key(self, crossing: Crossing) -> tuple[str, str, str]:
        """Return (module FQN, direction, path), by which a plan names a boundary."""
        return self._graph.calls[crossing.call].fqn, crossing.direction, crossing.path

    def _body_behind(self, crossing: Crossing) -> int:
        """Return the call whose body a tensor is in after ``crossing``."""
        return crossing.call if crossing.direction == "input" else self._parent(crossing.call)

    def _source(self, key: SlotKey, crossings: tuple[Crossing, ...]) -> SlotKey | None:
        """Return the last slot of the same value on the way to the entry ``key``."""
        value, _ = key
        for crossing in reversed(crossings[:-1]):
            body = self._body_behind(crossing)
            if (value, body) in self._paths and body != key[1]:
                return value, body
        home = self.home.get(value, OUTSIDE)
        return None if home == OUTSIDE else (value, home)

    def _parent(self, call: int) -> int:
        parent = self._graph.calls[call].parent
        return OUTSIDE if parent is None else parent
