"""Checkpoints in 4 and 8 bits, as GPT-OSS and DeepSeek-V3 are published: read in slices, as transformers does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.small_models import EIGHT_HEADS
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from executor import load_weights, save_weights
from executor.weights.lazy_tensors import in_memory
from executor.weights.quantized import Fp8Tensor, Mxfp4Tensor
from planner.errors import WeightsError

CONFIG = {**EIGHT_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16}
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(experts: int, out: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out)
    blocks = torch.randint(0, 256, (experts, out, groups, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 124, (experts, out, groups), dtype=torch.uint8, generator=generator)


def model_on_meta(**fields: object) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**CONFIG, **fields))
    return model


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder as GPT-OSS is published in."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**CONFIG))
    model.save_pretrained(tmp_path / "published")
    file = tmp_path / "published" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(experts, out, width // 32)
    save_file(tensors, file)
    config = tmp_path / "published" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": QUANTIZED}))
    return tmp_path / "published"


@pytest.mark.parametrize(
    "indices",
    [(range(3), range(64), range(6)), ([2], range(32, 64), range(6)), (range(3), [5, 33, 34], [4, 1]), ([], [1], [2])],
    ids=["whole", "one expert", "some", "none"],
)
def test_values_are_those_of_transformers(indices: tuple[range | list[int], ...]) -> None:
    blocks, scales = packed(3, 6, 2)
    expected = convert_moe_packed_tensors(blocks, scales)
    tensor = Mxfp4Tensor(in_memory(blocks), in_memory(scales)).prepared()
    assert tensor.shape == expected.shape
    at = tuple(torch.tensor(list(along), dtype=torch.long) for along in indices)
    assert torch.equal(tensor.read(at), expected[torch.meshgrid(*at, indexing="ij")])


@pytest.mark.parametrize("shape", [(2, 8, 12), (8, 12), (5, 7)], ids=str)
def test_values_in_8_bits_are_numbers_times_the_scale_of_their_block(shape: tuple[int, ...]) -> None:
    *others, rows, columns = shape
    numbers = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*others, -(-rows // 4), -(-columns // 4))
    whole = scales.repeat_interleave(4, -2)[..., :rows, :].repeat_interleave(4, -1)[..., :columns]
    expected = numbers.float() * whole
    tensor = Fp8Tensor(in_memory(numbers), in_memory(scales), (4, 4)).prepared()
    for at in ([torch.arange(size) for size in shape], [torch.tensor([size - 1, 0]) for size in shape]):
        assert torch.equal(tensor.read(tuple(at)), expected[torch.meshgrid(*at, indexing="ij")])


def test_a_checkpoint_in_8_bits_is_loaded(tmp_path: Path) -> None:
    """Experts lie one by one, as in DeepSeek-V3's checkpoint, and are stacked after that."""
    torch.manual_seed(0)
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**EIGHT_HEADS, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    expected = {}
    for name, tensor in list(stored.items()):
        expected[name] = tensor
        if "experts" in name or "self_attn" in name:
            numbers = tensor.to(torch.float8_e4m3fn)
            scales = torch.rand(-(-tensor.shape[0] // 48), -(-tensor.shape[1] // 48))
            stored[name], stored[f"{name}_scale_inv"] = numbers, scales
            whole = scales.repeat_interleave(48, 0)[: tensor.shape[0]].repeat_interleave(48, 1)[:, : tensor.shape[1]]
            expected[name] = numbers.float() * whole
    for folder, tensors in (("fp8", stored), ("expected", expected)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    models = []
    for folder in ("fp8", "expected"):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        models.append(load_weights(model, tmp_path / folder).state_dict())
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


def test_a_published_checkpoint_is_loaded_and_saved_in_16_bits(published: Path, tmp_path: Path) -> None:
    stored = load_file(published / "model.safetensors")
    model = load_weights(model_on_meta(quantization_config=QUANTIZED).bfloat16(), published)
    state = model.state_dict()
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            assert torch.equal(state[stem], convert_moe_packed_tensors(tensor, stored[f"{stem}_scales"])), stem
    save_weights(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_blocks_without_scales_are_names_that_the_model_lacks(published: Path) -> None:
    stored = load_file(published / "model.safetensors")
    name = next(name for name in stored if name.endswith("_scales"))
    del stored[name]
    save_file(stored, published / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_weights(model_on_meta(), published)
    assert caught.value.missing == (name.removesuffix("_scales"),)
    assert caught.value.unexpected == (name.replace("_scales", "_blocks"),)
