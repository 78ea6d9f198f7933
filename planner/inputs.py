"""Example inputs for a model that brings none: made from its `config`, as Hugging Face models carry one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.capture import ExampleInputs
from planner.errors import JobError, ModelError

GivenInputs = tuple[Any, ...] | Mapping[str, Any] | None
"""Arguments of one call with the global batch: positional, by keyword, or None to have them made from the config."""


def as_inputs(given: tuple[Any, ...] | Mapping[str, Any]) -> ExampleInputs:
    """Return the given arguments on the meta device, each tensor an object of its own."""
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), (args, kwargs))
    return ExampleInputs(args=args, kwargs=kwargs)


def batch_of(inputs: ExampleInputs) -> int:
    """Return the first dim of the first tensor: the global batch.

    Raises:
        ModelError: no tensor with a dim is among the inputs.
    """
    for leaf in pytree.tree_leaves((inputs.args, dict(inputs.kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise ModelError(
        "the example inputs hold no tensor with a batch dim", what_to_do="Give the inputs of one forward call."
    )


def with_batch(inputs: ExampleInputs, given: int, batch: int) -> ExampleInputs:
    """Return ``inputs`` with every first dim of ``given`` made ``batch``."""

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and tensor.shape[0] == given:
            return torch.empty((batch, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        return tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, resize, (inputs.args, dict(inputs.kwargs)))
    return ExampleInputs(args=args, kwargs=kwargs)


def with_dtype(inputs: ExampleInputs, dtype: torch.dtype | None) -> ExampleInputs:
    """Return ``inputs`` with floating-point tensors in ``dtype``."""
    if dtype is None:
        return inputs
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (inputs.args, dict(inputs.kwargs))
    )
    return ExampleInputs(args=args, kwargs=kwargs)


def inputs_for(module: nn.Module, *, batch: int | None, seq: int | None) -> ExampleInputs:
    """Return inputs for a Hugging Face model, labels included, on the meta device.

    Raises:
        ModelError: the module has no config to make inputs from.
        JobError: the batch or the sequence length is missing.
    """
    config = getattr(module, "config", None)
    name = getattr(module, "main_input_name", None)
    if config is None or name is None:
        raise ModelError(
            f"{type(module).__name__} brings no config to make inputs from",
            what_to_do="Give example_inputs: the arguments of one forward call, as a tuple or a dict.",
        )
    if batch is None:
        raise JobError("no batch is given.", what_to_do="Give the global batch, for example batch=128.", field="batch")
    if name == "pixel_values":
        return _image_inputs(config, batch)
    if seq is None:
        raise JobError("no sequence length is given.", what_to_do="Give it, for example seq=8192.", field="seq")

    def tokens() -> torch.Tensor:
        return torch.zeros(batch, seq, dtype=torch.long, device="meta")

    kwargs: dict[str, Any] = {"input_ids": tokens(), "labels": tokens()}
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = tokens()
    if getattr(config, "use_cache", None) is not None:
        kwargs["use_cache"] = False
    return ExampleInputs(args=(), kwargs=kwargs)


def _image_inputs(config: Any, batch: int) -> ExampleInputs:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    pixels = torch.zeros(batch, config.num_channels, height, width, device="meta")
    return ExampleInputs(
        args=(), kwargs={"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long, device="meta")}
    )
