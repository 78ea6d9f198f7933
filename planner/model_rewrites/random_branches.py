"""Random numbers that decide what runs, as LayerDrop skips layers and SpecAugment masks parts of the input.

A plan is made of the likelier branch: one random number is its mean, 0.5 of those that are uniform in [0, 1). A layer
that is dropped in one of ten steps is planned to run, as it does in nine. In a run the numbers are drawn
(`executor.runtime.random_state`), alike on all ranks.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_SEED = 0


@contextmanager
def python_numbers(seed: int) -> Iterator[None]:
    """Within this context, Python's and NumPy's default random numbers start at ``seed``; after it they go on."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def likelier_branches() -> Iterator[None]:
    """Within this context a single random number is its mean, and those of Python and NumPy are the same each time."""
    numpy: Any = sys.modules.get("numpy")
    rand = torch.rand

    def mean_or_drawn(*size: Any, **options: Any) -> torch.Tensor:
        shape = options.get("size", size[0] if size and not isinstance(size[0], int) else size)
        # Tensors of other devices have no values here; a scalar on the CPU goes with them.
        is_elsewhere = torch.device(options.get("device") or "cpu").type != "cpu"
        if any(length != 1 for length in shape) or "generator" in options or (shape and is_elsewhere):
            return rand(*size, **options)
        mean: Any = 0.5
        for _ in shape:
            mean = [mean]
        return torch.tensor(mean, dtype=options.get("dtype"))

    with ExitStack() as stack:
        stack.enter_context(python_numbers(_SEED))
        stack.enter_context(mock.patch.object(torch, "rand", mean_or_drawn))
        stack.enter_context(mock.patch.object(random, "random", return_value=0.5))
        stack.enter_context(mock.patch.object(random, "uniform", lambda low, high: (low + high) / 2))
        for name in ("random", "rand") if numpy else ():
            stack.enter_context(mock.patch.object(numpy.random, name, _mean_of_one(getattr(numpy.random, name))))
        yield


def _mean_of_one(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``draw``, a function of NumPy, with the mean where it draws one number that is no array."""
    return lambda *args, **kwargs: draw(*args, **kwargs) if args or kwargs else 0.5
