"""Contexts of a run: modes, flags and cast parameters of a forward, its backward, and the recomputation of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from executor.runtime.implicit_replication import hold_for_backward, implicit_replication
from executor.runtime.random_state import RandomState
from executor.runtime.shared_redistributions import SharedRedistributions
from planner.model_rewrites.eager_masks import masks_as_traced, masks_by_broadcasting
from planner.model_rewrites.replaced_calls.checkpoints import without_own_checkpoints
from planner.model_rewrites.replaced_calls.value_checks import without_value_checks
from planner.model_rewrites.torch_attention import attention_as_planned
from planner.plan.estimate import Phase


class PhaseTracker:
    """Tells which phase of a step is running, so that collectives can be counted by phase."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []

    @property
    def phase(self) -> Phase:
        """The innermost phase that has been entered; ``backward`` if there is none, since autograd runs then."""
        return self._phases[-1] if self._phases else "backward"

    @contextmanager
    def entered(self, phase: Phase) -> Iterator[None]:
        """Return a context in which ``phase`` is running."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()


class RunContexts:
    """Enters and leaves the contexts of a run by hooks on the root module, so that training loops need no change.

    Hooks on the root cover its forward. ``hold_for_backward`` on its results keeps implicit replication on for the
    backward pass. Checkpointed blocks enter ``recomputing``.
    """

    def __init__(
        self,
        *,
        phases: PhaseTracker,
        shared: SharedRedistributions,
        own_ops: Callable[[], TorchFunctionMode],
        cast_parameters: Callable[[], AbstractContextManager[None]],
        device_type: str,
        random: RandomState,
        is_planned: bool,
    ) -> None:
        """Store the contexts, or the functions that return them.

        Args:
            phases: tracks the phase of a step.
            shared: opens a scope for each forward and each recomputation.
            own_ops: returns the mode that runs the executor's own ops.
            cast_parameters: returns the context in which modules see parameters in the compute dtype.
            device_type: device type of the mesh; on "cpu" torch decomposes attention into simpler ops.
            random: runs random ops, and holds their state between forwards.
            is_planned: whether shardplan made the plan, so that it says what is recomputed.
        """
        self._phases = phases
        self._shared = shared
        self._own_ops = own_ops
        self._cast_parameters = cast_parameters
        self._device_type = device_type
        self._random = random
        self._is_planned = is_planned
        self._forward: ExitStack | None = None
        self._part: nn.Module | None = None

    def attach(self, root: nn.Module, parts: Iterable[nn.Module] = ()) -> None:
        """Hook ``root``. Call this after all other hooks, so that these contexts are entered first and left last.

        Args:
            root: the root.
            parts: modules in ``root`` that may be called without it; the contexts then cover their forward.
        """
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)
        for part in parts:
            if part is not root:
                self.attach_part(part)

    def attach_part(self, module: nn.Module) -> None:
        """Hook ``module``, a part of the root, to run in these contexts when it is called apart from the root."""
        module.register_forward_pre_hook(self._enter_part, prepend=True)
        module.register_forward_hook(self._leave_part, always_call=True)

    def _enter_part(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._forward is None and self._phases.phase != "recompute":
            self._enter(module, args)
            self._part = module

    def _leave_part(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._part is module:
            self._part = None
            self._leave(module, args, output)

    @property
    def is_running(self) -> bool:
        """Whether the root's hooks have entered the contexts of a forward, which has not ended."""
        return self._forward is not None

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Return a context for a block's forward that runs again inside a backward pass."""
        with self._phases.entered("recompute"), self._running():
            yield

    def own_redistributions(self) -> AbstractContextManager[None]:
        """Return a context in which redistributions are shared among each other, but not with those outside."""
        return self._shared.scope()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())
            stack.enter_context(self._shared.scope())
            stack.enter_context(attention_as_planned())
            stack.enter_context(without_value_checks())
            if self._is_planned:
                stack.enter_context(without_own_checkpoints())
            stack.enter_context(masks_as_traced())
            stack.enter_context(masks_by_broadcasting())
            if self._device_type == "cpu":
                # DTensor has no rule for the CPU's flash attention.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(self._random.ops())
            stack.enter_context(self._own_ops())
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._forward is not None:
            # An exception in an earlier call kept its hooks from leaving the contexts.
            self._forward.close()
            self._part = None
        with ExitStack() as stack:
            stack.enter_context(self._phases.entered("forward"))
            stack.enter_context(self._random.stream())
            stack.enter_context(self._cast_parameters())
            stack.enter_context(self._running())
            self._forward = stack.pop_all()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = self._part = None
        leaves = pytree.tree_leaves(output)
        hold_for_backward(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
