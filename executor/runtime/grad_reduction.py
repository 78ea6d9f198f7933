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
from executor.torch_internals_parallel import post_accumulate_hooks

_CONCURRENT_REDUCTIONS = 2
"""Most reductions that run at a time, overlapped with the backward. Each one holds an unreduced gradient."""


class GradientReduction:
    """Redistributes ``param.grad`` to the parameter's stored layout in the last backward pass of every step.

    A step has ``micro_batches`` backward passes; a pass is one call of ``backward``. Before the last pass a gradient
    stays in the layout that autograd gives it, usually partial over the axes that shard the batch. It accumulates in
    the dtype of the reduction, or in the parameter's dtype if autograd gives it in the stored layout. Gradients are not
    divided, because the loss is the mean over the global (micro-)batch already. With several micro-batches the caller
    scales each loss by ``1 / micro_batches``, as in any loop that accumulates gradients. Clearing the gradients
    (``zero_grad(set_to_none=True)``) before the last pass restarts the step. Reductions are overlapped with the rest of
    the backward, and all reductions are complete when the backward ends.
    """

    def __init__(
        self, redistributor: Redistributor, *, micro_batches: int, dtype: torch.dtype, phases: PhaseTracker
    ) -> None:
        """Start before the first step.

        Args:
            redistributor: redistributes gradients on the mesh.
            micro_batches: number of backward passes of a step.
            dtype: dtype in which unreduced gradients accumulate and are reduced.
            phases: tracks the phase of a step.
        """
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
        """Register a hook on every parameter that needs a gradient.

        Args:
            parameters: parameters outside FSDP groups; each once, however many names it has. Those that another
                ``shard_module``, of a module inside this one, has attached its own reduction to are left to it.
            reduce_scattered: FSDP parameter -> layout of its gradient after the reduce-scatter, where the gradient is
                still partial on axes outside the group. ``fully_shard`` labels it with the parameter's placements.
        """
        parameters = tuple(parameter for parameter in parameters if not _is_attached(parameter))
        self._reduce_scattered.update(reduce_scattered or {})
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype != self._dtype:
                parameter.grad_dtype = None  # lets ``grad`` have any dtype, as the sum has until it is reduced
        for parameter in (*parameters, *self._reduce_scattered):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_accumulated)

    def begin(self) -> bool:
        """Return whether the running backward pass is the last of its step. Call this when the pass begins."""
        if self._pass_id != current_backward_pass():
            self._begin_pass()
        return self._passes + 1 == self._micro_batches

    @property
    def is_amid_step(self) -> bool:
        """Whether some passes of the current step have run, but not all."""
        return self._passes > 0

    def gradients_were_cleared(self) -> bool:
        """Return whether an unreduced gradient has been cleared or replaced since it last accumulated."""
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
            # Reduce now, not at the end of the pass, so that few unreduced gradients are alive at once.
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
        # These parameters have no gradient from the last micro-batch.
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
            # Wait here: fully_shard may run this hook after the pass has ended. It overlaps the hook with the backward.
            parameter.grad = _in_dtype(finish(), parameter.dtype)
            return
        # Drop this reference to the unreduced gradient, so that only its reduction keeps it alive.
        parameter.grad = None
        self._running.append((parameter, finish))
        self._finish_reductions(_CONCURRENT_REDUCTIONS)


def _is_attached(parameter: nn.Parameter) -> bool:
    hooks = post_accumulate_hooks(parameter)
    return any(isinstance(getattr(hook, "__self__", None), GradientReduction) for hook in hooks)


def _in_dtype(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    if tensor.dtype == dtype:
        return tensor
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
