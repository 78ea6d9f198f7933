"""Attention masks of transformers, alike in the trace and in the sharded run.

Without an attention mask, transformers inspects the *values* of ``position_ids`` for packed sequences. If there are
none, it builds no mask and passes ``is_causal`` to the attention kernel. Under export or on fake tensors it cannot
inspect values, so it builds a full ``[batch, 1, seq, seq]`` mask. That graph has other kernels and FLOPs than the run.

In a sharded run, a look at the values of a mask would be a collective that no plan has, and a wait for the GPU.

Masks of some models, as those of images and text, are made in a ``vmap``, whose ops cannot run by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Within this context, transformers assumes unpacked sequences and chooses masks as in an eager run."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    with (
        mock.patch.object(masking, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False),
    ):
        yield


_DECISIONS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions of transformers that leave a mask out where nothing is padded."""


def _without_values(is_left_out: Callable[..., bool]) -> Callable[..., bool]:
    """Return ``is_left_out`` for masks without values: a caller's mask stays, as in the trace.

    A mask that a model makes itself is plain. Without values, on the meta device, it counts as one that masks nothing:
    transformers makes masks of ones.
    """

    def decide(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if isinstance(padding_mask, DTensor):
            return False
        has_values = padding_mask is not None and not padding_mask.is_meta
        return is_left_out(padding_mask if has_values else None, *args, **kwargs)

    return decide


@contextmanager
def masks_as_traced() -> Iterator[None]:
    """Within this context, a sharded run leaves out the masks that the trace leaves out."""
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        for name in _DECISIONS if masking is not None else ():
            stack.enter_context(mock.patch.object(masking, name, _without_values(getattr(masking, name))))
        yield


@contextmanager
def masks_without_vmap() -> Iterator[None]:
    """Within this context, transformers makes all masks by broadcasting, as it makes most of them."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return

    def broadcast(mask_function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def of_indices(*indices: torch.Tensor) -> torch.Tensor:
            mask = mask_function(*masking._non_vmap_expansion_sdpa(*indices))
            return mask.expand([len(index) for index in indices])

        return of_indices

    with mock.patch.object(masking, "_vmap_expansion_sdpa", broadcast):
        yield
