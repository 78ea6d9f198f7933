"""Model types that people use and that carry no tensor-parallel plan, and the inputs of one training call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

POPULAR: tuple[str, ...] = (
    # encoders
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "electra",
    "deberta-v2",
    "mpnet",
    "xlm-roberta",
    "xlnet",
    "modernbert",
    "layoutlm",
    "longformer",
    "big_bird",
    "roformer",
    # decoders
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "gpt_neo",
    "mpt",
    "gpt_bigcode",
    "rwkv",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    # encoder-decoders
    "t5",
    "mt5",
    "bart",
    "pegasus",
    "m2m_100",
    "marian",
    "led",
    # speech
    "whisper",
    "wav2vec2",
    "hubert",
    "wavlm",
    "speech_to_text",
    "audio-spectrogram-transformer",
    # vision
    "vit",
    "deit",
    "beit",
    "swin",
    "convnext",
    "resnet",
    "dinov2",
    "segformer",
    "mobilenet_v2",
    # detection
    "detr",
    "yolos",
    # images with text
    "clip",
    "siglip",
    "blip",
    "llava",
    "qwen2_5_vl",
    "paligemma",
    "idefics3",
    "mllama",
    "gemma3",
    "vilt",
    "git",
)
"""Model types that carry no tensor-parallel plan, by kind."""

LENGTH = 32
"""Tokens of a text."""

SIDE = 32
"""Pixels of an image's side."""

IMAGE_TOKENS: Mapping[str, int] = {
    "llava": 16,
    "paligemma": 16,
    "idefics3": 4,
    "mllama": 1,
    "gemma3": 4,
    "llama4": 4,
    "muse_spark": 4,
}
"""model_type -> tokens that stand for one image in the text, where no table of sizes says it.

Other types with an image token get text alone.
"""


def inputs_of(model: PreTrainedModel, batch: int = 8) -> dict[str, Any]:
    """Return the keyword arguments of one training call of a small ``model``: tensors, and the flags beside them.

    The call returns a loss where the class takes labels that are a tensor; a detector's are lists of boxes, so that
    its call returns none.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name if model.main_input_name in takes else next(iter(takes))
    inputs: dict[str, Any] = {}
    if main == "input_ids" or ("input_ids" in takes and "pixel_values" in takes):
        inputs["input_ids"] = _tokens(model, (batch, LENGTH))
    if main in {"inputs_embeds", "hidden_states", "noise_embeds"}:
        inputs[main] = torch.randn(batch, LENGTH, config.hidden_size)
    elif main == "input_values":
        inputs[main] = torch.randn(batch, 4000)
    elif main == "input_features":
        inputs[main] = torch.randn(batch, 2 * LENGTH, getattr(config, "input_feat_per_channel", LENGTH))
    if "pixel_values" in takes and _sees(model):
        inputs.update(_image(model, batch, takes))
    if main == "hidden_states" and "grid_thw" in takes:
        patches = _image(model, batch, takes)
        inputs |= {main: patches["pixel_values"], "grid_thw": patches["grid_thw"]}
    if "bbox" in takes:
        corners = torch.randint(0, 100, (batch, LENGTH, 2))
        inputs["bbox"] = torch.cat([corners, corners + 20], -1)
    if config.model_type in EXCEPTIONS:
        inputs |= EXCEPTIONS[config.model_type](model, batch)
        inputs = {name: value for name, value in inputs.items() if value is not None}
    inputs.update(_flags(model, takes))
    labels = _labels(model, batch, inputs) if "labels" in takes else None
    return inputs if labels is None else {**inputs, "labels": labels}


def _sees(model: PreTrainedModel) -> bool:
    """Return whether ``model`` is given images: always, unless it needs image tokens of a number we do not know."""
    config = model.config
    marks = any(getattr(config, f"image_token_{kind}", None) is not None for kind in ("id", "index"))
    return not marks or _image_tokens(model) is not None


def _image_tokens(model: PreTrainedModel) -> int | None:
    """Return how many tokens stand for one image in the text of ``model``; None: we do not know."""
    config = model.config
    vision = getattr(config, "vision_config", None)
    merged = getattr(vision, "spatial_merge_size", None)
    if merged and "image_grid_thw" in inspect.signature(model.forward).parameters:
        return (SIDE // vision.patch_size // merged) ** 2
    return IMAGE_TOKENS.get(config.model_type)


def _tokens(model: PreTrainedModel, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random token ids of the vocabulary, without the first ones and the last ones, which are special."""
    return torch.randint(3, min(200, model.config.get_text_config().vocab_size), shape)


