"""FLOPs of ops as they run, on meta or real tensors, by torch's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    """Return the FLOPs of grouped matrix multiplications, of all groups together."""
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * a.numel() * b.shape[-1]


FORMULAS = {**flop_registry, torch.ops.aten._grouped_mm: _grouped_flops}
"""Op -> the function of its arguments and its result that returns its FLOPs."""


class FlopCount(TorchDispatchMode):
    """Adds up the FLOPs of all ops that run inside it.

    Attributes:
        flops: FLOPs so far; a multiply-add is two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self._result_nbytes: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def inner_nbytes(self, results: Sequence[torch.Tensor]) -> int:
        """Return the bytes of GEMM results without those in ``results``, the outputs of the op."""
        outer = (self._result_nbytes.get(tensor.untyped_storage()._cdata, 0) for tensor in results)
        return sum(self._result_nbytes.values()) - sum(outer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket not in FORMULAS:
            # Composite ops count as what they decompose into, as in torch's FlopCounterMode.
            decomposed = (
                func.decompose(*args, **kwargs) if func is not torch.ops.prim.device.default else NotImplemented
            )
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        if func._overloadpacket in FORMULAS:
            self.flops += FORMULAS[func._overloadpacket](*args, **kwargs, out_val=out)
            if isinstance(out, torch.Tensor):
                storage = out.untyped_storage()
                self._result_nbytes[storage._cdata] = storage.nbytes()
                self._alive.append(out)
        return out
