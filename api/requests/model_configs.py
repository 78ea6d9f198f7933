"""Model configs as data: read from a preset, a file, a folder or a request, and checked before anything is built."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError
from planner.plan.former_names import with_current_names

MAX_REPEATS = 10_000
"""The most layers, blocks or experts of a config: more is a mistake, and building the model would take for ever."""

MAX_DEPTH = 16
"""The most levels of nesting in a config; the configs of transformers need three."""

FUSED_PROJECTIONS = "+fused-projections"
"""Suffix of a model's name that asks for fused projections, as the technique of that name does."""
_FORMER_SUFFIX = "+packed"

_PRESETS = Path(__file__).parent / "presets"
_FACTORY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
_REPEATS = re.compile(r"layers?$|blocks?$|experts?$|depth")
_DTYPES = ("dtype", "torch_dtype")  # the planner prices the job's precisions, whatever the checkpoint was stored in


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Hugging Face ``config.json`` as plain data.

    Attributes:
        name: name of the model in messages.
        values: the config, without the keys that could make a library load code.
        notes: for the user, on the keys that were left out.
        fused_projections: whether projections of the model are to be fused.
    """

    name: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    fused_projections: bool = False


def find_config(spec: str | Mapping[str, Any], *, allow_local: bool) -> ModelConfig | None:
    """Return the config that ``spec`` names, or None where it names a factory (``package.module:factory``).

    Args:
        spec: a preset's name, ``{"hf_config": {...}}`` or, with ``allow_local``, a path or a factory. A name may end in
            ``+fused-projections``; a mapping may have ``"fused_projections": True``.
        allow_local: whether ``spec`` may name files and Python functions of this machine.

    Raises:
        ModelError: there is no such config, or it is invalid.
    """
    if not isinstance(spec, str):
        spec = with_current_names(spec)
        if set(spec) - {"fused_projections"} != {"hf_config"}:
            raise ModelError(
                f"a model has the keys {sorted(spec)}.", what_to_do='Give a name, or {"hf_config": {...}}.'
            )
        config = check_config(spec["hf_config"], name="hf_config")
        return dataclasses.replace(config, fused_projections=bool(spec.get("fused_projections", False)))
    name = without_suffix(spec)
    if name != spec:
        config_of_name = find_config(name, allow_local=allow_local)
        return config_of_name and dataclasses.replace(config_of_name, fused_projections=True)
    if allow_local and spec.lower() not in preset_names():
        _refuse_python_file(spec)
        # A name that exists or ends in .json is a path. Any other is a misspelt preset, which read_preset reports best.
        if Path(spec).exists() or spec.endswith(".json"):
            return read_config(Path(spec))
        if _FACTORY.match(spec):
            return None
    return read_preset(spec)


def _refuse_python_file(spec: str) -> None:
    """Raise a `ModelError` where ``spec`` is a Python file, or a module without the name of a factory in it."""
    path, colon, factory = spec.partition(":")
    is_file = path.endswith(".py")
    is_module = not colon and not path.endswith(".json") and Path(f"{path.replace('.', '/')}.py").is_file()
    if is_file or (is_module and not Path(spec).exists()):
        module = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ModelError(
            f"{spec} is Python code, and a model is named as module:factory.",
            what_to_do=f"Write {module}:{factory or 'factory'}, where {factory or 'factory'} is a function or class in "
            "it that returns the nn.Module.",
        )


def without_suffix(spec: str) -> str:
    """Return a model's name without the suffix for fused projections."""
    return spec.removesuffix(FUSED_PROJECTIONS).removesuffix(_FORMER_SUFFIX)


def asks_for_fused_projections(spec: str | Mapping[str, Any] | None) -> bool:
    """Return whether a model's name or mapping asks for fused projections."""
    if spec is None:
        return False
    return without_suffix(spec) != spec if isinstance(spec, str) else bool(spec.get("fused_projections", False))


def preset_names() -> tuple[str, ...]:
    """Return the names of the bundled configs, sorted."""
    return tuple(sorted(file.stem for file in _PRESETS.glob("*.json")))


