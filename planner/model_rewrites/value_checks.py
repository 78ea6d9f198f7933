"""Checks that look at the values of tensors, only to warn or to raise an error.

A trace has no values. In a sharded run, each such look would be a collective that no plan has, and a wait for the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.distributions import Distribution

_WARNING = "warn_if_padding_and_no_attention_mask"


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Within this context transformers does not look for padding, and nothing checks the values of its arguments."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        for check in ("_check_tensor_all", "_check_tensor_all_with"):
            stack.enter_context(mock.patch.object(torch, check))
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            stack.enter_context(mock.patch.object(modeling.PreTrainedModel, _WARNING))
        yield
