"""The model registry: modules on the meta device by the name or config of a model, built by transformers."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from api.requests.factories import call_factory
from api.requests.model_configs import FUSED_PROJECTIONS, ModelConfig, find_config, without_suffix
from planner.errors import JobError, ModelError, PlanMismatchError
from planner.graph.example_inputs import (
    DEFAULT_IMAGE_SIZE,
    has_image_size,
    has_image_tokens,
    takes_sequences,
    vision_configs,
)
from planner.model_rewrites.fuse_projections import carried_tp_plan, count_fused_projections, fuse_projections
from planner.plan.sharding_plan import ShardingPlan

_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed(dings?)?)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to plan for.

    Attributes:
        name: the user's name for the model.
        module: the model on the meta device, parameters in float32 (the planner prices the job's precisions).
        example_inputs: arguments of one call with the global batch, positional or by name; None for a Hugging Face
            model, whose inputs follow from its config.
        seq: tokens in a sequence; None where it was not given, or where the model takes no sequences.
        takes_seq: whether the model takes sequences.
        tp_plan: FQN pattern -> Hugging Face style ("colwise", ...); None where the model has no such plan.
        notes: for the user, one sentence each.
    """

    name: str
    module: nn.Module
    example_inputs: tuple[Any, ...] | dict[str, Any] | None = None
    seq: int | None = None
    takes_seq: bool = True
    tp_plan: dict[str, str] | None = None
    notes: tuple[str, ...] = ()


def load_model(
    spec: str | Mapping[str, Any], *, batch: int | None = None, seq: int | None = None, allow_local: bool = True
) -> ModelSource:
    """Return the model that ``spec`` names, built on the meta device: no weights, no downloads, no remote code.

    Args:
        spec: a preset's name, the path of a config.json or of its folder, ``package.module:factory``, or
            ``{"hf_config": {...}}``. Projections are fused (`planner.model_rewrites.fuse_projections`) if the name ends
            in ``+fused-projections``, or if ``"fused_projections": True`` is next to the config.
        batch: samples in the global batch, for a factory with a parameter ``batch``; None: not given.
        seq: tokens in a sequence; None: not given.
        allow_local: whether ``spec`` may be a path or a factory; False for a client's request.

    Raises:
        ModelError: the model cannot be found, read or built.
        JobError: ``batch`` or ``seq`` does not suit the model.
    """
    config = find_config(spec, allow_local=allow_local)
    if config is not None:
        source, fuses = _from_config(config, seq=seq), config.fused_projections
    else:
        assert isinstance(spec, str), "only text names a factory"
        name = without_suffix(spec)
        source, fuses = _from_factory(name, batch=batch, seq=seq), name != spec
    return _with_fused_projections(source) if fuses else source


def _with_fused_projections(source: ModelSource) -> ModelSource:
    """Fuse the projections of the source's module; return the source with a new name, TP plan and note.

    Raises:
        ModelError: the module has no projections that can be fused.
    """
    layers = count_fused_projections(fuse_projections(source.module))
    if not layers:
        raise ModelError(
            f"{source.name} has no projections that can be fused, as transformers' decoders have them.",
            what_to_do="Leave fused-projections out of the techniques.",
        )
    note = f"projections that read one tensor are fused into {layers} linear layers"
    styles, notes = carried_tp_plan(source.module), (*source.notes, note)
    return dataclasses.replace(source, name=source.name + FUSED_PROJECTIONS, tp_plan=styles, notes=notes)


def load_for_plan(model: str | Mapping[str, Any], plan: ShardingPlan, *, allow_local: bool = True) -> ModelSource:
    """Return the model ``model`` at the plan's batch and sequence length, as `load_model` does.

    Projections are fused if the plan says so.

    Raises:
        PlanMismatchError: the model does not take the plan's batch or sequences.
    """
    try:
        source = load_model(model, batch=plan.job.batch, seq=plan.job.seq, allow_local=allow_local)
    except JobError as error:
        size = f"{plan.job.seq} tokens" if error.field == "seq" else f"{plan.job.batch} samples"
        named = model if isinstance(model, str) else "the model"
        raise PlanMismatchError(
            f"the plan is for {size}, which {named} does not take: it was made for another model, it seems.",
            subject="model",
            expected=size,
            found=str(error),
            what_to_do="Name the model that the plan is for, or plan this one.",
        ) from error
    if plan.job.fused_projections and not count_fused_projections(source.module):
        return _with_fused_projections(source)
    return source


