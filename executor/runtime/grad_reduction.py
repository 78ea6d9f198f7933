"""Gradient reduction: gradients accumulate over uses and micro-batches, and are reduced once a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout
from executor.redistribute import Redistributor
from executor.runtime.run_context import PhaseTracker
from executor.runtime.unreduced_gradient import UnreducedGradient
from executor.torch_internals.dtensor import (
    ParameterHooks,
    at_end_of_backward,
    current_backward_pass,
    local_of,
    make_dtensor,
)
from executor.torch_internals.parallel import post_accumulate_hooks
from planner.model_rewrites.tree_paths import look_into_dataclasses

_CONCURRENT_REDUCTIONS = 2
"""Most reductions that run at a time, overlapped with the backward. Each one holds an unreduced gradient."""


class FullyShardedGradients(Protocol):
    """The gradients of parameters in FSDP groups. Some accumulate unreduced inside ``fully_shard`` between passes."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The sharded parameters."""

    @property
    def is_in_pass(self) -> bool:
        """Whether ``fully_shard`` has more to do in the running backward pass."""

    def begin_pass(self, is_last: bool) -> None:
        """Prepare for a backward pass."""

    def end_pass(self) -> None:
        """Clean up after a backward pass."""

    def unreduced(self) -> Mapping[nn.Parameter, torch.dtype]:
        """Return sharded parameter -> dtype of its gradient, for gradients that have accumulated unreduced."""

    def reduce(self) -> None:
        """Reduce these gradients, outside of a backward pass."""

    def forget(self, parameter: nn.Parameter | None = None) -> None:
        """Drop what has accumulated for ``parameter``; None: for all parameters."""


