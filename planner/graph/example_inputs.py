"""Example inputs of a model, on the meta device: the caller's, or inputs made from the Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import JobError, ModelError
from planner.graph.capture import ExampleInputs
from planner.graph.layer_caches import undecoded_layers
from planner.model_rewrites.cache_argument import cache_argument
from planner.model_rewrites.tree_paths import look_into_dataclasses
from planner.plan.job_spec import JobPhase

GivenInputs = tuple[Any, ...] | Mapping[str, Any] | None
"""Arguments of one call with the global batch: positional, by keyword, or None to make them from the config."""


def meta_inputs(arguments: tuple[Any, ...] | Mapping[str, Any]) -> ExampleInputs:
    """Return ``arguments`` on the meta device; a tensor that occurs twice becomes two tensors."""
    args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    look_into_dataclasses(args, kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), (args, kwargs))
    return ExampleInputs(args=args, kwargs=kwargs)


def batch_size_of(inputs: ExampleInputs) -> int:
    """Return the global batch size: the first dim of the first input tensor that is not a scalar.

    Raises:
        ModelError: no tensor of the inputs has a dim.
    """
    for leaf in pytree.tree_leaves((inputs.args, dict(inputs.kwargs))):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise ModelError(
        "the example inputs have no tensor with a batch dim.", what_to_do="Give the arguments of one forward call."
    )


def with_batch(inputs: ExampleInputs, current_batch: int, batch: int, *, in_later_dims: bool = False) -> ExampleInputs:
    """Return ``inputs`` at another batch: every first dim of size ``current_batch`` becomes ``batch``.

    Args:
        in_later_dims: whether, in a tensor whose first dim has another size, the only dim of this size does so too, as
            in the initial state [layers, batch, width] of a recurrent layer.
    """

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim, size in enumerate(tensor.shape) if size == current_batch]
        if dims[:1] == [0] or (in_later_dims and len(dims) == 1):
            shape = (*tensor.shape[: dims[0]], batch, *tensor.shape[dims[0] + 1 :])
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor

    args, kwargs = pytree.tree_map_only(torch.Tensor, resize, (inputs.args, dict(inputs.kwargs)))
    return ExampleInputs(args=args, kwargs=kwargs)


def with_dtype(inputs: ExampleInputs, dtype: torch.dtype | None) -> ExampleInputs:
    """Return ``inputs`` with floating-point tensors in ``dtype``; None changes nothing."""
    if dtype is None:
        return inputs
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (inputs.args, dict(inputs.kwargs))
    )
    return ExampleInputs(args=args, kwargs=kwargs)


def inputs_from_config(
    module: nn.Module, *, batch: int | None, seq: int | None, phase: JobPhase = "training"
) -> ExampleInputs:
    """Return the arguments of a Hugging Face model, on the meta device.

    Training inputs include labels. Prefill inputs ask for the logits of the last token only, if the model allows it.
    Decoding inputs have one token per sequence; the KV cache is not among them.

    Args:
        module: the model.
        batch: samples in the global batch.
        seq: tokens per sequence; image models do not use it.
        phase: the phase that the arguments are for.

    Raises:
        ModelError: the module has no config.
        JobError: the batch or the sequence length is missing, or the module cannot decode.
    """
    config = getattr(module, "config", None)
    name = getattr(module, "main_input_name", None)
    if config is None or name is None:
        raise ModelError(
            f"{type(module).__name__} has no config that describes its inputs.",
            what_to_do="Give example_inputs: the arguments of one forward call, as a tuple or a dict.",
        )
    if phase == "decode":
        check_can_decode(module)
    if batch is None:
        raise JobError("no batch is given.", what_to_do="Give the global batch, for example batch=128.", field="batch")
    if name == "pixel_values":
        return _image_inputs(config, batch, labels=phase == "training")
    if seq is None:
        raise JobError("no sequence length is given.", what_to_do="Give it, for example seq=8192.", field="seq")

    def tokens() -> torch.Tensor:
        return torch.zeros(batch, 1 if phase == "decode" else seq, dtype=torch.long, device="meta")

    kwargs: dict[str, Any] = {"input_ids": tokens()}
    if phase == "training":
        kwargs["labels"] = tokens()
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = tokens()
    if getattr(config, "use_cache", None) is not None:
        kwargs["use_cache"] = False
    if phase == "prefill" and "logits_to_keep" in signature(module.forward).parameters:
        kwargs["logits_to_keep"] = 1
    return ExampleInputs(args=(), kwargs=kwargs)


def has_kv_cache(module: nn.Module) -> bool:
    """Return whether ``module`` is a Hugging Face decoder, whose cache holds keys and values, latents or states."""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    return cache_argument(module) is not None


def check_can_decode(module: nn.Module) -> None:
    """Check that decoding with ``module`` can be planned.

    Raises:
        JobError: the module is no decoder with a KV cache, or its decoding takes other paths than its forward.
    """
    name = type(module).__name__
    if has_kv_cache(module):
        kinds = undecoded_layers(module)
        if not kinds:
            return
        detail = (
            f"decoding with recurrent layers or sparse attention cannot be planned yet: in a step, those of {name} run "
            f"other ops than in its forward (transformers caches them as {', '.join(kinds)})."
        )
    elif getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        detail = (
            f"decoding with an encoder-decoder cannot be planned yet: {name} caches keys and values of its encoder."
        )
    else:
        detail = f"{name} cannot decode: it is no Hugging Face decoder with a KV cache."
    advice = 'Plan its forward pass (phase="prefill"), or name a causal language model.'
    raise JobError(detail, what_to_do=advice, field="phase")


def _image_inputs(config: Any, batch: int, *, labels: bool) -> ExampleInputs:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    pixels = torch.zeros(batch, config.num_channels, height, width, device="meta")
    classes = {"labels": torch.zeros(batch, dtype=torch.long, device="meta")} if labels else {}
    return ExampleInputs(args=(), kwargs={"pixel_values": pixels, **classes})
