"""FLOPs of ops as they run, on meta or for real, by torch's own formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCount(TorchDispatchMode):
    """Adds up what runs.

    Attributes:
        flops: so far; a multiply-add is two.
        products: storage of an op's result that has FLOPs -> its bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.products: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket not in flop_registry:
            # As FlopCounterMode: count what a composite op is made of.
            decomposed = (
                func.decompose(*args, **kwargs) if func is not torch.ops.prim.device.default else NotImplemented
            )
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            if isinstance(out, torch.Tensor):
                storage = out.untyped_storage()
                self.products[storage._cdata] = storage.nbytes()
                self._kept.append(out)
        return out
