"""`Overwritten`: finds tensors that an op writes to a part of, and that are read afterwards under another name.

A graph has one value for each result. After ``out[:, 0] = x``, which writes to a view of ``out``, the graph still reads
``out`` as it was, and so has no way for the gradient of ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planner.graph.op_graph import Value, written_input

_KEEPING_NOTHING = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_"})
"""Writes that do not read what was there before."""


class Overwritten:
    """The values that share memory with one that was written to, in the order of a graph's ops."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}
        """Value -> the value that first had its memory."""
        self._makers: dict[str, str] = {}
        """Value -> FQN of the module that made it."""
        self._writers: dict[str, str] = {}
        """First value of a memory that was written with something that needs a gradient -> FQN of the module."""
        self._current: dict[str, set[str]] = {}
        """First value of such a memory -> the values that were made after the last write."""

    def add_op(
        self, target: Any, inputs: Sequence[Value], outputs: Sequence[Value], module: str, *, grad_enabled: bool
    ) -> str | None:
        """Note an op of a module.

        Args:
            target: the op.
            inputs: the values that it reads and writes, in order.
            outputs: its results.
            module: FQN of the module that calls it.
            grad_enabled: whether its results may need gradients.

        Returns:
            FQN of the module in which a value was made, overwritten in part, and read afterwards, as this op does, or
            in which a plain value was made, into which this op copies what needs a gradient; None for other ops.
        """
        written = written_input(target, len(inputs))
        given = [value for value in inputs if value.kind != "plain" and value.requires_grad and grad_enabled]
        if written is not None and _overwrites(target) and inputs[written].kind == "plain" and given:
            self._writers[self._roots.get(inputs[written].name, inputs[written].name)] = module
            return self.module_of(inputs[written].name)
        is_view = written is None and _is_view(target, inputs, outputs)
        names = [value.name for value in outputs]
        if not is_view:
            read = [value for position, value in enumerate(inputs) if position != written or not _overwrites(target)]
            outdated = next((value for value in read if self.is_outdated(value.name)), None)
            if outdated is not None:
                return self.module_of(outdated.name)
        if written is not None or is_view:
            source = inputs[written or 0].name
            root = self._roots.setdefault(source, source)
            self._roots.update(dict.fromkeys(names, root))
            others = [value for position, value in enumerate(inputs) if position != written]
            if written is not None and grad_enabled and any(value.requires_grad for value in others):
                self._writers[root] = module
                self._current[root] = set(names)
            elif root in self._current and (written is not None or source in self._current[root]):
                self._current[root].update(names)
        self._makers.update((name, module) for name in names if name not in self._makers)
        return None

    def is_outdated(self, value: str) -> bool:
        """Return whether the memory of ``value`` was written to after the graph made ``value``."""
        root = self._roots.get(value, value)
        return root in self._current and value not in self._current[root]

    def module_of(self, value: str) -> str:
        """Return the FQN of the innermost module in which an outdated ``value`` was made and overwritten."""
        root = self._roots.get(value, value)
        maker, writer = (fqn.split(".") for fqn in (self._makers.get(root, ""), self._writers[root]))
        shared = 0
        while shared < min(len(maker), len(writer)) and maker[shared] == writer[shared]:
            shared += 1
        return ".".join(maker[:shared])


def _overwrites(target: Any) -> bool:
    return str(target._overloadpacket.__name__) in _KEEPING_NOTHING


def _is_view(target: Any, inputs: Sequence[Value], outputs: Sequence[Value]) -> bool:
    """Return whether an op returns its first input's memory; some do so unless they change the dtype."""
    if not isinstance(target, torch._ops.OpOverload) or not inputs or inputs[0].dtype != outputs[0].dtype:
        return False
    aliases = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return aliases is not None and not aliases.is_write
