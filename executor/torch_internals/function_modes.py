"""Internals of torch for modes that see calls of torch's functions. Checked with torch 2.13: the stack of modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily


@contextmanager
def without_mode(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Return a context without the innermost mode, if that is a ``kind``; a mode around it sees the calls."""
    if isinstance(_get_current_function_mode(), kind):
        with _pop_mode_temporarily():
            yield
    else:
        yield