def full_config(config: ModelConfig) -> tuple[dict[str, Any], bool]:
    """Return a config with the defaults of its class, and whether its model takes sequences, which is not built.

    Raises:
        ModelError: the config is of no known model, or its values contradict each other.
    """
    with quiet_libraries():
        hf_config = _hf_config(config)
        return hf_config.to_dict(), takes_sequences(_model_class(config, hf_config)[0], hf_config)


def _from_factory(spec: str, *, batch: int | None, seq: int | None) -> ModelSource:
    result = call_factory(spec, batch=batch, seq=seq)
    if result.example_inputs is None:
        if not (hasattr(result.module, "config") and hasattr(result.module, "main_input_name")):
            advice = "Let the factory return (module, example_inputs)."
            raise ModelError(f"{spec} gave a {type(result.module).__name__} without example inputs.", what_to_do=advice)
        return _hugging_face(spec, result.module, seq=seq, notes=())
    if batch is not None and not result.took_batch:
        _check_first_dim(spec, result.example_inputs, batch)
    notes: tuple[str, ...] = ()
    if seq is not None and not result.took_seq:
        notes = (f"--seq {seq} is ignored: {spec} takes no seq, and its example inputs say the lengths",)
        seq = None
    return ModelSource(
        name=spec,
        module=result.module,
        example_inputs=result.example_inputs,
        seq=seq,
        tp_plan=carried_tp_plan(result.module),
        notes=notes,
    )


def _check_first_dim(spec: str, inputs: tuple[Any, ...] | dict[str, Any], batch: int) -> None:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    sizes = {value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim() > 0}
    if sizes and batch not in sizes:
        first = " and ".join(map(str, sorted(sizes)))
        detail = f"--batch is {batch}, but {spec} gives example inputs whose first dim is {first}."
        raise JobError(detail, what_to_do="Leave --batch out, or let the factory take a batch argument.", field="batch")


def _from_config(config: ModelConfig, *, seq: int | None) -> ModelSource:
    with quiet_libraries():
        hf_config = _hf_config(config)
        cls, notes = _model_class(config, hf_config)
        try:
            with torch.device("meta"):
                module = cls(hf_config)
        except _config_faults() as error:
            raise _unbuildable(config, error) from error
    return _hugging_face(config.name, module, seq=seq, notes=(*config.notes, *notes))


def _hugging_face(name: str, module: nn.Module, *, seq: int | None, notes: tuple[str, ...]) -> ModelSource:
    """Return the source of a Hugging Face model, whose example inputs follow from its config."""
    takes_seq = takes_sequences(module, module.config)
    if seq is not None and takes_seq:
        notes += _check_positions(name, module, seq)
    elif seq is not None:
        notes += (f"--seq {seq} is ignored: the inputs of {name} have a fixed size, and are not sequences",)
        seq = None
    notes += _input_notes(name, module)
    return ModelSource(
        name=name, module=module, seq=seq, takes_seq=takes_seq, tp_plan=carried_tp_plan(module), notes=notes
    )


def _input_notes(name: str, module: nn.Module) -> tuple[str, ...]:
    """Return notes on inputs that the config does not say, or that mean something else than one would think."""
    config: Any = module.config
    takes_images = "pixel_values" in inspect.signature(module.forward).parameters
    if takes_images and has_image_tokens(config):
        return (f"planned on text alone: how many tokens an image of {name} takes is in no config",)
    if takes_images and not has_image_size(config):
        assumed = f"{DEFAULT_IMAGE_SIZE} x {DEFAULT_IMAGE_SIZE}"
        return (f"images of {assumed} pixels are assumed: the config of {name} has no image_size (add it)",)
    notes: tuple[str, ...] = ()
    if getattr(module, "main_input_name", None) == "input_values" and takes_sequences(module, config):
        notes += ("a sequence is so many samples of sound, of which 16,000 are usually a second",)
    if type(module).__name__.endswith("ForCTC"):
        notes += ("labels for CTC are assumed to be 12 letters a second of sound at 16 kHz",)
    return notes


def _hf_config(config: ModelConfig) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    model_type = config.values["model_type"]
    if model_type not in CONFIG_MAPPING_NAMES:
        close = difflib.get_close_matches(model_type, CONFIG_MAPPING_NAMES, n=3)
        advice = (
            f"Did you mean {' or '.join(close)}?"
            if close
            else "transformers does not know it; use package.module:factory."
        )
        raise ModelError(f"{config.name} has the unknown model_type {model_type!r}.", what_to_do=advice)
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(config.values))
    except _config_faults() as error:
        raise _unbuildable(config, error) from error


