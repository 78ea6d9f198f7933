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
"""(layout, layout of the gradient, whether the backward redistributes again)."""


class SharedRedistributions:
    """Redistributes tensors, and remembers the results as long as their sources live and the scope lasts.

    The q, k and v projections are called one after another with the same tensor object: the first call gathers it, the
    others get the same result, and autograd adds their gradients before the sum is redistributed back. A result is
    dropped with its source: without the source no further module can ask for it.
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
        """Within it calls share results: those of one forward, or of one block's recomputation."""
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
            tensor: a plain one counts as replicated.
            layout: of the result.
            grad: layout in which the gradient of the result will come; None is the conjugate of ``layout``.
            source_grad: layout of the gradient that goes back to ``tensor``; None is the conjugate of its layout.
            reallgather: whether the backward redistributes again, where a caller passes the result to ``recomputed``.
        """
        if not self._scopes:
            return self.redistributor.redistribute(tensor, layout, source_grad)
        results = self._scopes[-1].setdefault(self._originals.get(tensor, tensor), {})
        target = (layout, conjugate(layout) if grad is None else grad, reallgather)
        if target not in results:
            result = self.redistributor.redistribute(tensor, layout, source_grad)
            if result is tensor:
                # An entry that holds its own key would never go away.
                return result
            results[target] = result
            if reallgather and torch.is_grad_enabled():
                source = self.redistributor.as_dtensor(tensor)
                self._recomputed[result] = RecomputedCopy(self.redistributor.deferred(source, layout))
        return results[target]

    def recomputed(self, tensors: Iterable[torch.Tensor]) -> dict[DTensor, RecomputedCopy]:
        """Return those of ``tensors`` that the backward redistributes again, each with its recomputation."""
        return {t: self._recomputed[t] for t in tensors if isinstance(t, DTensor) and t in self._recomputed}
