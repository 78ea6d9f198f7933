"""Tracing Hugging Face models down the road that real tensors take through their attention masks.

Given no attention mask, transformers looks at the *values* of `position_ids` to see whether sequences are packed, and
leaves the causal mask to the attention kernel when they are not. Under export or on fake tensors it cannot look, and
builds a full [batch, 1, seq, seq] mask instead: another graph, another kernel, other FLOPs than the run will have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Within it, transformers takes sequences as not packed, and chooses masks as in an eager run on real tensors."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        yield
        return
    with (
        mock.patch.object(masking, "find_packed_sequence_indices", return_value=None),
        mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False),
    ):
        yield