def _config_faults() -> tuple[type[Exception], ...]:
    """Return the exceptions of config classes and model constructors for invalid or contradictory values."""
    from huggingface_hub.errors import StrictDataclassError

    wrong_value = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
    return (*wrong_value, AssertionError, RuntimeError, OSError, ImportError, StrictDataclassError)


def _unbuildable(config: ModelConfig, error: Exception) -> ModelError:
    message = " ".join(str(error).split())[:1000]
    return ModelError(
        f"no model can be built from {config.name} ({config.values['model_type']}): {type(error).__name__}: {message}.",
        what_to_do="Check the config's values against each other and against the library's documentation.",
    )


def _model_class(config: ModelConfig, hf_config: Any) -> tuple[type[nn.Module], tuple[str, ...]]:
    """Return the class to build, and notes: the class that the config names if it has a loss, else `_default_class`."""
    import transformers

    architectures = hf_config.architectures
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        if cls is not None and is_model and cls.config_class is type(hf_config) and _has_loss(cls):
            return cls, ()
    cls = _default_class(config, hf_config)
    if not names:
        return cls, ()
    class_names = ", ".join(map(str, names))
    note = (
        f"{config.name} names {class_names}, which is no {hf_config.model_type} with a loss: {cls.__name__} is planned"
    )
    return cls, (note,)


def _has_loss(cls: type[nn.Module]) -> bool:
    """Return whether a class computes a loss: from labels, the ends of an answer, pairs (CLIP), or inputs alone."""
    arguments = inspect.signature(cls.forward).parameters
    makes_labels = cls.__name__.endswith("ForPreTraining")
    return makes_labels or not {"labels", "start_positions", "return_loss"}.isdisjoint(arguments)


def _default_class(config: ModelConfig, hf_config: Any) -> type[nn.Module]:
    from transformers.models.auto import modeling_auto as auto

    kinds = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_CTC_MAPPING,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING,
        auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING,
    ]
    if not getattr(hf_config, "is_decoder", False):
        kinds.insert(0, auto.MODEL_FOR_MASKED_LM_MAPPING)
    if getattr(hf_config, "is_encoder_decoder", False):
        kinds[:0] = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
    for mapping in kinds:
        if type(hf_config) in mapping:
            entry = mapping[type(hf_config)]
            cls: type[nn.Module] = entry[0] if isinstance(entry, tuple) else entry
            return cls
    raise ModelError(
        f"{config.name} ({hf_config.model_type}) has no head with a loss: of language, images or speech.",
        what_to_do="Name a class with a loss under architectures, or use package.module:factory.",
    )


def _check_positions(name: str, module: nn.Module, seq: int) -> tuple[str, ...]:
    """Return a note for the user if ``seq`` is longer than the model was trained for.

    Raises:
        JobError: the model has fewer than ``seq`` learned positions.
    """
    usable = min(_learned_positions(module), default=None)
    if usable is not None:
        if seq > usable:
            advice = f"Use --seq {usable} or less."
            raise JobError(
                f"--seq is {seq}, but {name} has {usable} learned positions.", what_to_do=advice, field="seq"
            )
        return ()
    trained = getattr(module.config, "max_position_embeddings", None)
    if isinstance(trained, int) and seq > trained:
        return (f"seq {seq} is longer than the {trained} positions that {name} was made for (rotary positions go on)",)
    return ()


def _learned_positions(module: nn.Module) -> Iterator[int]:
    """Yield how many tokens each table of positions has room for; those of images and of sound are left out."""
    config: Any = module.config
    others = [part for part in vision_configs(config) if part is not config]
    hears = getattr(module, "main_input_name", None) in ("input_features", "input_values")
    unread = [
        f"{fqn}." for fqn, part in module.named_modules() if any(getattr(part, "config", None) is c for c in others)
    ]
    for fqn, part in module.named_modules():
        is_unread = fqn.startswith(tuple(unread)) or (hears and ".encoder." in f".{fqn}.")
        if isinstance(part, nn.Embedding) and _POSITIONS.search(fqn) and not is_unread:
            unused = getattr(part, "offset", 0) or (0 if part.padding_idx is None else part.padding_idx + 1)
            yield part.num_embeddings - int(unused)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the libraries' warnings about loading and running models, and keep Hugging Face off the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # DTensor only propagates layouts, on a mesh without processes, and draws no random numbers.
            warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
            yield
    finally:
        logging.set_verbosity(before)
