"""Gradients of parameters: summed over uses and micro-batches as they come, and reduced once a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.contexts import PhaseClock
from executor.redistribute import Redistributor
from executor.torch_internals import local_of, make_dtensor


class GradientReduction:
    """Takes ``param.grad`` to the parameter's stored layout after every ``micro_batches`` backward passes.

    Until then a gradient stays in the layout that autograd gives it, usually partial over the axes that the batch is
    split on. Nothing is divided: the loss is the mean over the global (micro-)batch already, so that with several
    micro-batches the caller scales each loss by ``1 / micro_batches``, as in any loop that accumulates gradients.
    Clearing gradients before the step is full (``zero_grad(set_to_none=True)``) starts it again.
    """

    def __init__(
        self, redistributor: Redistributor, *, micro_batches: int, dtype: torch.dtype, clock: PhaseClock
    ) -> None:
        """Reduce over ``redistributor``'s mesh, in ``dtype`` on the wire."""
        self._redistributor = redistributor
        self._micro_batches = micro_batches
        self._dtype = dtype
        self._clock = clock
        self._passes: dict[nn.Parameter, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hook every parameter that needs a gradient; ``parameters`` has each once, however many names it has."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient = parameter.grad
        assert gradient is not None
        passes, last = self._passes.get(parameter, (0, None))
        if last is not None and last() is not gradient:
            passes = 0
        if passes + 1 < self._micro_batches:
            self._passes[parameter] = (passes + 1, weakref.ref(gradient))
            return
        self._passes.pop(parameter, None)
        assert isinstance(parameter, DTensor)
        with self._clock.of("grad_reduce"):
            parameter.grad = self._reduced(self._redistributor.as_dtensor(gradient), parameter)

    def _reduced(self, gradient: DTensor, parameter: DTensor) -> DTensor:
        layout = tuple(parameter.placements)
        if tuple(gradient.placements) == layout:
            return gradient
        travelling = _in_dtype(gradient, self._dtype)
        return _in_dtype(self._redistributor.to_layout(travelling, layout), parameter.dtype)


def _in_dtype(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    if tensor.dtype == dtype:
        return tensor
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
