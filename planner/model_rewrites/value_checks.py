"""Checks that look at the values of tensors, only to warn or to raise an error.

A trace has no values. In a sharded run, each such look would be a collective that no plan has, and a wait for the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.distributions import Distribution


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Within this context, transformers does not look for padding, and distributions do not check their arguments."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Distribution, "_validate_args", False))
        modeling = sys.modules.get("transformers.modeling_utils")
        if modeling is not None:
            model_class: Any = modeling.PreTrainedModel
            stack.enter_context(mock.patch.object(model_class, "warn_if_padding_and_no_attention_mask"))
        yield
