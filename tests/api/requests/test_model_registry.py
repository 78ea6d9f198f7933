"""The model registry: presets, configs as data, factories, and what each says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.requests.model_configs import preset_names
from api.requests.model_registry import load_model
from planner.errors import JobError, ModelError

# The published counts: model cards and papers; ViT's and T5's are of the named checkpoints with their heads.
PARAMETERS = {
    "bert-large": ("BertForMaskedLM", 335.2e6),
    "deepseek-v3": ("DeepseekV3ForCausalLM", 671.0e9),
    "gpt2": ("GPT2LMHeadModel", 124.4e6),
    "llama-3.1-405b": ("LlamaForCausalLM", 405.9e9),
    "llama-3.1-70b": ("LlamaForCausalLM", 70.55e9),
    "llama-3.1-8b": ("LlamaForCausalLM", 8.030e9),
    "mistral-7b": ("MistralForCausalLM", 7.242e9),
    "mixtral-8x7b": ("MixtralForCausalLM", 46.70e9),
    "qwen3-8b": ("Qwen3ForCausalLM", 8.191e9),
    "t5-large": ("T5ForConditionalGeneration", 737.7e6),
    "vit-large": ("ViTForImageClassification", 304.3e6),
}


def hf(**values: Any) -> dict[str, Any]:
    return {"hf_config": values}


def test_every_preset_is_counted_here() -> None:
    assert set(preset_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    class_name, published = PARAMETERS[name]
    source = load_model(name)
    assert type(source.module).__name__ == class_name
    assert sum(parameter.numel() for parameter in source.module.parameters()) == pytest.approx(published, rel=1e-3)
    assert {parameter.device.type for parameter in source.module.parameters()} == {"meta"}
    assert source.notes == ()


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("vit", "ViTForImageClassification"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_config_without_architectures_gets_the_head_of_its_kind(model_type: str, class_name: str) -> None:
    layers = {"gpt2": "n_layer", "t5": "num_layers"}.get(model_type, "num_hidden_layers")
    assert type(load_model(hf(model_type=model_type, **{layers: 1})).module).__name__ == class_name


def test_architecture_without_a_loss_gets_a_head_and_a_note() -> None:
    source = load_model(hf(model_type="llama", architectures=["LlamaModel"], num_hidden_layers=1))
    assert type(source.module).__name__ == "LlamaForCausalLM"
    assert "LlamaModel" in source.notes[0]


@pytest.mark.parametrize("named", [["GPT2LMHeadModel"], ["os"], ["PreTrainedModel"], [5], 5, "LlamaForCausalLM"])
def test_architecture_that_is_not_the_types_is_not_built(named: Any) -> None:
    try:
        source = load_model(hf(model_type="llama", architectures=named, num_hidden_layers=1))
    except ModelError:
        return
    assert type(source.module).__name__ == "LlamaForCausalLM"


def test_file_and_folder_and_mapping_give_the_same_model(tmp_path: Path) -> None:
    values = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 100,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    sources = [load_model(spec) for spec in (str(tmp_path), str(tmp_path / "config.json"), {"hf_config": values})]
    shapes = [{name: p.shape for name, p in source.module.named_parameters()} for source in sources]
    assert shapes[0] == shapes[1] == shapes[2]
    assert {str(p.dtype) for p in sources[0].module.parameters()} == {"torch.float32"}


def test_tp_plan_has_full_names_and_the_head() -> None:
    plan = load_model(hf(model_type="llama", num_hidden_layers=1)).tp_plan
    assert plan is not None
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert "lm_head" in plan


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "vit-large", "t5-large"])
def test_tp_plan_is_none_where_the_model_carries_none(name: str) -> None:
    assert load_model(name).tp_plan is None


def test_seq_is_ignored_with_a_note_for_images() -> None:
    source = load_model("vit-large", seq=1024)
    assert source.seq is None
    assert "--seq 1024 is ignored" in source.notes[0]


@pytest.mark.parametrize(("name", "usable"), [("gpt2", 1024), ("bert-large", 512)])
def test_seq_beyond_learned_positions_is_an_error(name: str, usable: int) -> None:
    assert load_model(name, seq=usable).seq == usable
    with pytest.raises(JobError, match=f"has {usable} learned positions"):
        load_model(name, seq=usable + 1)


@pytest.mark.parametrize(
    ("values", "usable"),
    [
        ({"model_type": "whisper", "encoder_layers": 1, "decoder_layers": 1}, 448),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, 77),
    ],
    ids=["not those of sound", "not those of images"],
)
def test_positions_of_tokens_count(values: dict[str, Any], usable: int) -> None:
    load_model(hf(**values), seq=usable)
    with pytest.raises(JobError, match=f"has {usable} learned positions"):
        load_model(hf(**values), seq=usable + 1)


def test_positions_of_images_limit_no_text() -> None:
    text = {"model_type": "llama", "num_hidden_layers": 1}
    assert load_model(hf(model_type="llava", text_config=text), seq=2048).seq == 2048


@pytest.mark.parametrize(("model_type", "usable"), [("roberta", 510), ("opt", 2048)])
def test_positions_that_are_set_aside_do_not_count(model_type: str, usable: int) -> None:
    config = hf(model_type=model_type, num_hidden_layers=1)
    load_model(config, seq=usable)
    with pytest.raises(JobError, match=f"has {usable} learned positions"):
        load_model(config, seq=usable + 1)


def test_seq_beyond_rotary_positions_is_a_note() -> None:
    source = load_model("qwen3-8b", seq=65536)
    assert source.seq == 65536
    assert "40960" in source.notes[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lama-3.1-8b", "Did you mean llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "nothing is downloaded"),
        ("nowhere/config.json", "No such file"),
        ({"hf_config": {}}, "no model_type"),
        ({"hf_config": []}, "holds a list"),
        ({"other": 1}, "has the keys"),
        (hf(model_type="lama"), "Did you mean llama"),
        (hf(model_type="llama", hidden_size="wide"), "hidden_size"),
        (hf(model_type="llama", hidden_size=-4), "no model can be built"),
        (hf(model_type="llama", num_attention_heads=0), "no model can be built"),
        (hf(model_type="llama", hidden_size=10**30, num_hidden_layers=1), "no model can be built"),
        (hf(model_type="llama", hidden_act="bogus", num_hidden_layers=1), "no model can be built"),
        (hf(model_type="llama", num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
        (hf(model_type="clap"), "no head with a loss"),
    ],
)
def test_what_is_no_model_says_why(spec: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(spec)


def test_file_that_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not a model config"):
        load_model(str(tmp_path))


def test_config_nested_without_end_is_refused() -> None:
    values: dict[str, Any] = {"model_type": "llama"}
    for _ in range(100):
        values = {"model_type": "llama", "inner": values}
    with pytest.raises(ModelError, match="nests deeper"):
        load_model({"hf_config": values})


def test_code_and_kernels_that_a_config_names_are_left_out() -> None:
    source = load_model(
        hf(
            model_type="llama",
            num_hidden_layers=1,
            auto_map={"AutoModelForCausalLM": "evil.module"},
            _attn_implementation="evil/kernel",
            attn_implementation="evil/kernel",
        )
    )
    assert type(source.module).__module__ == "transformers.models.llama.modeling_llama"
    assert source.module.config._attn_implementation == "sdpa"
    assert "never run" in source.notes[0]


@pytest.mark.parametrize("spec", ["os:getpid", "pyproject.toml", "."])
def test_clients_name_neither_functions_nor_files(spec: str) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        load_model(spec, allow_local=False)


FACTORIES = """
import torch
from torch import nn

