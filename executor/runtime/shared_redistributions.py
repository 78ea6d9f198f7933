"""One redistribution for all modules that want the same tensor in the same layout, and one for its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor, conjugate
from executor.runtime.saved_tensor_recompute import Remade

_Wanted = tuple[Layout, Layout, bool]
"""(layout, layout of the gradient, whether it is redistributed again for the backward)."""


class SharedRedistributions:
    """Redistributes, and remembers the results while the tensor that they were made from lives and the scope lasts.

    q, k and v projections are called one after the other with the same tensor object: the first gathers it, the others
    get the same result, and autograd adds their gradients before they go back together. A result is dropped with its
    source: the local variable that held it is gone, so no further module can ask for it.
    """

    def __init__(self, redistributor: Redistributor) -> None:
        self.redistributor = redistributor
        self._scopes: list[MutableMapping[torch.Tensor, dict[_Wanted, DTensor]]] = []
        self._originals: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        self._remade: MutableMapping[torch.Tensor, Remade] = WeakTensorKeyDictionary()

    def same(self, alias: torch.Tensor, original: torch.Tensor) -> None:
        """Share what is made from ``alias`` with what is made from ``original``, which autograd tells apart."""
        self._originals[alias] = self._originals.get(original, original)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Share among the calls within it: those of one forward, or of one block's recomputation."""
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
        regather: bool = False,
    ) -> DTensor:
        """Return ``tensor`` in ``layout``; the same object for the same tensor, ``layout`` and ``grad`` in one scope.

        Args:
            tensor: a plain one counts as replicated.
            layout: wanted forward.
            grad: of the gradient that will come back; None is the conjugate of ``layout``.
            source_grad: layout in which the gradient is handed on; None is the conjugate of the tensor's layout.
            regather: whether it is redistributed again for the backward, by those who ask `remade` for it.
        """
        if not self._scopes:
            return self.redistributor.redistribute(tensor, layout, source_grad)
        made = self._scopes[-1].setdefault(self._originals.get(tensor, tensor), {})
        wanted = (layout, conjugate(layout) if grad is None else grad, regather)
        if wanted not in made:
            result = self.redistributor.redistribute(tensor, layout, source_grad)
            if result is tensor:
                # Nothing to remember, and an entry that holds its own key would never go away.
                return result
            made[wanted] = result
            if regather and torch.is_grad_enabled():
                source = self.redistributor.as_dtensor(tensor)
                self._remade[result] = Remade(self.redistributor.again(source, layout))
        return made[wanted]

    def remade(self, tensors: Iterable[torch.Tensor]) -> dict[DTensor, Remade]:
        """Return those of ``tensors`` that are redistributed again for the backward, and what does that."""
        return {t: self._remade[t] for t in tensors if isinstance(t, DTensor) and t in self._remade}
