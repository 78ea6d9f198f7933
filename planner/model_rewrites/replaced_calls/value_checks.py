"""Checks of values: they do nothing in a trace, which has no values, and in a planned run.

Such a check looks at a tensor only to warn or to raise an error: ``if labels.max() >= classes: raise ...``, ``assert
mask.any()``. In a sharded run, each look would be a collective that no plan has, and a wait for the GPU.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from unittest import mock

import torch
from torch.distributions import Distribution

_WARNING = "warn_if_padding_and_no_attention_mask"


_OF_TRANSFORMERS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""With this variable, transformers makes no checks (`torch_compilable_check`)."""


def _restored(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Within this context transformers does not look for padding, and nothing checks the values of its arguments."""
    with ExitStack() as stack:
        stack.callback(_restored, _OF_TRANSFORMERS, os.environ.get(_OF_TRANSFORMERS))
        os.environ[_OF_TRANSFORMERS] = "1"
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        for check in ("_check_tensor_all", "_check_tensor_all_with"):
            stack.enter_context(mock.patch.object(torch, check))
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            stack.enter_context(mock.patch.object(modeling.PreTrainedModel, _WARNING))
        yield


def value_that_passes(frame: FrameType) -> bool | None:
    """Return the truth value with which the check passes that ``frame`` is at; None if it is at no check.

    It is at one if it is about to branch, and one branch does nothing but raise an error.
    """
    return value_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def value_at(code: CodeType, position: int) -> bool | None:
    """Return `value_that_passes` of a frame that runs ``code`` and is at the instruction at ``position``."""
    instructions = list(dis.get_instructions(code))
    at = next((i for i, each in enumerate(instructions) if each.offset == position), None)
    if at is None or at + 2 >= len(instructions):
        return None
    if instructions[at].opname == "TO_BOOL":  # since Python 3.13, before the jump
        at += 1
    jump = instructions[at]
    if_true, if_false = "IF_TRUE" in jump.opname, "IF_FALSE" in jump.opname
    if not (if_true or if_false):
        return None
    target = next((i for i, each in enumerate(instructions) if each.offset == jump.argval), None)
    if target is None:
        return None
    falls, jumps = _raises(instructions, at + 1), _raises(instructions, target)
    if falls == jumps:
        return None
    # Where it falls through to the error, it passes by jumping.
    return if_true if falls else if_false


def _raises(instructions: list[dis.Instruction], start: int) -> bool:
    """Return whether the instructions from ``start`` on raise an error, whatever they compute."""
    for instruction in instructions[start:]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(_LEAVE):
            return False
    return False


_LEAVE = ("RETURN", "YIELD", "STORE", "DELETE", "FOR_ITER", "SEND", "RERAISE", "POP_EXCEPT", "BEFORE_WITH")
"""How the names of other instructions begin than those that make an error's message."""


@contextmanager
def checks_pass() -> Iterator[None]:
    """Within this context, a branch on a tensor's value that leads to an error on one side takes the other."""
    truth = torch.Tensor.__bool__

    @functools.wraps(truth)
    def passing(tensor: torch.Tensor) -> bool:
        value = value_that_passes(sys._getframe(1))
        return truth(tensor) if value is None else value

    with mock.patch.object(torch.Tensor, "__bool__", passing):
        yield
