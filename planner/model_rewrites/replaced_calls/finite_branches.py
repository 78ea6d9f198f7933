"""Branches on whether numbers are finite: ``if not torch.isfinite(x).all(): x = x.clamp(-limit, limit)``.

A trace takes all numbers to be finite, as a plan is of a run that works. In a planned run, each rank looks at its own
part (of partial sums, at its addends) and branches by itself, so that no rank waits for another. The numbers are those
of the unsharded model where the branch acts on each element by itself, and changes none that is finite.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch

from planner.model_rewrites.replaced_calls.value_checks import value_at

_OF_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
"""Names of functions -> what they return for finite numbers."""

LOOKS: dict[Callable[..., Any], bool] = {
    getattr(owner, name): value
    for owner in (torch, torch.Tensor)
    for name, value in _OF_FINITE.items()
    if hasattr(owner, name)
}
"""Functions that look whether numbers are finite -> what they return for finite ones."""


class OfFinite:
    """What `LOOKS` return for a tensor of finite numbers, as far as a branch reads it."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def all(self) -> OfFinite:
        """Return the same, as all elements are alike."""
        return self

    any = item = all

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]  # torch.any or torch.all, by `branches_on_it`

    def __bool__(self) -> bool:
        return self._value


def branches_on_it(frame: FrameType) -> bool:
    """Return whether ``frame``, which is at a call, branches on ``all`` or ``any`` of the result and does nothing else.

    A branch that raises an error is a check (`value_checks`), and none of these.
    """
    jump = _jump_on_it(frame.f_code, frame.f_lasti)
    return jump is not None and value_at(frame.f_code, jump) is None


@functools.lru_cache(maxsize=1024)
def _jump_on_it(code: CodeType, position: int) -> int | None:
    """Return the position of the jump that reads the result of the call at ``position``; None: something else does."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _NOTHING]
    # Within a call of a Python function, the position is that of the last cache behind the instruction.
    at = max(i for i, each in enumerate(instructions) if each.offset <= position)
    outer = _is_argument(instructions, at)
    rest = iter(instructions[at + 1 :])
    for instruction in rest:
        name = instruction.opname
        if "JUMP" in name and ("IF_TRUE" in name or "IF_FALSE" in name):
            return int(instruction.offset)
        if name in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in _OF_ALL:
            if next(rest).opname != "CALL":
                return None
        elif name == "CALL" and outer:
            outer = False
        elif name not in ("UNARY_NOT", "TO_BOOL"):
            return None
    return None


_NOTHING = frozenset({"PRECALL", "CACHE", "PUSH_NULL", "NOP"})
_OF_ALL = ("all", "any", "item")


def _is_argument(instructions: list[dis.Instruction], call: int) -> bool:
    """Return whether the call is the argument of ``torch.any`` or ``torch.all``."""
    looks = (i for i in range(call, 1, -1) if instructions[i].argval in _OF_FINITE)
    at = next(looks, None)
    return at is not None and instructions[at - 2].argval in ("all", "any")


@contextmanager
def numbers_are_finite() -> Iterator[None]:
    """Within this context, which a trace runs in, branches on whether numbers are finite take them to be."""
    with ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            for name in _OF_FINITE:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, _assuming(getattr(owner, name))))
        yield


def _assuming(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def assumed(*args: Any, **kwargs: Any) -> Any:
        return OfFinite(LOOKS[function]) if branches_on_it(sys._getframe(1)) else function(*args, **kwargs)

    return assumed
