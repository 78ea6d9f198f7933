"""Attention masks of transformers, alike in the trace and in the sharded run.

Without an attention mask, transformers inspects the *values* of ``position_ids`` for packed sequences. If there are
none, it builds no mask and passes ``is_causal`` to the attention kernel. Under export or on fake tensors it cannot
inspect values, so it builds a full ``[batch, 1, seq, seq]`` mask. That graph has other kernels and FLOPs than the run.

In a sharded run, a look at the values of a mask would be a collective that no plan has, and a wait for the GPU.

Masks of some models, as those of images and text, are made in a ``vmap``, whose ops cannot run by themselves. A mask
of padding is made by indices of samples, which cannot be split.
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
def masks_by_broadcasting() -> Iterator[None]:
    """Within this context, transformers makes all masks by broadcasting, so that they can be split by samples."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return

    def without_vmap(mask_function: _MaskFunction) -> Callable[..., torch.Tensor]:
        def of_indices(*indices: torch.Tensor) -> torch.Tensor:
            mask = mask_function(*masking._non_vmap_expansion_sdpa(*indices))
            return mask.expand([len(index) for index in indices])

        return of_indices

    with (
        mock.patch.object(masking, "_vmap_expansion_sdpa", without_vmap),
        mock.patch.object(masking, "padding_mask_function", _padding_by_view(masking.padding_mask_function)),
    ):
        yield


_MaskFunction = Callable[..., torch.Tensor]
"""(sample, head, query, key), all indices -> whether the query sees the key."""


def _padding_by_view(by_index: Callable[[torch.Tensor], _MaskFunction]) -> Callable[[torch.Tensor], _MaskFunction]:
    """Return ``by_index``, which indexes a mask [samples, keys], with a view of the mask where that is the same."""

    def of_mask(padding_mask: torch.Tensor) -> _MaskFunction:
        def mask_function(
            sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            # The mask has all keys up to the last that is asked for: asked for as many as it has, it is the whole mask.
            is_whole = key.dim() == 4 and (len(sample), key.shape[-1]) == tuple(padding_mask.shape)
            return padding_mask[:, None, None, :] if is_whole else by_index(padding_mask)(sample, head, query, key)

        return mask_function

    return of_mask
