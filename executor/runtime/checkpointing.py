"""Activation checkpointing: blocks that save their inputs, and run their forward again in the backward pass.

The mode ``full`` saves nothing else. ``selective`` also saves the results of ``SAVED_OPS``, the ops with the most
FLOPs. In both modes every collective inside the block runs again (phase ``recompute``): redistributions of activations
at boundaries inside the block, and all-gathers of parameters, whose copies the block's backward uses. The ports of the
block itself and the FSDP all-gathers of ``executor.runtime.fully_sharded`` lie outside the block. A recomputation does
not run these again.
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

from executor.ops.grouped_gemm import GEMM_PER_EXPERT_OP
from executor.resolve.fqns import modules_at
from executor.runtime.buffers import BuffersBefore
from executor.runtime.parameter_views import CastParameters, ComputeDtypeParameters
from executor.runtime.run_context import RunContexts
from executor.runtime.saved_tensor_recompute import CheckpointedRegion
from planner.model_rewrites.replaced_calls.checkpoints import PlannedCheckpoint
from planner.plan.job import CheckpointingMode

_aten = torch.ops.aten

SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        GEMM_PER_EXPERT_OP,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Ops whose results selective checkpointing saves."""


def checkpoint_blocks(
    module: nn.Module,
    modes: Mapping[str, CheckpointingMode],
    contexts: RunContexts,
    parameters: ComputeDtypeParameters,
    region: CheckpointedRegion,
) -> None:
    """Wrap the forward of every checkpointed module. Call it after all other wrappers of forwards.

    Args:
        module: the root module.
        modes: module FQN -> mode.
        contexts: the contexts that a recomputation enters.
        parameters: shows a recomputation the cast parameters of its forward.
        region: each block enters it while it runs.
    """
    for block, _, mode in modules_at(module, modes):
        block.forward = CheckpointedForward(block, mode, contexts, parameters, region)


class CheckpointedForward:
    """A module's forward of which autograd saves only the inputs, in "selective" also the results of ``SAVED_OPS``."""

    def __init__(
        self,
        block: nn.Module,
        mode: CheckpointingMode,
        contexts: RunContexts,
        parameters: ComputeDtypeParameters,
        region: CheckpointedRegion,
    ) -> None:
        self._block = block
        self._forward: Callable[..., Any] = block.forward
        self._mode = mode
        self._contexts = contexts
        self._parameters = parameters
        self._region = region
        self._slots = parameters.slots_in(block)
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # The recomputation needs the cast parameters of this forward. At that time the modules show others, or none.
        # The same holds for buffers, which the forward may update: a recomputation must not update them again.
        buffers = BuffersBefore(self._block)
        recomputing = functools.partial(self._recomputing, self._parameters.current, buffers)
        result = checkpoint(
            functools.partial(self._run_block, kwargs),
            *args,
            use_reentrant=False,
            # Stopping early would skip collectives at the end of the block, which other ranks may wait for.
            early_stop=False,
            context_fn=PlannedCheckpoint(functools.partial(_contexts, self._mode, recomputing)),
        )
        buffers.drop_unwritten()
        return result

    def _run_block(self, kwargs: dict[str, Any], *args: Any) -> Any:
        # A recomputation cannot share redistributions with the rest of the model, so neither does the forward.
        with self._region.entered(), self._contexts.own_redistributions():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _recomputing(self, parameters: CastParameters, buffers: BuffersBefore) -> Iterator[None]:
        with self._parameters.shown(parameters, self._slots), buffers.shown(), self._contexts.recomputing():
            yield


def _contexts(
    mode: CheckpointingMode, recomputing: Callable[[], AbstractContextManager[None]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward and of each recomputation."""
    if mode == "full":
        return nullcontext(), _ReenterableContexts([recomputing])
    saving, reading = create_selective_checkpoint_contexts(_policy)
    return saving, _ReenterableContexts([recomputing, lambda: reading])


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


class _ReenterableContexts:
    """A context that enters new contexts each time it is entered: a backward that runs twice recomputes twice."""

    def __init__(self, factories: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        self._factories = factories
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for factory in self._factories:
                stack.enter_context(factory())
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)
