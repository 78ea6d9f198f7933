"""ModuleBodies: the bodies of module calls, which tensors are seen in each, and where they come from."""

from __future__ import annotations

from planner.graph.op_graph import Crossing, OpGraph

SlotKey = tuple[str, int]
"""(value, index of the module call that sees it); call -1 is outside the root module."""

OUTSIDE = -1


class ModuleBodies:
    """Which slots exist, and where each entry comes from."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
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
        self._stop_where_others_enter()
        for key, crossings in self._paths.items():
            self.entries[key] = (self._source(key, crossings), crossings[-1])

    def _stop_where_others_enter(self) -> None:
        """Let a tensor that only passes a boundary be seen there too, where another call of the module is an entry.

        A plan has one key for both calls, so that the one is redistributed where the other is.
        """
        keys = {self._key(crossings[-1]) for crossings in self._paths.values()}
        for (value, _), crossings in list(self._paths.items()):
            if self._graph.values[value].kind == "plain":
                continue
            for position, crossing in enumerate(crossings[:-1]):
                if self._key(crossing) in keys:
                    self._paths.setdefault((value, self._frame(crossing)), crossings[: position + 1])

    def _key(self, crossing: Crossing) -> tuple[str, str, str]:
        return self._graph.calls[crossing.call].fqn, crossing.direction, crossing.path

    def _frame(self, crossing: Crossing) -> int:
        """Return the call whose body a tensor is in once it has crossed."""
        return crossing.call if crossing.direction == "input" else self._parent(crossing.call)

    def _source(self, key: SlotKey, crossings: tuple[Crossing, ...]) -> SlotKey | None:
        """Return the last slot of the same value on the way to ``key``."""
        value, _ = key
        for crossing in reversed(crossings[:-1]):
            frame = self._frame(crossing)
            if (value, frame) in self._paths and frame != key[1]:
                return value, frame
        home = self.home.get(value, OUTSIDE)
        if home == OUTSIDE:
            return None
        return value, home

    def _parent(self, call: int) -> int:
        parent = self._graph.calls[call].parent
        return OUTSIDE if parent is None else parent
