"""Inputs made from Hugging Face configs: models of text, images and sound run on them, and compute a loss."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from api.requests.model_registry import load_model
from planner.errors import JobError, ModelError
from planner.graph.example_inputs import image_shape, inputs_from_config, takes_sequences

BATCH, SEQ = 2, 16
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
SIGHT = {**TEXT, "image_size": 32, "patch_size": 8}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 99,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHISPER = {**SPEECH, "max_source_positions": 24, "num_mel_bins": 8}
WAVES = {**TEXT, "conv_dim": (32,), "conv_kernel": (10,), "conv_stride": (5,), "num_feat_extract_layers": 1}
CLIP = {"text_config": TEXT, "vision_config": SIGHT, "projection_dim": 16}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [8, 16],
    "sr_ratios": [2, 1],
    "num_attention_heads": [1, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}

CASES: Mapping[str, tuple[type[nn.Module], dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "class of a text": (hf.BertForSequenceClassification, TEXT, {"labels": (BATCH,)}),
    "one figure for a text": (hf.BertForSequenceClassification, {**TEXT, "num_labels": 1}, {"labels": (BATCH,)}),
    "class of each token": (hf.BertForTokenClassification, TEXT, {"labels": (BATCH, SEQ)}),
    "ends of an answer": (hf.BertForQuestionAnswering, TEXT, {"start_positions": (BATCH,), "end_positions": (BATCH,)}),
    "text": (hf.LlamaForCausalLM, TEXT, {"input_ids": (BATCH, SEQ), "labels": (BATCH, SEQ)}),
    "class of an image": (
        hf.ViTForImageClassification,
        SIGHT,
        {"pixel_values": (BATCH, 3, 32, 32), "labels": (BATCH,)},
    ),
    "no size of images": (hf.ResNetForImageClassification, RESNET, {"pixel_values": (BATCH, 3, 224, 224)}),
    "image with text": (hf.CLIPModel, CLIP, {"pixel_values": (BATCH, 3, 32, 32), "input_ids": (BATCH, SEQ)}),
    "class of a video": (
        hf.VideoMAEForVideoClassification,
        {**SIGHT, "num_frames": 4},
        {"pixel_values": (BATCH, 4, 3, 32, 32), "labels": (BATCH,)},
    ),
    "patches left out": (
        hf.ViTMAEForPreTraining,
        {**SIGHT, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
        {"pixel_values": (BATCH, 3, 32, 32)},
    ),
    "class of each pixel": (hf.SegformerForSemanticSegmentation, SEGFORMER, {"labels": (BATCH, 224, 224)}),
    "speech to text": (hf.WhisperForConditionalGeneration, WHISPER, {"input_features": (BATCH, 8, 48)}),
    "speech to text, older": (
        hf.Speech2TextForConditionalGeneration,
        {**SPEECH, "max_source_positions": 48, "input_feat_per_channel": 8, "conv_channels": 16},
        {"input_features": (BATCH, 48, 8)},
    ),
    "class of a sound": (
        hf.ASTForAudioClassification,
        {**TEXT, "max_length": 32, "num_mel_bins": 16},
        {"input_values": (BATCH, 32, 16), "labels": (BATCH,)},
    ),
}


def model_of(cls: Any, values: dict[str, Any]) -> nn.Module:
    model: nn.Module = cls(cls.config_class(**values))
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_its_loss_on_them(name: str) -> None:
    cls, values, shapes = CASES[name]
    module = model_of(cls, values)
    seq = SEQ if takes_sequences(module, module.config) else None
    inputs = dict(inputs_from_config(module, batch=BATCH, seq=seq).kwargs)
    assert {key: tuple(inputs[key].shape) for key in shapes} == shapes
    real = {
        key: torch.zeros_like(item, device="cpu") if torch.is_tensor(item) else item for key, item in inputs.items()
    }
    assert module(**real).loss.dim() == 0


@pytest.mark.parametrize(
    ("cls", "values", "seq"),
    [
        (hf.BertModel, TEXT, SEQ),
        (hf.YolosForObjectDetection, {**SIGHT, "image_size": [32, 48], "num_detection_tokens": 4}, None),
    ],
    ids=["none are taken", "lists of boxes"],
)
def test_labels_that_cannot_be_split_with_the_batch_are_left_out(
    cls: Any, values: dict[str, Any], seq: int | None
) -> None:
    module = model_of(cls, values)
    inputs = inputs_from_config(module, batch=BATCH, seq=seq).kwargs
    assert "labels" not in inputs
    module.to("meta")(**inputs)


def test_ctc_has_a_label_for_each_letter_that_is_spoken() -> None:
    module = model_of(hf.Wav2Vec2ForCTC, WAVES)
    inputs = inputs_from_config(module, batch=BATCH, seq=16_000).kwargs
    assert inputs["labels"].shape == (BATCH, 12)


def test_text_of_an_image_has_a_length_and_the_image_the_size_of_its_encoder() -> None:
    decoder = hf.TrOCRConfig(d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, vocab_size=99)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**SIGHT), decoder)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    module = hf.VisionEncoderDecoderModel(config).to("meta")
    assert takes_sequences(module, config)
    inputs = inputs_from_config(module, batch=BATCH, seq=SEQ).kwargs
    shapes = {name: tuple(inputs[name].shape) for name in ("pixel_values", "labels", "decoder_input_ids")}
    assert shapes == {
        "pixel_values": (BATCH, 3, 32, 32),
        "labels": (BATCH, SEQ),
        "decoder_input_ids": (BATCH, SEQ),
    }
    assert module(**inputs).loss.dim() == 0


def test_images_that_are_tokens_are_left_out() -> None:
    config = hf.LlavaConfig(text_config=hf.LlamaConfig(**TEXT), vision_config=hf.CLIPVisionConfig(**SIGHT))
    with torch.device("meta"):
        module = hf.LlavaForConditionalGeneration(config)
    assert set(inputs_from_config(module, batch=BATCH, seq=SEQ).kwargs) == {"input_ids", "labels", "use_cache"}


def test_sizes_of_images_as_configs_have_them() -> None:
    assert image_shape(SimpleNamespace(image_size={"height": 32, "width": 48}, num_channels=1)) == (1, 32, 48)
    assert image_shape(hf.ViTConfig(image_size=[32, 48])) == (3, 32, 48)
    assert image_shape(hf.ResNetConfig(image_size=96)) == (3, 96, 96)


@pytest.mark.parametrize("size", ["x", -3, 0, 10**12, [], [1, 2, 3], 2.5, True, {"height": 32}, {"a": 1}], ids=repr)
def test_what_is_no_size_of_images_is_an_error(size: Any) -> None:
    module = model_of(hf.ResNetForImageClassification, RESNET)
    module.config.image_size = size  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="describes no images: image_size"):
        inputs_from_config(module, batch=BATCH, seq=None)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"model_type": "resnet", **RESNET}, "images of 224 x 224 pixels are assumed"),
        ({"model_type": "resnet", **RESNET, "image_size": 96}, None),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], **WAVES}, "12 letters a second"),
        ({"model_type": "clip", "architectures": ["CLIPModel"], **CLIP}, None),
    ],
)
def test_what_is_assumed_of_inputs_is_noted(values: dict[str, Any], note: str | None) -> None:
    source = load_model({"hf_config": values}, batch=BATCH)
    assert not source.notes if note is None else note in " ".join(source.notes)
    if "architectures" in values:
        assert type(source.module).__name__ == values["architectures"][0]


def test_what_no_config_says_is_asked_for() -> None:
    module = model_of(hf.Wav2Vec2ForCTC, WAVES)
    with pytest.raises(JobError, match="no sequence length is given"):
        inputs_from_config(module, batch=BATCH, seq=None)
    module.main_input_name = "input_features"  # type: ignore[assignment]
    with pytest.raises(ModelError, match="does not say the shape of its input 'input_features'"):
        inputs_from_config(module, batch=BATCH, seq=SEQ)