def read_preset(name: str) -> ModelConfig:
    """Return the bundled config ``name`` (in any case).

    Raises:
        ModelError: there is no preset of that name; the message lists all presets, the closest first.
    """
    preset = name.lower()
    if preset not in preset_names():
        raise ModelError(f"there is no model {name!r}.", what_to_do=_advice(name))
    text = _PRESETS.joinpath(f"{preset}.json").read_text(encoding="utf-8")
    return check_config(json.loads(text), name=preset)


def read_config(path: Path) -> ModelConfig:
    """Return the config in ``path``: a config.json, or a folder that has one.

    Raises:
        ModelError: the file cannot be read, or is no config.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        advice = "Give a config.json, or a folder that has one in it."
        raise ModelError(f"cannot read {file}: {error.strerror or error}.", what_to_do=advice) from error
    except ValueError as error:
        advice = "Give a Hugging Face config.json: a JSON object with a model_type in it."
        raise ModelError(f"{file} is not a model config: it is not JSON ({error}).", what_to_do=advice) from error
    return check_config(values, name=str(path))


def check_config(values: object, *, name: str) -> ModelConfig:
    """Return ``values`` as a config, without the keys that could make a library load code.

    Raises:
        ModelError: ``values`` is no JSON object with a model_type, nests too deep, or has more layers than MAX_REPEATS.
    """
    advice = 'A Hugging Face config.json is an object such as {"model_type": "llama", "hidden_size": 4096, ...}.'
    if not isinstance(values, Mapping):
        raise ModelError(f"{name} is not a model config: it holds a {type(values).__name__}.", what_to_do=advice)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(f"{name} is not a model config: it has no model_type.", what_to_do=advice)
    for key, value in _entries(values, depth=1, name=name):
        if _REPEATS.search(key) and isinstance(value, int) and value > MAX_REPEATS:
            raise ModelError(f"{name} has {key} = {value}.", what_to_do=f"At most {MAX_REPEATS} are planned for.")
    notes: tuple[str, ...] = ()
    if "auto_map" in values:
        notes = (f"{name} names code of its own (auto_map), which is never run; the library's {model_type} is planned",)
    return ModelConfig(name=name, values=_data_only(values), notes=notes)


def _advice(name: str) -> str:
    names = preset_names()
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=3, cutoff=0.5)
    suggestion = f"Did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{suggestion}Give a preset ({', '.join(names)}), the path of a config.json or of its folder, "
        "or package.module:factory; nothing is downloaded."
    )


def _entries(values: Mapping[str, Any], *, depth: int, name: str) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise ModelError(f"{name} nests deeper than {MAX_DEPTH}.", what_to_do="Give a Hugging Face config.json.")
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, depth=depth + 1, name=name)
        else:
            yield str(key), value


def _data_only(values: Mapping[str, Any]) -> dict[str, Any]:
    # Private keys can name attention kernels, which transformers would fetch and load. auto_map and
    # quantization_config name code.
    data = {}
    for key, value in values.items():
        if key.startswith("_") or key in {"auto_map", "attn_implementation", "quantization_config", *_DTYPES}:
            continue
        data[key] = _data_only(value) if isinstance(value, Mapping) else value
    return data


def preset_summary(name: str) -> dict[str, Any]:
    """Return name, model_type, parameters, layers, hidden size and context (None: images) of a preset."""
    values = json.loads(_PRESETS.joinpath(f"{name}.json").read_text(encoding="utf-8"))

    def first(*keys: str) -> int | None:
        return next((int(values[key]) for key in keys if isinstance(values.get(key), int)), None)

    layers = first("num_hidden_layers", "n_layer", "num_layers") or 0
    decoder_layers = (first("num_decoder_layers") or layers) if values.get("is_encoder_decoder") else 0
    return {
        "name": name,
        "model_type": values["model_type"],
        "parameters": values["_parameters"],
        "layers": layers + decoder_layers,
        "hidden": first("hidden_size", "n_embd", "d_model"),
        "context": first("max_position_embeddings", "n_positions"),
    }
