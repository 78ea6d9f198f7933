"""Attention masks of transformers: as an eager run chooses them, for use while tracing, and without ``vmap``.

Without an attention mask, transformers inspects the *values* of ``position_ids`` for packed sequences. If there are
none, it builds no mask and passes ``is_causal`` to the attention kernel. Under export or on fake tensors it cannot
inspect values, so it builds a full ``[batch, 1, seq, seq]`` mask. That graph has other kernels and FLOPs than the run.

Masks of some models, as those of images and text, are made in a ``vmap``, whose ops cannot run by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch


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
