"""Position ids of models with several kinds of them (M-RoPE), which read the values of a whole batch in Python.

transformers' models make them in their forward if they are not given. In a sharded run, the forward has no values of
whole batches; a trace has none at all. So they are made before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from planner.errors import JobError
from planner.model_rewrites.image_sizes.tables import size_tables
from planner.model_rewrites.image_sizes.values import on_meta, values_of
from planner.model_rewrites.tree_paths import tensors_in

POSITION_IDS = "position_ids"
_METHOD = "compute_3d_position_ids"
_NEEDED = ("input_ids", "mm_token_type_ids")


def with_position_ids(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call of ``module``, with its position ids if it would make them itself.

    That is a call with images, of a model of transformers with a method for it. They are on the device of the inputs.

    Raises:
        JobError: the model refuses the inputs.
    """
    kwargs = dict(kwargs)
    takes = signature(module.forward).parameters
    given = {**dict(zip(takes, args, strict=False)), **kwargs}
    if POSITION_IDS not in takes or given.get(POSITION_IDS) is not None or not size_tables(tensors_in(given)):
        return kwargs
    part: Any = next((each for each in module.modules() if callable(getattr(each, _METHOD, None))), None)
    if part is None:
        return kwargs
    method = getattr(part, _METHOD)
    arguments = {name: given.get(name) for name in signature(method).parameters}
    read = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    values = {name: value if not value.is_meta else values_of(value) for name, value in read.items()}
    if any(value is None for value in values.values()) or not set(_NEEDED) <= values.keys():
        return kwargs
    is_on_meta = any(value.is_meta for value in read.values())
    before = getattr(part, "rope_deltas", None)
    try:
        ids = method(**{**arguments, **values})
    except (IndexError, RuntimeError, StopIteration, ValueError) as error:
        reason = str(error) or "there are fewer images"
        raise JobError(
            f"{type(part).__name__} cannot make position_ids of these inputs: {reason}.",
            what_to_do="Check that each image has as many tokens as its sizes say, or give position_ids.",
            field="example_inputs",
        ) from error
    if is_on_meta:
        part.rope_deltas = before  # a trace leaves the module as it was
    return kwargs if ids is None else {**kwargs, POSITION_IDS: on_meta(ids) if is_on_meta else ids}
