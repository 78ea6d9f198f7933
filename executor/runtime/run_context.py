"""What has to be switched on while a planned module runs: forward, backward, and when a block is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from executor.runtime.implicit_replication import hold_for_backward, implicit_replication
from executor.runtime.shared_redistributions import SharedRedistributions
from planner.plan.estimate import Phase


class PhaseClock:
    """Says which phase of a step is running, so that collectives can be counted by phase."""

    def __init__(self) -> None:
        self._phases: list[Phase] = []

    @property
    def phase(self) -> Phase:
        """The phase that was entered last; outside all of them autograd is at work."""
        return self._phases[-1] if self._phases else "backward"

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Within it ``phase`` is running."""
        self._phases.append(phase)
        try:
            yield
        finally:
            self._phases.pop()


class RunContexts:
    """Enters and leaves, by hooks on the root module, everything that a run of it needs.

    A user's training loop stays as it is: the hooks on the root cover its forward, a hook on what it returns covers
    the backward pass, and ``recomputing`` is entered by checkpointed blocks.
    """

    def __init__(
        self,
        *,
        clock: PhaseClock,
        shared: SharedRedistributions,
        own_ops: Callable[[], TorchFunctionMode],
        presented_parameters: Callable[[], AbstractContextManager[None]],
        device_type: str,
    ) -> None:
        """Keep what is to be entered.

        Args:
            clock: told of each phase.
            shared: given a scope for each forward and each recomputation.
            own_ops: makes the mode that runs our own ops.
            presented_parameters: makes the context in which parameters have their compute dtype.
            device_type: "cpu" needs another attention kernel.
        """
        self._clock = clock
        self._shared = shared
        self._own_ops = own_ops
        self._presented_parameters = presented_parameters
        self._device_type = device_type
        self._forward: ExitStack | None = None

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``. Call it after all other hooks are there, so that it enters first and leaves last."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within it, inside a backward pass, part of the forward runs again."""
        with self._clock.of("recompute"), self._running():
            yield

    def sharing_apart(self) -> AbstractContextManager[None]:
        """Within it redistributions are shared among themselves only."""
        return self._shared.scope()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(implicit_replication())
            stack.enter_context(self._shared.scope())
            if self._device_type == "cpu":
                # DTensor has no rule for the CPU's flash attention.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(self._own_ops())
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._forward is not None:
            # What an earlier call left behind, whose hooks an exception kept from running.
            self._forward.close()
        with ExitStack() as stack:
            stack.enter_context(self._clock.of("forward"))
            stack.enter_context(self._presented_parameters())
            stack.enter_context(self._running())
            self._forward = stack.pop_all()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._forward is not None:
            self._forward.close()
            self._forward = None
        leaves = pytree.tree_leaves(output)
        hold_for_backward(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
