"""`torch.utils.checkpoint` in a forward: the plan says what is recomputed, not the module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.utils.checkpoint

_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"
"""What ``checkpoint(use_reentrant=False)`` runs before and after the function, in torch 2.13."""


class PlannedCheckpoint:
    """The ``context_fn`` of a checkpoint that a plan asks for."""

    def __init__(self, contexts: Callable[[], tuple[Any, Any]]) -> None:
        self._contexts = contexts

    def __call__(self) -> tuple[Any, Any]:
        """Return the contexts of the forward and of each recomputation."""
        return self._contexts()


@contextmanager
def without_own_checkpoints(*, warn: bool = False) -> Iterator[None]:
    """Within this context `torch.utils.checkpoint` checkpoints only what a plan asks for (`PlannedCheckpoint`).

    A plan says which blocks are recomputed, and has the collectives and the memory of these recomputations.

    Args:
        warn: whether another checkpoint is a warning.
    """
    module = torch.utils.checkpoint
    not_reentrant = getattr(module, _NOT_REENTRANT)

    def ignored() -> None:
        if warn:
            warnings.warn(
                "forward calls torch.utils.checkpoint, which does nothing in a planned run: the plan says what is "
                'recomputed. Plan with ac="full" or ac="selective" to choose it.',
                stacklevel=4,
            )

    def generator(
        function: Callable[..., Any], preserve: bool, context_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if isinstance(context_fn, PlannedCheckpoint):
            yield from not_reentrant(function, preserve, context_fn, *args, **kwargs)
        else:
            ignored()
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        ignored()
        return function(*args)

    with (
        mock.patch.object(module, _NOT_REENTRANT, generator),
        mock.patch.object(module.CheckpointFunction, "apply", apply),
    ):
        yield
