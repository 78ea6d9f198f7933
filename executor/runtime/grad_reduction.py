"""Gradient reduction: gradients accumulate over uses and micro-batches, and are reduced once a step."""

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
from executor.runtime.run_context import PhaseTracker
from executor.torch_internals import at_end_of_backward, current_backward_pass, local_of, make_dtensor

_CONCURRENT_REDUCTIONS = 2
"""Reductions that are overlapped with the backward at a time: each holds an unreduced gradient."""


class GradientReduction:
    """Takes ``param.grad`` to the parameter's stored layout in the last backward pass of every step.

    A step has ``micro_batches`` backward passes; a pass is one call of ``backward``. Until the last one a gradient
    stays in the layout that autograd gives it, usually partial over the axes that shard the batch, and accumulates in
    the reduction's dtype; one that comes in the stored layout accumulates in the parameter's dtype. Nothing is divided:
    the loss is the mean over the global (micro-)batch already, so with several micro-batches the caller scales each
    loss by ``1 / micro_batches``, as in any loop that accumulates gradients. Clearing the gradients
    (``zero_grad(set_to_none=True)``) before the last pass restarts the step. Reductions are overlapped with the rest of
    the backward; all are complete when it ends.
    """

    def __init__(
        self, redistributor: Redistributor, *, micro_batches: int, dtype: torch.dtype, phases: PhaseTracker
    ) -> None:
        """Take the mesh's redistributor, the passes of a step, the dtype of sums and reductions, and the tracker."""
        self._redistributor = redistributor
        self._micro_batches = micro_batches
        self._dtype = dtype
        self._phases = phases
        self._passes = 0
        self._pass_id: int | None = None
        self._unreduced: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        self._reduce_scattered: dict[nn.Parameter, Layout] = {}
        self._running: deque[tuple[nn.Parameter, Callable[[], DTensor]]] = deque()

    def attach(
        self, parameters: Iterable[nn.Parameter], reduce_scattered: Mapping[nn.Parameter, Layout] | None = None
    ) -> None:
        """Hook every parameter that needs a gradient.

        Args:
            parameters: each once, however many names it has.
            reduce_scattered: parameters whose gradients ``fully_shard`` leaves partial on other axes -> the layout of
                the gradient. ``fully_shard`` gives the gradient the placements of the parameter.
        """
        parameters = tuple(parameters)
        self._reduce_scattered.update(reduce_scattered or {})
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != self._dtype:
                parameter.grad_dtype = None  # lets ``grad`` have any dtype, as the sum has until it is reduced
        for parameter in (*parameters, *self._reduce_scattered):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_accumulated)

    def begin(self) -> bool:
        """Return whether the running backward pass is the last of its step. Call it as the pass begins."""
        if self._pass_id != current_backward_pass():
            self._begin_pass()
        return self._passes + 1 == self._micro_batches

    @property
    def is_amid_step(self) -> bool:
        """Whether some passes of a step have run, and not all."""
        return self._passes > 0

    def gradients_were_cleared(self) -> bool:
        """Tell whether a gradient that was not reduced yet has been cleared or replaced since its last pass."""
        return any(
            parameter.grad is None or gradient() is not parameter.grad
            for parameter, gradient in self._unreduced.items()
        )

    def restart(self) -> None:
        """Make the next pass the first of a step."""
        self._unreduced.clear()
        self._passes = 0

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if self._pass_id != current_backward_pass():
            self._begin_pass(parameter)
        if parameter.grad_dtype is None:
            gradient = self._redistributor.as_dtensor(parameter.grad)
            is_reduced = tuple(gradient.placements) == tuple(cast(DTensor, parameter).placements)
            parameter.grad = _in_dtype(gradient, parameter.dtype if is_reduced else self._dtype)
        if self._passes + 1 == self._micro_batches:
            # Now, not at the end of the pass, so that few unreduced gradients are held at once.
            self._unreduced.pop(parameter, None)
            self._reduce(parameter)
        else:
            self._unreduced[parameter] = weakref.ref(parameter.grad)

    def _begin_pass(self, parameter: nn.Parameter | None = None) -> None:
        last = None if parameter is None else self._unreduced.get(parameter)
        if parameter is not None and last is not None and last() is not parameter.grad:
            self.restart()
        self._pass_id = current_backward_pass()
        self._running.clear()  # left by a pass that an exception ended
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
        self._finish_reductions(0)

    def _finish_reductions(self, remaining: int) -> None:
        """Wait for all but the last ``remaining`` reductions."""
        while len(self._running) > remaining:
            parameter, finish = self._running.popleft()
            assert isinstance(parameter, DTensor)
            parameter.grad = _in_dtype(finish(), parameter.dtype)

    def _reduce(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor)
        assert parameter.grad is not None
        gradient = self._redistributor.as_dtensor(parameter.grad)
        stored = tuple(parameter.placements)
        layout = self._reduce_scattered.get(parameter)
        if layout is not None:
            mesh, shape, stride = gradient.device_mesh, gradient.shape, gradient.stride()
            gradient = make_dtensor(local_of(gradient), mesh, layout, shape, stride)
        if tuple(gradient.placements) == stored:
            parameter.grad = gradient
            return
        with self._phases.entered("grad_reduce"):
            finish = self._redistributor.start(_in_dtype(gradient, self._dtype), stored)
        if layout is not None:
            # fully_shard overlaps this with the backward already, and may do so after this pass has ended.
            parameter.grad = _in_dtype(finish(), parameter.dtype)
            return
        # Drops this reference to the unreduced gradient: its reduction alone keeps it alive.
        parameter.grad = None
        self._running.append((parameter, finish))
        self._finish_reductions(_CONCURRENT_REDUCTIONS)


def _in_dtype(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    if tensor.dtype == dtype:
        return tensor
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