def sized(batch, seq=8):
    return nn.Linear(4, 4), (torch.zeros(batch, seq, 4),)

def fixed():
    return nn.Linear(4, 4), {"input": torch.zeros(6, 4)}

def bare():
    return nn.Linear(4, 4)

def number():
    return 5

def broken():
    raise LookupError("nothing here")
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"factories_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    return name


def test_factory_of_the_current_folder_is_built_on_meta(factories: str) -> None:
    source = load_model(f"{factories}:sized", batch=6, seq=16)
    assert isinstance(source.example_inputs, tuple)
    assert source.example_inputs[0].shape == (6, 16, 4)
    assert source.example_inputs[0].device.type == "meta"
    assert {parameter.device.type for parameter in source.module.parameters()} == {"meta"}
    assert source.seq == 16


def test_factory_without_seq_notes_that_it_is_ignored(factories: str) -> None:
    source = load_model(f"{factories}:fixed", batch=6, seq=16)
    assert source.seq is None
    assert "--seq 16 is ignored" in source.notes[0]


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("sized", JobError, "needs a batch"),
        ("bare", ModelError, "without example inputs"),
        ("number", ModelError, "returned a int"),
        ("broken", ModelError, r"LookupError: nothing here \(factories_\d+.py, line 18\)"),
        ("absent", ModelError, "has no absent"),
        ("nn", ModelError, "is a module"),
    ],
)
def test_factory_that_gives_no_model_says_why(
    factories: str, factory: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_model(f"{factories}:{factory}")


def test_batch_that_a_factory_contradicts_is_an_error(factories: str) -> None:
    with pytest.raises(JobError, match="first dim is 6"):
        load_model(f"{factories}:fixed", batch=8)
