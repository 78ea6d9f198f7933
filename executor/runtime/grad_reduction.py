"""Gradients of parameters: summed over uses and micro-batches as they come, and reduced once a step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor
from executor.runtime.run_context import PhaseClock
from executor.torch_internals import at_end_of_backward, current_backward_pass, local_of, make_dtensor

_UNDER_WAY = 2
"""Reductions that run beside the backward at a time: each holds a gradient that is not reduced yet."""


class GradientReduction:
    """Takes ``param.grad`` to the parameter's stored layout in every ``micro_batches``-th backward pass.

    Until then a gradient stays in the layout that autograd gives it, usually partial over the axes that the batch is
    split on, and adds up in the dtype that it is reduced in; where it comes in the stored layout, in the parameter's.
    Nothing is divided: the loss is the mean over the global (micro-)batch already, so that with several micro-batches
    the caller scales each loss by ``1 / micro_batches``, as in any loop that accumulates gradients. A pass is one call
    of ``backward``. Clearing the gradients (``zero_grad(set_to_none=True)``) before all passes of a step have run
    starts the step again. Reductions run beside the rest of the backward; when it ends all have arrived.
    """

    def __init__(
        self, redistributor: Redistributor, *, micro_batches: int, dtype: torch.dtype, clock: PhaseClock
    ) -> None:
        """Reduce over ``redistributor``'s mesh, in ``dtype`` on the wire and while gradients add up."""
        self._redistributor = redistributor
        self._micro_batches = micro_batches
        self._dtype = dtype
        self._clock = clock
        self._passes = 0
        self._pass_id: int | None = None
        self._unreduced: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        self._unfinished: dict[nn.Parameter, Layout] = {}
        self._under_way: deque[tuple[nn.Parameter, Callable[[], DTensor]]] = deque()

    def attach(
        self, parameters: Iterable[nn.Parameter], unfinished: Mapping[nn.Parameter, Layout] | None = None
    ) -> None:
        """Hook every parameter that needs a gradient; ``parameters`` has each once, however many names it has.

        Args:
            unfinished: parameters whose gradients come from ``fully_shard``, which calls them split as the parameter
                is, and the layouts that they are really in.
        """
        parameters = tuple(parameters)
        self._unfinished.update(unfinished or {})
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != self._dtype:
                parameter.grad_dtype = None  # ``grad`` takes any, as the sum does until it is reduced
        for parameter in (*parameters, *self._unfinished):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def begin(self) -> bool:
        """Return whether the backward pass that is running is the last of the step; to be asked as it begins."""
        if self._pass_id != current_backward_pass():
            self._begin_pass()
        return self._passes + 1 == self._micro_batches

    @property
    def is_amid(self) -> bool:
        """Whether some passes of a step have run, and not all."""
        return self._passes > 0

    def starts_again(self) -> bool:
        """Tell whether gradients that had not been reduced yet have been cleared since."""
        return any(
            parameter.grad is None or gradient() is not parameter.grad
            for parameter, gradient in self._unreduced.items()
        )

    def restart(self) -> None:
        """Take the next pass for the first of a step."""
        self._unreduced.clear()
        self._passes = 0

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if self._pass_id != current_backward_pass():
            self._begin_pass(parameter)
        if parameter.grad_dtype is None:
            gradient = self._redistributor.as_dtensor(parameter.grad)
            arrived = tuple(gradient.placements) == tuple(cast(DTensor, parameter).placements)
            parameter.grad = _in_dtype(gradient, parameter.dtype if arrived else self._dtype)
        if self._passes + 1 == self._micro_batches:
            # At once, not at the end of the pass, so that gradients need not all be held unreduced.
            self._unreduced.pop(parameter, None)
            self._reduce(parameter)
        else:
            self._unreduced[parameter] = weakref.ref(parameter.grad)

    def _begin_pass(self, parameter: nn.Parameter | None = None) -> None:
        last = None if parameter is None else self._unreduced.get(parameter)
        if parameter is not None and last is not None and last() is not parameter.grad:
            self.restart()
        self._pass_id = current_backward_pass()
        self._under_way.clear()  # of a pass that an exception ended
        at_end_of_backward(self._end_pass)

    def _end_pass(self) -> None:
        self._passes += 1
        if self._passes < self._micro_batches:
            return
        # Parameters that the last micro-batch did not use.
        for parameter, gradient in self._unreduced.items():
            if gradient() is parameter.grad:
                self._reduce(parameter)
        self._unreduced.clear()
        self._passes = 0
        self._finish(0)

    def _finish(self, left: int) -> None:
        """Wait for all but the last ``left`` reductions."""
        while len(self._under_way) > left:
            parameter, finish = self._under_way.popleft()
            assert isinstance(parameter, DTensor)
            parameter.grad = _in_dtype(finish(), parameter.dtype)

    def _reduce(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor)
        assert parameter.grad is not None
        gradient = self._redistributor.as_dtensor(parameter.grad)
        layout = tuple(parameter.placements)
        arrived = self._unfinished.get(parameter)
        if arrived is not None:
            mesh, shape, stride = gradient.device_mesh, gradient.shape, gradient.stride()
            gradient = make_dtensor(local_of(gradient), mesh, arrived, shape, stride)
        if tuple(gradient.placements) == layout:
            parameter.grad = gradient
            return
        with self._clock.of("grad_reduce"):
            finish = self._redistributor.start(_in_dtype(gradient, self._dtype), layout)
        if arrived is not None:
            # torch runs this beside the backward already, and may do so after the pass has ended for us.
            parameter.grad = _in_dtype(finish(), parameter.dtype)
            return
        # The gradient as it came is let go of; it lives until its reduction has run, as do few others.
        parameter.grad = None
        self._under_way.append((parameter, finish))
        self._finish(_UNDER_WAY)


def _in_dtype(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    if tensor.dtype == dtype:
        return tensor
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
