"""Activation checkpointing: blocks that keep their inputs, and run their forward again in the backward pass.

``full`` keeps nothing else. ``selective`` also keeps the results of the ops in ``KEPT_OPS``, those with the most FLOPs.
In both, every collective of the block's forward runs again (phase ``recompute``): redistributions of activations at
boundaries inside the block, and gathers of parameters, whose copies then serve the block's backward pass too. The ports
of the block itself lie outside it, and run once; so do the gathers of ``executor.runtime.fully_sharded``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from executor.ops.grouped_gemm import PRODUCTS_OP
from executor.resolve.fqns import module_fqns
from executor.runtime.parameter_views import PresentedParameters
from executor.runtime.run_context import RunContexts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion
from planner.plan.job import CheckpointingMode
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import ShardingPlan

_aten = torch.ops.aten

KEPT_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        PRODUCTS_OP,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Ops whose results selective checkpointing keeps."""


def checkpoint_blocks(
    module: nn.Module,
    plan: ShardingPlan,
    contexts: RunContexts,
    presented: PresentedParameters,
    region: CheckpointedRegion,
) -> None:
    """Wrap the forward of every module that the plan checkpoints. Call it after all other wrappers of forwards."""
    entries: Mapping[str, CheckpointingMode] = plan.activation_checkpointing
    modes = resolve_keys(entries, module_fqns(module), field="activation_checkpointing", what="module")
    blocks = {module.get_submodule(fqn): mode for fqn, mode in modes.items()}
    for block, mode in blocks.items():
        block.forward = CheckpointedForward(block, mode, contexts, presented, region)


class CheckpointedForward:
    """A module's forward that autograd saves nothing of but its inputs, and with "selective" the largest products."""

    def __init__(
        self,
        block: nn.Module,
        mode: CheckpointingMode,
        contexts: RunContexts,
        presented: PresentedParameters,
        region: CheckpointedRegion,
    ) -> None:
        self._forward: Callable[..., Any] = block.forward
        self._mode = mode
        self._contexts = contexts
        self._presented = presented
        self._region = region
        self._slots = presented.slots_below(block)
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # The recomputation needs this forward's copies of parameters: others may be in place by then, or none.
        again = functools.partial(self._recomputing, self._presented.copies)
        return checkpoint(
            functools.partial(self._inside, kwargs),
            *args,
            use_reentrant=False,
            # Stopping early would leave out collectives at the end of the block, which other ranks may wait for.
            early_stop=False,
            context_fn=functools.partial(_contexts, self._mode, again),
        )

    def _inside(self, kwargs: dict[str, Any], *args: Any) -> Any:
        # The block shares no redistribution with the rest of the model, since its recomputation cannot.
        with self._region.entered(), self._contexts.sharing_apart():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _recomputing(self, copies: Any) -> Iterator[None]:
        with self._presented.presenting(copies, self._slots), self._contexts.recomputing():
            yield


def _contexts(
    mode: CheckpointingMode, again: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what to enter for the forward and for each recomputation."""
    if mode == "full":
        return nullcontext(), _Renewed([again])
    caching, cached = create_selective_checkpoint_contexts(_policy)
    return caching, _Renewed([again, lambda: cached])


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class _Renewed:
    """Enters contexts made anew each time: a backward pass that is run twice recomputes twice."""

    def __init__(self, makers: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._makers = makers
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
