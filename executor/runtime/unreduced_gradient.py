"""``UnreducedGradient``: what ``parameter.grad`` is between the backward passes of a step, until someone reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.torch_internals.dtensor import TensorSpec, local_of, spec_of, without_torch_function, wrapper_like
from planner.errors import RunError

_PROPERTIES = (
    "dtype",
    "device",
    "layout",
    "shape",
    "requires_grad",
    "grad_fn",
    "is_sparse",
    "is_leaf",
    "ndim",
)
_WITHOUT_VALUES = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES} | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.requires_grad_,
}
"""What a loop may ask of a gradient without its values, as ``zero_grad`` and clipping do."""
_CLEARING = {torch.Tensor.zero_, torch._foreach_zero_}


class UnreducedGradient(DTensor):
    """Stands for the gradient of a parameter while the gradient is unreduced: partial sums, or inside ``fully_shard``.

    It has the shape, dtype and layout that the reduced gradient will have. A call that needs values, such as a
    clipping or a norm for a log, reduces all gradients of the model first, so all ranks have to make it. ``zero_``
    drops what has accumulated.
    """

    _parameter: nn.Parameter
    _reduce_all: Callable[[], None]
    _forget: Callable[[nn.Parameter], None]
    _value: DTensor | None
    accumulated_dtype: torch.dtype
    """Dtype in which the gradient accumulates."""

    @staticmethod
    def of(
        parameter: nn.Parameter,
        accumulated_dtype: torch.dtype,
        reduce_all: Callable[[], None],
        forget: Callable[[nn.Parameter], None],
    ) -> UnreducedGradient:
        """Return the stand-in for the gradient of ``parameter``.

        Args:
            parameter: a DTensor parameter.
            accumulated_dtype: dtype in which the gradient accumulates.
            reduce_all: reduces the gradients of all parameters, and calls ``set_value`` of their stand-ins.
            forget: drops what has accumulated for a parameter.
        """
        with without_torch_function():
            result = wrapper_like(UnreducedGradient, cast(DTensor, parameter))
        result._parameter, result._reduce_all, result._forget = parameter, reduce_all, forget
        result._value, result.accumulated_dtype = None, accumulated_dtype
        return result

    def set_value(self, gradient: torch.Tensor | None) -> None:
        """Set the reduced gradient, which is now that of the parameter."""
        self._value = cast("DTensor | None", gradient)

    def reduced(self) -> DTensor:
        """Return the reduced gradient.

        Raises:
            RunError: the gradient was cleared before it was reduced.
        """
        if self._value is None and self._parameter.grad is self:
            self._reduce_all()
        if self._value is None:
            raise RunError(
                "This gradient was cleared before it was reduced, and its values are lost.",
                what_to_do="Read a gradient before zero_grad(), or give set_accumulation_steps the number of backward "
                "passes that the step has.",
            )
        return self._value

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        return local_of(self.reduced())

    @property
    def _spec(self) -> TensorSpec:  # type: ignore[override]
        return spec_of(cast(DTensor, self._parameter)) if self._value is None else spec_of(self._value)

    def __tensor_flatten__(self) -> Any:
        """Return no tensors while the gradient is unreduced: who counts memory must not make it reduce."""
        return ([], None) if self._value is None else super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """Return the whole reduced gradient, as `DTensor.full_tensor` does."""
        return self.reduced().full_tensor(**kwargs)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """Return the local tensor of the reduced gradient, as `DTensor.to_local` does."""
        return self.reduced().to_local(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return the reduced gradient redistributed, as `DTensor.redistribute` does."""
        return self.reduced().redistribute(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in _WITHOUT_VALUES:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _CLEARING:
            for gradient in pytree.tree_leaves(args[0]):
                gradient._zero() if isinstance(gradient, UnreducedGradient) else gradient.zero_()
            return None if func is torch._foreach_zero_ else args[0]
        args, kwargs = pytree.tree_map_only(UnreducedGradient, UnreducedGradient.reduced, (args, kwargs))
        return func(*args, **kwargs)

    def _zero(self) -> None:
        if self._value is None and self._parameter.grad is self:
            self._forget(self._parameter)
            self._value = cast(DTensor, torch.zeros_like(self._parameter, requires_grad=False))
            self._parameter.grad = self._value
        else:
            self.reduced().zero_()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.reduced())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{func} got the stand-in of an unreduced gradient")
