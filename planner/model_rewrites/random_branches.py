"""Random numbers that decide what runs, as LayerDrop skips layers and SpecAugment masks parts of the input.

A plan is made of the likelier branch: one random number is its mean, 0.5 of those that are uniform in [0, 1). A layer
that is dropped in one of ten steps is planned to run, as it does in nine. In a run the numbers are drawn
(`executor.runtime.random_state`), alike on all ranks.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_SEED = 0

_MOST_MEANS = 1024
"""Numbers that are their mean; those after them are drawn, so that a loop until one is large or small ends."""


@contextmanager
def python_numbers(seed: int) -> Iterator[Callable[[], bool]]:
    """Within this context, Python's and NumPy's default random numbers start at ``seed``; after it they go on.

    It gives a function that says whether any has been drawn.
    """
    numpy: Any = sys.modules.get("numpy")
    before, numpy_before = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        started = _states(numpy)
        yield lambda: _states(numpy) != started
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(numpy_before)


def _states(numpy: Any) -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's default generators, to compare."""
    if not numpy:
        return (random.getstate(),)
    _, keys, position, *gauss = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position, *gauss


@contextmanager
def likelier_branches() -> Iterator[None]:
    """Within this context a single random number is its mean, and those of Python and NumPy are the same each time."""
    numpy: Any = sys.modules.get("numpy")
    rand, uniform, draws = torch.rand, random.uniform, itertools.count()

    def is_mean() -> bool:
        return next(draws) < _MOST_MEANS

    def mean_of_one(draw: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: draw(*args, **kwargs) if args or kwargs or not is_mean() else 0.5

    def mean_of_range(low: float, high: float) -> float:
        return (low + high) / 2 if is_mean() else uniform(low, high)

    def mean_of_tensor(*size: Any, **options: Any) -> torch.Tensor:
        shape = options.get("size", size[0] if size and isinstance(size[0], Sequence) else size)
        # Tensors of other devices have no values here; a scalar on the CPU goes with them.
        is_elsewhere = torch.device(options.get("device") or "cpu").type != "cpu"
        is_one = all(type(length) is int and length == 1 for length in shape) and not (shape and is_elsewhere)
        if not is_one or "generator" in options or not is_mean():
            return rand(*size, **options)
        mean: Any = 0.5
        for _ in shape:
            mean = [mean]
        return torch.tensor(mean, dtype=options.get("dtype"))

    with ExitStack() as stack:
        stack.enter_context(python_numbers(_SEED))
        stack.enter_context(mock.patch.object(torch, "rand", mean_of_tensor))
        stack.enter_context(mock.patch.object(random, "uniform", mean_of_range))
        one = [(random, "random"), *((numpy.random, name) for name in ("random", "rand") if numpy)]
        for module, name in one:
            stack.enter_context(mock.patch.object(module, name, mean_of_one(getattr(module, name))))
        yield