def _image(model: PreTrainedModel, batch: int, takes: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return one image per sample in the shape that ``model`` takes, and the tokens that stand for it."""
    config = model.config
    inputs: dict[str, Any] = {"pixel_values": torch.randn(batch, 3, SIDE, SIDE)}
    grid = next((name for name in ("image_grid_thw", "grid_thw") if name in takes), None)
    if grid:
        vision = getattr(config, "vision_config", config)
        frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        patches = SIDE // vision.patch_size
        inputs["pixel_values"] = torch.randn(batch * patches**2, 3 * frames * vision.patch_size**2)
        inputs[grid] = torch.tensor([[1, patches, patches]] * batch)
    count = _image_tokens(model)
    if count is not None:
        mark = getattr(config, "image_token_id", None) or config.image_token_index
        tokens = _tokens(model, (batch, LENGTH))
        tokens[tokens == mark] += 1
        tokens[:, 1 : 1 + count] = mark
        inputs["input_ids"] = tokens
        if "mm_token_type_ids" in takes:
            inputs["mm_token_type_ids"] = (tokens == mark).int()
        if "token_type_ids" in takes:
            inputs["token_type_ids"] = (tokens == mark).int()
    return inputs


def _flags(model: PreTrainedModel, takes: Mapping[str, inspect.Parameter]) -> dict[str, bool]:
    """Return the arguments that are no tensors: no cache, and a contrastive loss where there is one."""
    flags = {}
    keywords = "use_cache" in takes or any(item.kind is item.VAR_KEYWORD for item in takes.values())
    if keywords and hasattr(model.config.get_text_config(), "use_cache"):
        flags["use_cache"] = False
    if "return_loss" in takes:
        flags["return_loss"] = True
    return flags


def _labels(model: PreTrainedModel, batch: int, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the labels of the head of ``model``, or None where they are no tensor."""
    head, count = type(model).__name__, model.config.num_labels
    if "Detection" in head:
        return None
    if head.endswith("ForCTC"):
        return _tokens(model, (batch, 4))
    if head.endswith("QuestionAnswering"):
        return torch.rand(batch, count)
    if head.endswith("Segmentation"):
        return torch.randint(0, count, (batch, SIDE, SIDE))
    if head.endswith("Classification"):
        return torch.randint(0, count, (batch,))
    text = inputs.get("input_ids", inputs.get("inputs_embeds"))
    return _tokens(model, (batch, LENGTH) if text is None else tuple(text.shape[:2]))


def _whisper(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    config = model.config
    return {"input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)}


def _spectrogram(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch, model.config.max_length, model.config.num_mel_bins)}


def _idefics3(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 1, 3, SIDE, SIDE)}


def _mllama(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    tiles = model.config.vision_config.max_num_tiles
    return {
        "pixel_values": torch.randn(batch, 1, tiles, 3, SIDE, SIDE),
        "aspect_ratio_ids": torch.full((batch, 1), 2),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, LENGTH, 1, tiles, dtype=torch.long),
    }


def _gemma4_vision(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    patch = model.config.patch_size
    places = torch.cartesian_prod(torch.arange(SIDE // patch), torch.arange(SIDE // patch)).flip(-1)
    return {
        "pixel_values": torch.rand(batch, len(places), 3 * patch**2),
        "pixel_position_ids": places.expand(batch, -1, -1).contiguous(),
    }


def _code_predictor(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    embeds = torch.randn(batch, model.config.num_code_groups, model.config.hidden_size)
    return {"input_ids": None, "inputs_embeds": embeds}


def _embeds(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    return {"input_ids": None, "inputs_embeds": torch.randn(batch, LENGTH, model.config.hidden_size)}


def _assistant(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "noise_embeds": torch.randn(batch, config.block_size, config.hidden_size),
        "context_hidden_states": torch.randn(batch, LENGTH, config.hidden_size * len(config.target_layer_ids)),
    }


def _decoder(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    return {"encoder_hidden_states": torch.randn(batch, LENGTH, model.config.hidden_size)}


def _ocr2_encoder(model: PreTrainedModel, batch: int) -> dict[str, Any]:
    return {"num_patches": torch.tensor(LENGTH // 2)}


EXCEPTIONS: Mapping[str, Callable[[PreTrainedModel, int], dict[str, Any]]] = {
    "whisper": _whisper,
    "audio-spectrogram-transformer": _spectrogram,
    "idefics3": _idefics3,
    "mllama": _mllama,
    "gemma4_vision": _gemma4_vision,
    "qwen3_omni_moe_talker_code_predictor": _code_predictor,
    "qwen3_omni_moe_talker_text": _embeds,
    "muse_glimmer_assistant": _assistant,
    "t5gemma2_decoder": _decoder,
    "deepseek_ocr2_encoder": _ocr2_encoder,
}
"""model_type -> the inputs that no rule gives, set over those of the rules; None takes an input away."""