class GradientReduction:
    """Redistributes ``param.grad`` to the parameter's stored layout, once a step.

    A step has as many backward passes as the loop runs; a pass is one call of ``backward``. In the pass that is
    expected to be the last (``accumulation_steps``) reductions are overlapped with the backward, and all of them are
    complete when it ends. After any other pass gradients are unreduced: kept aside in the layout that autograd gives
    them, usually partial over the axes that shard the batch, with an ``UnreducedGradient`` in their place. What needs
    their values, such as an optimizer or a clipping, reduces them first (``complete``), and the step ends.

    Gradients accumulate in the dtype of the reduction, or in the parameter's dtype if autograd gives them in the stored
    layout. They are not divided, because the loss is the mean over the global (micro-)batch already. With several
    micro-batches the caller scales each loss by ``1 / micro_batches``, as in any loop that accumulates gradients.
    Gradients that are reduced already, of earlier passes, are added to those that are reduced later. Clearing gradients
    between passes drops what has accumulated, and restarts the step.
    """

    def __init__(
        self, redistributor: Redistributor, *, micro_batches: int, dtype: torch.dtype, phases: PhaseTracker
    ) -> None:
        """Start before the first step.

        Args:
            redistributor: redistributes gradients on the mesh.
            micro_batches: number of backward passes that a step is expected to have.
            dtype: dtype in which unreduced gradients accumulate and are reduced.
            phases: tracks the phase of a step.
        """
        self.accumulation_steps = micro_batches
        self._redistributor = redistributor
        self._dtype = dtype
        self._phases = phases
        self._passes = 0
        self._pass_id: int | None = None
        self._is_in_pass = False
        self._has_accumulated = False
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._reduce_scattered: dict[nn.Parameter, Layout] = {}
        self._in_fsdp: FullyShardedGradients | None = None
        self._aside: dict[nn.Parameter, torch.Tensor] = {}
        """Between passes: parameter -> its unreduced gradient. Those inside ``fully_shard`` are not here."""
        self._stand_ins: dict[nn.Parameter, UnreducedGradient] = {}
        """Parameter -> what ``grad`` shows in place of its unreduced gradient."""
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        """Parameter -> its reduced gradient, to which its unreduced gradient will be added."""
        self._pending: dict[nn.Parameter, None] = {}
        """In a pass: parameters whose gradient of earlier passes is unreduced, and which had none in this pass yet."""
        self._hooks: dict[nn.Parameter, ParameterHooks] = {}
        self._running: deque[tuple[nn.Parameter, Callable[[], DTensor]]] = deque()

    def attach(
        self, parameters: Iterable[nn.Parameter], reduce_scattered: Mapping[nn.Parameter, Layout] | None = None
    ) -> None:
        """Register hooks on every parameter, also on those that are frozen now.

        Args:
            parameters: parameters outside FSDP groups; each once, however many names it has. Those that another
                ``shard_module``, of a module inside this one, has attached its own reduction to are left to it.
            reduce_scattered: FSDP parameter -> layout of its gradient after the reduce-scatter, where the gradient is
                still partial on axes outside the group. ``fully_shard`` labels it with the parameter's placements.
        """
        self._parameters += tuple(
            parameter for parameter in parameters if parameter.is_floating_point() and not is_attached(parameter)
        )
        self._reduce_scattered.update(reduce_scattered or {})
        self.hook_again()

    def attach_root(self, root: nn.Module) -> None:
        """Hook ``root``. Call this after ``fully_shard``, whose callback at the end of a backward has to run first."""
        root.register_forward_hook(self._hook_outputs)

    def hook_again(self) -> None:
        """Register hooks on parameters that have none yet, or have lost them in a conversion."""
        for parameter in (*self._parameters, *self._reduce_scattered):
            is_in_fsdp = parameter in self._reduce_scattered
            hooks = self._hooks.setdefault(parameter, ParameterHooks())
            if not is_in_fsdp and parameter.dtype != self._dtype:
                parameter.grad_dtype = None  # lets ``grad`` have any dtype, as the sum has until it is reduced
            hooks.register(parameter, None if is_in_fsdp else self._before_accumulation, self._on_accumulated)

    def attach_fully_shard(self, in_fsdp: FullyShardedGradients) -> None:
        """Take the gradients inside ``fully_shard``."""
        self._in_fsdp = in_fsdp

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters, in an order that is the same on all ranks."""
        return (*self._parameters, *(() if self._in_fsdp is None else self._in_fsdp.parameters))

    @property
    def is_amid_step(self) -> bool:
        """Whether some passes of the current step have run, but not all."""
        return self._passes > 0

    def begin(self) -> None:
        """Begin the running backward pass, unless it has begun. Call this before any gradient accumulates in it."""
        if self._pass_id == current_backward_pass():
            return
        self._pass_id = current_backward_pass()
        at_end_of_backward(self._end_pass)
        if self._is_in_pass:  # a backward inside another one, such as that of a checkpointed block
            return
        self.drop_cleared()
        self._is_in_pass, self._has_accumulated = True, False
        for parameter in (*self._parameters, *self._reduce_scattered):
            if parameter in self._stand_ins:
                parameter.grad = self._aside.pop(parameter, None)
                if parameter.grad is not None:
                    self._pending[parameter] = None
            elif parameter.grad is not None:
                self._earlier[parameter] = parameter.grad
                parameter.grad = None
        if self._in_fsdp is not None:
            self._give_to_fully_shard(self._in_fsdp.parameters)
            self._in_fsdp.begin_pass(self._is_last)

    def drop_cleared(self) -> None:
        """Drop unreduced gradients that the loop has cleared or replaced since the last pass; the step restarts then.

        If an exception ended the last pass, drop what that pass has left.
        """
        if self._is_in_pass and current_backward_pass() == -1:
            self.restart()
        for parameter, stand_in in list(self._stand_ins.items()):
            if parameter.grad is not stand_in:
                self._forget(parameter)

    def restart(self) -> None:
        """Drop all unreduced gradients, and make the next pass the first of a step."""
        if self._is_in_pass:
            for parameter in (*self._parameters, *self._reduce_scattered):
                if parameter.grad is not None:  # what an interrupted pass has left
                    parameter.grad = self._earlier.get(parameter)
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = self._earlier.get(parameter)
        for state in (self._aside, self._stand_ins, self._earlier, self._pending, self._running):
            state.clear()
        if self._in_fsdp is not None:
            self._in_fsdp.forget()
        self._is_in_pass, self._pass_id, self._passes = False, None, 0

    def complete(self) -> None:
        """Reduce all gradients that are unreduced, outside of a backward pass. The step's passes end here."""
        self.drop_cleared()
        self._passes = 0
        if not self._stand_ins:
            return
        stand_ins = dict(self._stand_ins)
        with torch.no_grad():
            for parameter in (*self._parameters, *self._reduce_scattered):
                if parameter in self._aside:
                    parameter.grad = self._aside.pop(parameter)
                    self._reduce(parameter)
            if self._in_fsdp is not None and self._in_fsdp.unreduced():
                self._give_to_fully_shard(self._in_fsdp.unreduced())
                with self._phases.entered("grad_reduce"):
                    self._in_fsdp.reduce()
            self._finish_reductions(0)
        self._stand_ins.clear()
        for parameter, stand_in in stand_ins.items():
            stand_in.set_value(parameter.grad)

    def _hook_outputs(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        look_into_dataclasses(output)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._before_accumulation)

    def _before_accumulation(self, gradient: torch.Tensor) -> None:
        self.begin()

    @property
    def _is_last(self) -> bool:
        return self._passes + 1 >= self.accumulation_steps

    def _give_to_fully_shard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the stand-ins in ``grad`` of ``parameters`` by what ``fully_shard`` is to add to."""
        for parameter in parameters:
            if parameter in self._stand_ins and parameter.grad is self._stand_ins[parameter]:
                is_partial = parameter in self._reduce_scattered
                parameter.grad = None if is_partial else self._earlier.pop(parameter, None)

    def _on_accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._has_accumulated = True
        if parameter.grad_dtype is None:
            gradient = self._redistributor.as_dtensor(parameter.grad)
            is_reduced = tuple(gradient.placements) == tuple(cast(DTensor, parameter).placements)
            parameter.grad = _in_dtype(gradient, parameter.dtype if is_reduced else self._dtype)
        if self._is_last or not self._is_in_pass:
            # Reduce now, not at the end of the pass, so that few unreduced gradients are alive at once.
            self._reduce(parameter)

    def _end_pass(self) -> None:
        if self._in_fsdp is not None and self._in_fsdp.is_in_pass:
            at_end_of_backward(self._end_pass)  # the callback of fully_shard has to run first
            return
        if not self._is_in_pass:
            return
        if self._is_last:
            for parameter in list(self._pending):  # they have no gradient from this pass
                self._reduce(parameter)
            self._finish_reductions(0)
        self._pending.clear()
        is_last, self._is_in_pass, self._pass_id = self._is_last, False, None
        if self._has_accumulated or self._in_fsdp is not None:  # else this was `torch.autograd.grad`
            self._passes = 0 if is_last else self._passes + 1
        self._set_aside(is_last)

    def _set_aside(self, is_last: bool) -> None:
        """Replace gradients that are unreduced by stand-ins, and put back those that the pass has not changed."""
        before = dict(self._stand_ins)
        self._stand_ins.clear()
        for parameter in (*self._parameters, *self._reduce_scattered):
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = self._earlier.pop(parameter, None)
            elif not is_last:
                if parameter not in self._reduce_scattered and _has_stored_layout(parameter, gradient):
                    self._set_reduced(parameter, cast(DTensor, gradient))
                else:
                    self._aside[parameter] = gradient
                    self._stand_in(parameter, gradient.dtype, before)
        if self._in_fsdp is not None:
            for parameter, dtype in self._in_fsdp.unreduced().items():
                if parameter.grad is not None and parameter not in self._stand_ins:
                    self._earlier[parameter] = parameter.grad
                self._stand_in(parameter, dtype, before)
            self._in_fsdp.end_pass()
        for parameter, stand_in in before.items():
            stand_in.set_value(parameter.grad)

    def _stand_in(
        self, parameter: nn.Parameter, dtype: torch.dtype, before: dict[nn.Parameter, UnreducedGradient]
    ) -> None:
        """Make ``grad`` of ``parameter`` show its stand-in: the one that it had ``before``, if any."""
        stand_in = before.pop(parameter, self._stand_ins.get(parameter))
        if stand_in is None:
            stand_in = UnreducedGradient.of(parameter, dtype, self.complete, self._forget)
        self._stand_ins[parameter] = stand_in
        parameter.grad = stand_in

    def _forget(self, parameter: nn.Parameter) -> None:
        """Drop what has accumulated for ``parameter``; the next pass is the first of a step."""
        for state in (self._stand_ins, self._aside, self._earlier):
            state.pop(parameter, None)
        if self._in_fsdp is not None:
            self._in_fsdp.forget(parameter)
        self._passes = 0

    def _finish_reductions(self, remaining: int) -> None:
        """Wait for all but the last ``remaining`` reductions."""
        while len(self._running) > remaining:
            parameter, finish = self._running.popleft()
            self._set_reduced(parameter, finish())

    def _reduce(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor)
        assert parameter.grad is not None
        self._pending.pop(parameter, None)
        gradient = self._redistributor.as_dtensor(parameter.grad)
        stored = tuple(parameter.placements)
        layout = self._reduce_scattered.get(parameter)
        if layout is not None:
            mesh, shape, stride = gradient.device_mesh, gradient.shape, gradient.stride()
            gradient = make_dtensor(local_of(gradient), mesh, layout, shape, stride)
        if tuple(gradient.placements) == stored:
            self._set_reduced(parameter, gradient)
            return
        with self._phases.entered("grad_reduce"):
            finish = self._redistributor.start(_in_dtype(gradient, self._dtype), stored)
        if layout is not None:
            # Wait here: fully_shard may run this hook after the pass has ended. It overlaps the hook with the backward.
            self._set_reduced(parameter, finish())
            return
        # Drop this reference to the unreduced gradient, so that only its reduction keeps it alive.
        parameter.grad = None
        self._running.append((parameter, finish))
        self._finish_reductions(_CONCURRENT_REDUCTIONS)

    def _set_reduced(self, parameter: nn.Parameter, gradient: DTensor) -> None:
        """Set ``grad`` of ``parameter`` to ``gradient``, which is reduced, plus the reduced one of earlier passes."""
        gradient = _in_dtype(gradient, parameter.dtype)
        earlier = self._earlier.pop(parameter, None)
        if earlier is None:
            parameter.grad = gradient
        elif _has_stored_layout(parameter, earlier):
            local_of(cast(DTensor, earlier)).add_(local_of(gradient))
            parameter.grad = earlier
        else:
            parameter.grad = earlier + gradient


def _has_stored_layout(parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and tuple(gradient.placements) == tuple(cast(DTensor, parameter).placements)


def is_attached(parameter: nn.Parameter) -> bool:
    """Return whether a sharded module reduces the gradient of ``parameter``."""
    hooks = post_accumulate_hooks(parameter)
    return any(isinstance(getattr(hook, "__self__", None), GradientReduction) for hook in hooks)


def _in_dtype(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    if tensor.dtype == dtype:
        return tensor
    local = local_of(tensor).to(dtype)
    return make_dtensor(local, tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
