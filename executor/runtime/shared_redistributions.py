"""Redistributions that are shared by all modules that need the same tensor in the same layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, conjugate
from executor.runtime.saved_tensor_recompute import RecomputedCopy

_Target = tuple[Layout, Layout, bool]
"""(layout, layout of the gradient, ``reallgather``) of a result; see ``SharedRedistributions.redistribute``."""


class SharedRedistributions:
    """Redistributes tensors, and remembers the results as long as their sources live and the scope lasts.

    The q, k and v projections are called one after another with the same tensor object. The first call redistributes
    the tensor, the other calls get the same result, and autograd adds their gradients before it redistributes the sum
    back. A result is dropped with its source tensor, without which no further module can ask for it.
    """

    def __init__(self, redistributor: Redistributor) -> None:
        self.redistributor = redistributor
        self._scopes: list[MutableMapping[torch.Tensor, dict[_Target, DTensor]]] = []
        self._originals: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        self._recomputed: MutableMapping[torch.Tensor, RecomputedCopy] = WeakTensorKeyDictionary()

    def add_alias(self, alias: torch.Tensor, original: torch.Tensor) -> None:
        """Let ``alias`` share the redistributions of ``original``: the same values under another autograd node."""
        self._originals[alias] = self._originals.get(original, original)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return a context in which calls share results: a forward, a checkpointed block, or its recomputation."""
        self._scopes.append(WeakTensorKeyDictionary())
        try:
            yield
        finally:
            self._scopes.pop()

    def redistribute(
        self,
        tensor: torch.Tensor,
        layout: Layout,
        grad: Layout | None = None,
        source_grad: Layout | None = None,
        *,
        reallgather: bool = False,
    ) -> DTensor:
        """Return ``tensor`` in ``layout``; the same object for the same tensor, ``layout`` and ``grad`` in one scope.

        Args:
            tensor: a DTensor, or a plain tensor, which counts as replicated.
            layout: layout of the result.
            grad: layout in which the gradient of the result will come; None: ``conjugate(layout)``.
            source_grad: layout of the gradient of ``tensor``; None: the ``conjugate`` of the layout of ``tensor``.
            reallgather: whether the backward redistributes ``tensor`` again, so that the result need not be saved. The
                caller has to pass the result to ``recomputed``.
        """
        if not self._scopes:
            return self.redistributor.redistribute(tensor, layout, source_grad)
        results = self._scopes[-1].setdefault(self._originals.get(tensor, tensor), {})
        target = (layout, conjugate(layout) if grad is None else grad, reallgather)
        if target not in results:
            result = self.redistributor.redistribute(tensor, layout, source_grad)
            if result is tensor:
                # An entry that holds its own weak key alive would never be dropped.
                return result
            results[target] = result
            if reallgather and torch.is_grad_enabled():
                source = self.redistributor.as_dtensor(tensor)
                self._recomputed[result] = RecomputedCopy(self.redistributor.deferred(source, layout))
        return results[target]

    def recomputed(self, tensors: Iterable[torch.Tensor]) -> dict[DTensor, RecomputedCopy]:
        """Return {tensor: its recomputation} for those of ``tensors`` that the backward redistributes again."""
        return {t: self._recomputed[t] for t in tensors if isinstance(t, DTensor) and t in self._recomputed}
