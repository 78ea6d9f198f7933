"""Example inputs of a model, on the meta device: the caller's, or inputs made from the Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import JobError, ModelError
from planner.graph.capture import ExampleInputs
from planner.graph.layer_caches.kept import undecoded_layers
from planner.model_rewrites.cache_argument import cache_argument, has_own_cache, is_encoder_decoder
from planner.model_rewrites.image_sizes.tables import (
    check_alike,
    check_known,
    inputs_on_meta,
    sample_dim,
    samples_of,
    size_tables,
    with_samples,
)
from planner.model_rewrites.tree_paths import look_into_dataclasses, tensors_by_path, tensors_in
from planner.plan.job_spec import JobPhase

DEFAULT_IMAGE_SIZE = 224
"""Height and width of images in pixels where no config says them, as for ResNet: most are trained on this size."""

_MOST_PIXELS = 65_536
"""Height and width that no image exceeds (the longest side that JPEG can say)."""

GivenInputs = tuple[Any, ...] | Mapping[str, Any] | None
"""Arguments of one call with the global batch: positional, by keyword, or None to make them from the config."""


def meta_inputs(arguments: tuple[Any, ...] | Mapping[str, Any]) -> ExampleInputs:
    """Return ``arguments`` on the meta device; a tensor that occurs twice becomes two tensors.

    Raises:
        JobError: ``arguments`` are neither a sequence nor a mapping, or samples have images of other sizes.
    """
    if not isinstance(arguments, (tuple, list, Mapping)):
        raise JobError(
            f"example_inputs is a {type(arguments).__name__}.",
            what_to_do="Give a tuple of arguments, such as (tensor,), or a dict of keyword arguments.",
            field="example_inputs",
        )
    args, kwargs = ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    look_into_dataclasses(args, kwargs)
    check_known(kwargs)
    given = tensors_by_path(args, kwargs)
    tables = size_tables(given.values())
    if tables:
        names = {id(tensor): path for path, tensor in given.items()}
        check_alike(tables, samples_of(list(given.values()), tables), names)
    args, kwargs = inputs_on_meta((args, kwargs))
    return ExampleInputs(args=args, kwargs=kwargs)


def batch_size_of(inputs: ExampleInputs) -> int:
    """Return the global batch size: the first dim of the first input tensor that has one, and is no row of patches.

    Raises:
        ModelError: no tensor of the inputs has a dim.
    """
    tensors = [tensor for tensor in tensors_in((inputs.args, dict(inputs.kwargs))) if tensor.ndim]
    if tables := size_tables(tensors):
        return samples_of(tensors, tables)
    if tensors:
        return len(tensors[0])
    raise ModelError(
        "the example inputs have no tensor with a batch dim.", what_to_do="Give the arguments of one forward call."
    )


def with_batch(inputs: ExampleInputs, current_batch: int, batch: int, *, in_later_dims: bool = False) -> ExampleInputs:
    """Return ``inputs`` at another batch: every first dim of size ``current_batch`` becomes ``batch``.

    With a table of the sizes of images, each sample has as many as before, of the same sizes.

    Args:
        in_later_dims: whether, in a tensor whose first dim has another size, the only dim of this size does so too, as
            in the initial state [layers, batch, width] of a recurrent layer.
    """

    tensors = tensors_in((inputs.args, dict(inputs.kwargs)))
    tables = size_tables(tensors)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if tables:
            dim = sample_dim(tensor, tables, tensors, current_batch)
            return tensor if dim is None else with_samples(tensor, dim, current_batch, batch)
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

    Training inputs include labels, if the model takes them as a tensor. Prefill inputs ask for the logits of the last
    token only, if the model allows it. Decoding inputs have one token per sequence; the KV cache is not among them. An
    encoder-decoder also gets its encoder's inputs, from which a run fills the cache.
    Images have the size in the config, or `DEFAULT_IMAGE_SIZE`. A model whose images are tokens among those of the text
    (LLaVA) gets text alone: how many tokens an image takes is in no config.

    Args:
        module: the model.
        batch: samples in the global batch.
        seq: tokens per sequence, or samples of sound; not used where `takes_sequences` is False.
        phase: the phase that the arguments are for.

    Raises:
        ModelError: the module has no config, or inputs that cannot be made from it.
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
    if seq is None and takes_sequences(module, config):
        raise JobError("no sequence length is given.", what_to_do="Give it, for example seq=8192.", field="seq")
    takes = signature(module.forward).parameters

    length = 1 if phase == "decode" and not is_encoder_decoder(module) else seq or 1

    def tokens(length: int = length) -> torch.Tensor:
        return torch.zeros(batch, length, dtype=torch.long, device="meta")

    kwargs: dict[str, Any] = {}
    if name == "input_ids" or (name == "pixel_values" and "input_ids" in takes):
        kwargs["input_ids"] = tokens()
    if "pixel_values" in takes and not has_image_tokens(config):
        kwargs["pixel_values"] = torch.zeros(batch, *image_shape(config), device="meta")
    if name not in kwargs and name != "pixel_values":
        kwargs[name] = torch.zeros(batch, *_sound_shape(module, name, config, seq), device="meta")
    if phase == "training":
        kwargs.update(_labels(module, takes, kwargs, tokens()))
    if is_encoder_decoder(module):
        kwargs["decoder_input_ids"] = tokens(1) if phase == "decode" else tokens()
    if _takes_use_cache(config, takes):
        kwargs["use_cache"] = False
    if phase == "prefill" and "logits_to_keep" in takes:
        kwargs["logits_to_keep"] = 1
    return ExampleInputs(args=(), kwargs=kwargs)


def takes_sequences(model: nn.Module | type[nn.Module], config: Any) -> bool:
    """Return whether the inputs of a Hugging Face model, or of its class, have a length: tokens, or samples of sound.

    Images and spectrograms have the size in the config.
    """
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        return not {"input_ids", "decoder_input_ids"}.isdisjoint(signature(model.forward).parameters)
    return not (name == "input_values" and _is_spectrogram(config))


def has_image_size(config: Any) -> bool:
    """Return whether a Hugging Face config says the size of images."""
    return any(getattr(part, "image_size", None) is not None for part in vision_configs(config))


def image_shape(config: Any) -> tuple[int, ...]:
    """Return (channels, height, width) of the images of a model by its Hugging Face config; of videos, frames first.

    Raises:
        ModelError: the config has a size that is none.
    """
    size = _of_first(config, "image_size", DEFAULT_IMAGE_SIZE)
    sides = [size.get("height"), size.get("width")] if isinstance(size, Mapping) else size
    sides = list(sides) if isinstance(sides, list | tuple) else [sides]
    sides = sides * 2 if len(sides) == 1 else sides
    channels, frames = _of_first(config, "num_channels", 3), _of_first(config, "num_frames", None)
    shape = (*(() if frames is None else (frames,)), channels, *sides)
    if len(sides) != 2 or not all(type(dim) is int and 0 < dim <= _MOST_PIXELS for dim in shape):
        raise ModelError(
            f"the config of the model describes no images: image_size {size!r}, num_channels {channels!r}"
            + ("." if frames is None else f", num_frames {frames!r}."),
            what_to_do="Give image_size in pixels, as one number or as [height, width].",
        )
    return shape


def _of_first(config: Any, name: str, default: Any) -> Any:
    """Return a value of the first config that has it, of those that may describe images."""
    values = (getattr(part, name, None) for part in vision_configs(config))
    return next((value for value in values if value is not None), default)


def vision_configs(config: Any) -> list[Any]:
    """Return the configs that may describe images: that of the model, and those of its parts that see."""
    nested = [getattr(config, name, None) for name in ("vision_config", "backbone_config", "encoder")]
    return [config, *(part for part in nested if hasattr(part, "image_size") or hasattr(part, "num_channels"))]


def has_image_tokens(config: Any) -> bool:
    """Return whether images are tokens among those of a text, by a Hugging Face config."""
    return any(getattr(config, f"image_token_{kind}", None) is not None for kind in ("id", "index"))


def _is_spectrogram(config: Any) -> bool:
    return getattr(config, "num_mel_bins", None) is not None and getattr(config, "max_length", None) is not None


def _sound_shape(module: nn.Module, name: str, config: Any, seq: int | None) -> tuple[int, ...]:
    """Return the shape of one sample of the input ``name``, of a model that hears.

    Raises:
        ModelError: the shape is not known.
    """
    frames, mel_bins = getattr(config, "max_source_positions", None), getattr(config, "num_mel_bins", None)
    if name == "input_values" and mel_bins is not None and _is_spectrogram(config):
        return config.max_length, mel_bins
    if name == "input_values" and seq is not None:
        return (seq,)
    if name == "input_features" and frames and mel_bins:
        return mel_bins, 2 * frames  # the encoder's second convolution has a stride of 2
    if name == "input_features" and frames and getattr(config, "input_feat_per_channel", None):
        return frames, config.input_feat_per_channel
    raise ModelError(
        f"the config of {type(module).__name__} does not say the shape of its input {name!r}.",
        what_to_do="Give example_inputs: the arguments of one forward call, as a tuple or a dict.",
    )


def _labels(
    module: nn.Module, takes: Mapping[str, Any], inputs: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> dict[str, Any]:
    """Return the arguments from which a model computes its loss.

    None where labels are lists (of boxes): the loop then has the loss.
    """
    head, batch = type(module).__name__, len(tokens)

    def classes(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device="meta")

    if "start_positions" in takes:
        return {"start_positions": classes(), "end_positions": classes()}
    if "labels" not in takes:
        return {"return_loss": True} if "return_loss" in takes else {}
    count = getattr(module.config, "num_labels", None)
    if "Detection" in head:
        return {}
    if head.endswith("ForCTC"):
        sound = inputs[str(module.main_input_name)]
        return {
            "labels": classes(max(1, sound.shape[1] // (_SOUND_PER_LABEL if sound.dim() == 2 else _FRAMES_PER_LABEL)))
        }
    if head.endswith("QuestionAnswering"):
        return {"labels": classes(count or 1, dtype=torch.float32)}
    if head.endswith("Segmentation"):
        return {"labels": classes(*inputs["pixel_values"].shape[-2:])}
    if head.endswith(("Classification", "NextSentencePrediction")) and not head.endswith("TokenClassification"):
        return {"labels": classes(dtype=torch.float32 if count == 1 else torch.long)}
    return {"labels": tokens}


_SOUND_PER_LABEL, _FRAMES_PER_LABEL = 1280, 8
"""Samples of sound at 16 kHz, and frames of 10 ms, for one letter: 150 words of five letters are spoken in a minute."""


def _takes_use_cache(config: Any, takes: Mapping[str, Parameter]) -> bool:
    """Return whether a model may be told to keep no cache."""
    is_accepted = "use_cache" in takes or any(item.kind is item.VAR_KEYWORD for item in takes.values())
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return is_accepted and getattr(text, "use_cache", getattr(config, "use_cache", None)) is not None


def has_kv_cache(module: nn.Module) -> bool:
    """Return whether ``module`` is a Hugging Face decoder, whose cache holds keys and values, latents or states."""
    config = getattr(module, "config", None)
    return config is not None and not is_encoder_decoder(module) and cache_argument(module) is not None


def keeps_prompt(module: nn.Module) -> bool:
    """Return whether ``module`` keeps keys and values, or states, of a prompt, as decoders do."""
    encodes = is_encoder_decoder(module) and cache_argument(module) is not None
    return encodes or has_kv_cache(module)


def check_can_decode(module: nn.Module) -> None:
    """Check that decoding with ``module`` can be planned.

    Raises:
        JobError: the module is no decoder with a KV cache, or its decoding takes other paths than its forward.
    """
    name = type(module).__name__
    takes = signature(module.forward).parameters
    encodes = is_encoder_decoder(module) and {"encoder_outputs", "decoder_input_ids"} <= set(takes)
    if cache_argument(module) is None or not (has_kv_cache(module) or encodes):
        raise _cannot_decode(f"{name} cannot decode: it is no Hugging Face decoder with a KV cache.")
    if has_own_cache(module):
        raise own_cache(module)
    kinds = undecoded_layers(module)
    if kinds:
        raise _cannot_decode(
            f"decoding with sparse attention cannot be planned yet: in a step, that of {name} runs other ops than in "
            f"its forward (transformers caches it as {', '.join(kinds)})."
        )


def own_cache(module: nn.Module) -> JobError:
    """Return the error for a model that keeps states elsewhere than in transformers' usual cache."""
    name = type(module).__name__
    return _cannot_decode(
        f"decoding with {name} cannot be planned yet: it has a cache of its own, not transformers' usual one."
    )


def _cannot_decode(detail: str) -> JobError:
    advice = 'Plan its forward pass (phase="prefill"), or name a causal language model.'
    return JobError(detail, what_to_do=advice, field="phase")
