"""What a source of weights must hold, and what each fault says: on modules in one process, mostly on meta."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file, save_model
from support.weight_cases import QWEN, build, build_on_meta, read_checkpoint, write_checkpoint
from torch import nn

from executor import load_weights, save_weights
from planner import fuse_projections
from planner.errors import WeightsError


class Own(nn.Module):
    """A module with buffers of both kinds, a plain tensor and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.scale = torch.tensor(3.0)


def own_on_meta() -> Own:
    with torch.device("meta"):
        return Own()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_model(Own(), str(tmp_path / "model.safetensors"))
    return tmp_path / "model.safetensors"


def faults(module: nn.Module, source: Any, **options: Any) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        load_weights(module, source, **options)
    return caught.value


def test_names_that_differ_are_all_named_with_near_misses(file: Path) -> None:
    state = {name: tensor for name, tensor in read_checkpoint(file.parent).items() if name != "norm.bias"}
    state["frist.bias"] = state.pop("first.bias")
    state["other"] = torch.zeros(2)
    module = Own()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    error = faults(module, state)
    assert error.missing == ("first.bias", "norm.bias")
    assert error.unexpected == ("frist.bias", "other")
    assert "'first.bias' (near: 'frist.bias')" in error.detail
    assert "Nothing has been loaded" in error.detail
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_shapes_that_differ_are_all_named(file: Path) -> None:
    state = read_checkpoint(file.parent)
    state |= {"norm.bias": torch.zeros(5), "last.bias": torch.zeros(4, 1)}
    error = faults(Own(), state)
    assert error.mismatched == {"norm.bias": ((5,), (4,)), "last.bias": ((4, 1), (4,))}


def test_not_strict_keeps_values_and_drops_names(file: Path) -> None:
    state = {"first.weight": torch.full((4, 4), 7.0), "other": torch.zeros(2)}
    module = Own()
    bias = module.first.bias.clone()
    load_weights(module, state, strict=False)
    assert module.first.weight.unique().tolist() == [7.0]
    assert torch.equal(module.first.bias, bias)
    assert "norm.weight" in faults(own_on_meta(), state, strict=False, buffers=Own).missing


def test_buffers_that_no_checkpoint_holds_are_named_or_given(file: Path) -> None:
    module = own_on_meta()
    error = faults(module, file)
    assert error.missing == ("table", "scale")
    assert "buffers=" in error.what_to_do
    assert all(parameter.is_meta for parameter in module.parameters())
    for buffers in (Own, {"table": torch.arange(4.0), "scale": torch.tensor(3.0)}):
        module = own_on_meta()
        load_weights(module, file, buffers=buffers)
        assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert module.scale.item() == 3.0
        assert module.first.weight is module.last.weight
        assert module.norm.num_batches_tracked.item() == 0
        assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def test_tied_weights_with_different_values_are_an_error(file: Path) -> None:
    state = read_checkpoint(file.parent)
    state |= {"last.weight": torch.zeros(4, 4), "first.weight": torch.ones(4, 4)}
    assert "first.weight and last.weight" in faults(Own(), state).detail
    state["last.weight"] = state["first.weight"].clone()
    load_weights(Own(), state)


def test_values_are_cast_to_the_modules_dtype(file: Path) -> None:
    module = Own().bfloat16()
    load_weights(module, file)
    expected = read_checkpoint(file.parent)
    assert torch.equal(module.first.bias, expected["first.bias"].bfloat16())
    assert torch.equal(module.norm.running_var, expected["norm.running_var"].bfloat16())


def test_sources_that_cannot_be_read_say_why(file: Path, tmp_path: Path) -> None:
    assert "neither a file nor a folder" in faults(Own(), tmp_path / "nowhere").detail
    assert "snapshot_download" in faults(Own(), "meta-llama/Llama-3.1-8B").what_to_do
    (tmp_path / "empty").mkdir()
    assert "neither model.safetensors.index.json" in faults(Own(), tmp_path / "empty").detail
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "no safetensors file" in faults(Own(), tmp_path / "weights.bin").detail
    (tmp_path / "empty" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "lost"}}))
    assert "lost" in faults(Own(), tmp_path / "empty").detail
    assert "passed None" in faults(Own(), None).detail


def test_prefixes_differ_as_from_pretrained_accepts(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**QWEN)
    torch.manual_seed(0)
    whole = transformers.Qwen3ForCausalLM(config)
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        base, causal = transformers.Qwen3Model(config), transformers.Qwen3ForCausalLM(config)
    load_weights(base, tmp_path / "whole")
    load_weights(causal, tmp_path / "base")
    expected = whole.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in causal.state_dict().items())
    assert all(torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in base.state_dict().items())
    inverse = whole.model.rotary_emb.inv_freq
    assert torch.equal(causal.model.rotary_emb.inv_freq, inverse)
    assert torch.equal(base.rotary_emb.original_inv_freq, inverse)


def test_fused_projections_take_their_parts_and_are_saved_as_parts(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "plain")
    fused = fuse_projections(build_on_meta("llama"))
    load_weights(fused, tmp_path / "plain")
    expected = fuse_projections(build("llama")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fused.state_dict().items())
    save_weights(fused, tmp_path / "again")
    before, again = read_checkpoint(tmp_path / "plain"), read_checkpoint(tmp_path / "again")
    assert before.keys() == again.keys()
    assert all(torch.equal(before[name], again[name]) for name in before)
    load_weights(fused, fused.state_dict())  # under the fused names too
    lost = {name: tensor for name, tensor in before.items() if "layers.1.self_attn.k_proj" not in name}
    assert faults(fused, lost).missing == ("model.layers.1.self_attn.k_proj.weight",)
    assert not re.search("q_proj|v_proj", faults(fused, lost).detail.partition("near")[0])


def test_conversions_that_are_no_views_are_computed(tmp_path: Path) -> None:
    """transformers interleaves, permutes or pads some families' tensors: it does so here, on whole tensors."""
    from transformers.core_model_loading import Concatenate, Interleave, WeightConverter

    from executor.weights.conversions import converted
    from executor.weights.lazy_tensors import full_indices, in_memory

    parts = {"a.weight": [in_memory(torch.arange(4.0))], "b.weight": [in_memory(torch.arange(4.0, 8.0))]}
    converter = WeightConverter(list(parts), "ab.weight", [Concatenate(0), Interleave(0)])
    lazy = converted(converter, dict(parts), "layer.ab.weight", build_on_meta("llama"))
    assert list(lazy) == ["layer.ab.weight"]
    values = lazy["layer.ab.weight"].prepared().read(full_indices((8,)))
    own = Interleave(0).convert({"x": torch.arange(8.0)}, ["x"], ["x"])["x"]
    assert torch.equal(values, own)


def test_nothing_is_materialized_where_names_are_missing(tmp_path: Path) -> None:
    model = build_on_meta("llama")
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    error = faults(model, tmp_path)
    assert len(error.missing) == 20
    assert "and 12 more" in error.detail
    assert all(tensor.is_meta for tensor in model.parameters())


def test_a_model_that_is_converted_all_at_once_only_is_saved_under_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import SplitModulelist

    def refuse(self: Any, input_dict: dict[str, Any], *_: Any, **__: Any) -> None:
        raise ValueError(f"Expected all patterns in collected tensors but only found tensors for: {list(input_dict)}")

    model = build("mixtral")
    monkeypatch.setattr(SplitModulelist, "convert", refuse)
    save_weights(model, tmp_path / "own")
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_checkpoint(tmp_path / "own")
    read = type(model).from_pretrained(tmp_path / "own").state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
