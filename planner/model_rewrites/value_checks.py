"""Looks at the values of tensors, to warn, to raise an error, or to leave a mask out that masks nothing.

A trace has no values: it has the mask. In a sharded run, each look would be a collective that no plan has, and a wait
for the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution

_WARNING = "warn_if_padding_and_no_attention_mask"


def _masks_nothing(mask: torch.Tensor) -> bool:
    """Return whether a mask is true everywhere: that of a caller is taken to mask something, as in the trace.

    A mask that a model makes itself is plain. It has no values on the meta device; transformers fills it with ones.
    """
    return not isinstance(mask, DTensor) and (mask.is_meta or bool(mask.all()))


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Within this context transformers does not look for padding, and nothing checks the values of its arguments."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        for check in ("_check_tensor_all", "_check_tensor_all_with"):
            stack.enter_context(mock.patch.object(torch, check))
        modeling, masking = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "masking_utils"))
        if modeling is not None:
            stack.enter_context(mock.patch.object(modeling.PreTrainedModel, _WARNING))
        if masking is not None:
            stack.enter_context(mock.patch.object(masking, "fast_all", _masks_nothing))
        yield
