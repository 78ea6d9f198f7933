"""Small models of Hugging Face's config classes: each dim becomes small, and what is particular to the class stays."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from covered.small_tables import MORE, SECTIONED, SIZES, SPECIAL_TOKENS
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "VISUAL_QUESTION_ANSWERING",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "OBJECT_DETECTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "AUDIO_CLASSIFICATION",
)
"""The tasks in the order in which a model type is given one of its heads: that of its pretraining comes first."""

TASK_OF: Mapping[str, str] = {"segformer": "SEMANTIC_SEGMENTATION"}
"""model_type -> what people use it for, where the order would choose otherwise."""


def tp_planned() -> tuple[str, ...]:
    """Return the model types whose config class carries a tensor-parallel plan, in the library's order."""
    return tuple(name for name in CONFIG_MAPPING if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None))


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a small config of ``model_type``."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**small_fields(config_class()))


def small_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of ``config`` that differ in the small model; those of nested configs as dicts."""
    fields: dict[str, Any] = {}
    nested = set(getattr(type(config), "sub_configs", None) or ())
    for name, value in vars(config).items():
        if name in nested and isinstance(value, PreTrainedConfig):
            fields[name] = {**_own_fields(value), **small_fields(value)}
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if size is not None and value > size:
                fields[name] = size
            elif name.endswith(("_token_id", "_token_index")) and value > 200:
                fields[name] = SPECIAL_TOKENS.get(name.rpartition("_token_")[0], 1)
        elif name.endswith("layerdrop"):
            fields[name] = 0.0
        elif name == "image_size" and isinstance(value, list | tuple):
            fields[name] = [32] * len(value)
    heads, groups = vars(config).get("num_attention_heads"), vars(config).get("num_key_value_heads")
    if heads is not None and heads == groups:
        fields["num_key_value_heads"] = fields.get("num_attention_heads", heads)
    fields.update(_layer_lists(config))
    sections = _with_small_sections(config, fields)
    return {**fields, **sections, **MORE.get(config.model_type, {})}


def _own_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that the outer config sets to other values than the default ones of ``config``'s class."""
    plain = vars(type(config)())
    own = {name: value for name, value in vars(config).items() if isinstance(value, int | float | str)}
    return {"model_type": config.model_type} | {
        name: value for name, value in own.items() if not name.startswith("_") and value != plain.get(name)
    }


def _layer_lists(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the lists of kinds of layers, with the first layer of each kind in each list, and two layers at least."""
    layers = vars(config).get("num_hidden_layers")
    lists = {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == layers and name != "architectures"
    }
    if not isinstance(layers, int) or not lists:
        return {}
    kept = sorted({values.index(kind) for values in lists.values() for kind in values if not isinstance(kind, list)})
    kept = kept if len(kept) > 1 else [*kept, layers - 1]
    kept = kept[:6]
    return {name: [values[layer] for layer in kept] for name, values in lists.items()} | {
        "num_hidden_layers": len(kept)
    }


def _with_small_sections(config: PreTrainedConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters with sections (of time, height and width) that fit the small heads."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return {}
    width = fields.get("head_dim", fields.get("hidden_size", 64) // fields.get("num_attention_heads", 4))
    if fields.get("qk_rope_head_dim"):
        width = fields["qk_rope_head_dim"]
    half = int(width * parameters.get("partial_rotary_factor", 1.0)) // 2
    small = {**parameters}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = 64
        small.pop("max_position_embeddings", None)
    needs = "mrope_section" in parameters or "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
    if needs or config.model_type in SECTIONED:
        third = half // 3
        small["mrope_section"] = [half - 2 * third, third, third]
    return {"rope_parameters": small} if small != parameters else {}


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class with a head for what ``config`` is used for, or else the bare model's.

    Raises:
        LookupError: transformers has no model of this config.
    """
    for task in (TASK_OF.get(config.model_type, TASKS[0]), *TASKS):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING")
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    if type(config) in modeling_auto.MODEL_MAPPING:
        found = modeling_auto.MODEL_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    return _class_beside(type(config))


def _class_beside(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the model that the library defines for a nested config, which no auto class knows."""
    __import__(name := config_class.__module__.replace(".configuration_", ".modeling_"))
    models = [
        item
        for item in vars(sys.modules[name]).values()
        if inspect.isclass(item)
        and issubclass(item, PreTrainedModel)
        and item.__module__ == name
        and "forward" in vars(item)
        and item.config_class is config_class
    ]
    if not models:
        raise LookupError(f"transformers has no model of {config_class.__name__}.")
    return next((item for item in models if "ForCausalLM" in item.__name__ or "ForCond" in item.__name__), models[-1])


def small_model(model_type: str) -> nn.Module:
    """Return a small model of ``model_type`` with random weights, in fp32."""
    config = small_config(model_type)
    return model_class(config)._from_config(config)
