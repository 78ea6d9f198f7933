"""``whole_batches``: a context in which every rank passes whole batches to a sharded module, and gets whole results.

``model.generate`` runs in it: each call cuts its arguments to the layouts of the plan, and gathers what it returns.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, format_layout
from executor.ops.opaque import run_opaque
from executor.redistribute import Redistributor
from executor.resolve.per_module import PerModule
from executor.resolve.sharded_as import not_sharded
from executor.runtime.implicit_replication import implicit_replication
from executor.runtime.run_context import RunContexts
from executor.torch_internals.generation import start_fully_sharded
from planner.errors import RunError
from planner.model_rewrites.cache_argument import is_cache, is_encoder_decoder

_logger = logging.getLogger("shardplan")


class BatchForm:
    """Whether plain tensors at the root are whole batches or this rank's shards, and how many samples a call has.

    There is one object for each sharded module.
    """

    def __init__(self, planned_samples: int | None, *, is_planned: bool) -> None:
        """Start with shards.

        Args:
            planned_samples: samples of a global micro-batch in the plan; None: not stated.
            is_planned: whether layouts divide the tensors that the plan was made for. Layouts of the user's own may
                split shards unevenly, as torch does, and are kept unless batches are whole.
        """
        self._is_planned = is_planned
        self.is_whole = False
        self.keeps_logits_sharded = False
        """Whether a result with a loss keeps its other tensors as DTensors, which may be too large to be gathered."""
        self.samples: int | None = None
        """Samples of the global micro-batch of the current call; None: not known."""
        self.was_uneven = False
        """Whether a layout of the plan has not divided a tensor, in any call."""
        self._planned_samples = planned_samples
        self._is_noted = False

    def layout(self, layout: Layout, shape: Sequence[int], redistributor: Redistributor) -> Layout:
        """Return ``layout`` with `Replicate` on each axis that does not divide its dim of a tensor of ``shape``.

        Of shards, layouts of the user's own are returned as they are.

        Dim 0 may be samples x tokens. It stays whole where an axis divides the samples of the plan, but not those of
        this call, because it could not be split into samples again.
        """
        if not (self._is_planned or self.is_whole):
            return layout
        result = self._layout(layout, shape, redistributor)
        if result != layout:
            self.was_uneven = True
            if torch.is_grad_enabled() and not self._is_noted:
                self._is_noted = True
                mesh = tuple(redistributor.device_mesh.shape)
                _logger.warning(
                    "A batch does not divide as planned: a tensor of shape %s is in (%s), not in (%s), on the mesh %s. "
                    "Results are right, but ranks repeat each other's work. Pad the batch: local_batch(..., pad=...).",
                    *(tuple(shape), ", ".join(format_layout(result)), ", ".join(format_layout(layout)), mesh),
                )
        return result

    def _layout(self, layout: Layout, shape: Sequence[int], redistributor: Redistributor) -> Layout:
        even = redistributor.even(layout, shape)
        if self.samples is None or self._planned_samples is None or self.samples == self._planned_samples:
            return even
        samples = tuple(placement if placement == Shard(0) else Replicate() for placement in even)
        if redistributor.even(samples, (self._planned_samples,)) != samples:
            return even
        kept = redistributor.even(samples, (self.samples,))
        return tuple(k if s == Shard(0) else e for e, s, k in zip(even, samples, kept, strict=True))


_forms: PerModule[BatchForm] = PerModule("batch form")
"""Sharded root -> the form of its batches. Global, because hooks and callers share nothing but the module."""


@contextmanager
def whole_batches(module: nn.Module) -> Iterator[None]:
    """Return a context in which all ranks call ``module`` with the same whole batch, and get whole plain results.

    Args:
        module: the result of ``shard_module``.

    A batch or a sequence that the plan's axes do not divide is not split on them: the results are right, but ranks
    repeat each other's work. Key-value caches stay sharded. Gathering the results is not part of the plan.

    Raises:
        PlanMismatchError: ``module`` has not been sharded by ``shard_module``.
    """
    form = _forms.get(module)
    if form is None:
        raise not_sharded(module)
    before, form.is_whole = form.is_whole, True
    try:
        yield
    finally:
        form.is_whole = before


def attach_whole_results(
    module: nn.Module, form: BatchForm, redistributor: Redistributor, contexts: RunContexts
) -> None:
    """Hook ``module``: while batches are whole, its results are gathered; ``generate`` runs in whole batches.

    Call it after all other hooks on the root's output.

    Args:
        module: the root.
        form: the form of its batches.
        redistributor: gathers results.
        contexts: contexts of a run, for the encoder that ``generate`` calls apart from the root.
    """
    _forms[module] = form
    module.register_forward_hook(_GatherResults(form, redistributor))
    generate = getattr(module, "generate", None)
    if callable(generate):
        encoder = _encoder(module)
        if encoder is not None:
            contexts.attach_part(encoder)
        module.generate = _Generate(module, generate, redistributor.device_mesh)  # type: ignore[assignment]


def _encoder(module: nn.Module) -> nn.Module | None:
    """Return the encoder of a transformers model that has a decoder too."""
    get_encoder: Any = getattr(module, "get_encoder", None)
    return get_encoder() if is_encoder_decoder(module) and get_encoder is not None else None


def encode_whole(module: nn.Module, redistributor: Redistributor) -> None:
    """Let the encoder of an encoder-decoder run on whole tensors, on every rank.

    A plan for decoding has no layouts for it, except those in which its parameters rest.

    Args:
        module: the root.
        redistributor: gathers parameters and arguments.
    """
    encoder = _encoder(module)
    if encoder is None:
        return
    (fqn,) = (name for name, part in module.named_modules() if part is encoder)
    run_opaque(module, {fqn: ""}, redistributor)

    def gather(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        whole: tuple[Any, Any] = pytree.tree_map_only(
            DTensor, lambda tensor: redistributor.redistribute(tensor, redistributor.replicated), (args, kwargs)
        )
        return whole

    encoder.register_forward_pre_hook(gather, with_kwargs=True)


class _Generate:
    """transformers' ``generate`` of a sharded module: whole prompts in, whole tokens out, the same on every rank."""

    def __init__(self, module: nn.Module, generate: Callable[..., Any], device_mesh: DeviceMesh) -> None:
        self._module, self._generate = module, generate
        self._mesh = device_mesh
        functools.update_wrapper(self, generate, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate``. Sampling draws from the random state of the mesh's first rank.

        Raises:
            RunError: the ranks' arguments differ.
        """
        self._check_equal((args, kwargs))
        # The encoder is called first, apart from the root, which alone knows all FSDP modules.
        start_fully_sharded(self._module)
        # Beam search reorders the caches, outside of any forward.
        with whole_batches(self._module), implicit_replication(), self._random_state_of_first_rank():
            return self._generate(*args, **kwargs)

    def _check_equal(self, arguments: Any) -> None:
        """Raise ``RunError`` on all ranks if some have other tensors: they would stop at different tokens, and hang."""
        digest = 0
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                # The bytes of any dtype, without a copy of their own.
                data = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                digest = zlib.crc32(data.tobytes(), zlib.crc32(str(tuple(leaf.shape)).encode(), digest))
        extremes = torch.tensor([digest, -digest], device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        if int(extremes[0]) != -int(extremes[1]):
            raise RunError(
                "generate was called with different tensors on the ranks of the mesh.",
                what_to_do="Pass the same whole prompts on every rank.",
            )

    @contextmanager
    def _random_state_of_first_rank(self) -> Iterator[None]:
        """Return a context in which all ranks draw what the first rank draws; other ranks' random states are kept."""
        device_type = self._mesh.device_type
        on_device = [] if device_type == "cpu" else [torch.get_device_module(device_type)]
        # The first rank's own state advances, so that a second call draws other samples.
        with ExitStack() as stack:
            if any(self._mesh.get_coordinate() or ()):
                devices = [module.current_device() for module in on_device]
                kind = "cuda" if device_type == "cpu" else device_type
                stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
            for module in (torch, *on_device):
                state = module.get_rng_state().to(device_type)
                for axis in range(self._mesh.ndim):
                    dist.broadcast(state, group=self._mesh.get_group(axis), group_src=0)
                module.set_rng_state(state.cpu())
            yield


class _GatherResults:
    """A forward hook on the root that gathers its results while batches are whole; caches stay sharded."""

    def __init__(self, form: BatchForm, redistributor: Redistributor) -> None:
        self._form, self._redistributor = form, redistributor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._form.is_whole:
            return output
        if self._form.keeps_logits_sharded and any(map(_is_scalar, pytree.tree_leaves(output, is_leaf=is_cache))):
            return pytree.tree_map(lambda leaf: self._gathered(leaf) if _is_scalar(leaf) else leaf, output)
        return pytree.tree_map(self._gathered, output, is_leaf=is_cache)

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        whole = self._redistributor.redistribute(leaf, self._redistributor.replicated)
        local: torch.Tensor = whole.to_local(grad_placements=self._redistributor.replicated)
        if local.dim() == 0:
            return local.clone()  # loops scale losses in place, which autograd forbids for this view
        zigzag = self._redistributor.zigzag
        if zigzag is not None and local.dim() > 1 and local.shape[1] == zigzag.length:
            return zigzag.to_natural(local, 1)
        return local


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, DTensor) and leaf.dim() == 0
