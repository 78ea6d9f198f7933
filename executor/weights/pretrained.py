"""What transformers knows of a model's checkpoints: names, conversions, and buffers that no checkpoint holds.

transformers is imported only where a module is one of its own models. The functions ask a *skeleton*: an unsharded
model of the same class and config, whose parameters are on meta and whose buffers have their values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook

from executor.weights.conversions import converted
from executor.weights.lazy_tensors import LazyTensor
from executor.weights.quantized import FP8_BLOCK, dequantized


def is_pretrained(module: nn.Module) -> bool:
    """Return whether ``module`` is a model of transformers."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def skeleton_of(module: nn.Module) -> Any:
    """Return the skeleton of ``module``, a model of transformers: made anew from its class and config."""
    # fully_shard gives a module a class of its own, which transformers takes for code of the user's.
    own_class: Any = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    config = copy.deepcopy(module.config)
    with parameters_on_meta():
        skeleton = own_class(config)
    skeleton._weight_conversions = getattr(module, "_weight_conversions", None)
    return skeleton


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Return a context in which modules that are built have buffers on the CPU, and parameters on meta.

    Random buffers are the same on every rank. The random state of the process does not change.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch's annotation says that the hook returns nothing.
    handle = register_module_parameter_registration_hook(cast(Any, to_meta))
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            yield
    finally:
        handle.remove()


def in_module_names(
    module: nn.Module, skeleton: Any, names: Mapping[str, object], tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return ``tensors`` of a checkpoint under the names of the model, converted as ``from_pretrained`` does.

    Prefixes are added or removed, renamed layers renamed, experts packed, quantized weights dequantized. ``module``
    remembers the conversions that were used, as transformers does, so that saving reverts them.

    Args:
        module: the model.
        skeleton: its skeleton.
        names: every name of a parameter or persistent buffer of the unfused model -> anything but None.
        tensors: names in the checkpoint -> tensors.
    """
    from transformers import conversion_mapping, core_model_loading

    mapping = conversion_mapping.get_model_conversion_mapping(skeleton)
    renamings = [item for item in mapping if isinstance(item, core_model_loading.WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, core_model_loading.WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    quantization = getattr(skeleton.config, "quantization_config", None)
    fields = quantization if isinstance(quantization, Mapping) else vars(quantization) if quantization else {}
    block = fields.get("weight_block_size")
    tensors = dequantized(tensors, names, FP8_BLOCK if block is None else tuple(block))
    prefix = skeleton.base_model_prefix
    result: dict[str, LazyTensor] = {}
    collected: dict[str, tuple[Any, dict[str, list[LazyTensor]]]] = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):
        new_name, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, names)
        if new_name not in names and name in names:
            new_name, pattern = core_model_loading.rename_source_key(name, [], [], prefix, names)
        if pattern is None or new_name not in names:
            result[new_name if new_name in names else name] = tensors[name]
        else:
            _, sources = collected.setdefault(new_name, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(tensors[name])
    for first_name, (converter, sources) in collected.items():
        result.update(converted(converter, sources, first_name, skeleton))
    module._weight_conversions = [item for item in mapping if item.was_used()]  # type: ignore[assignment]
    return result


def ignored_in_checkpoint(skeleton: Any, name: str) -> bool:
    """Return whether transformers drops ``name`` of a checkpoint silently, where the model has no such tensor."""
    patterns = set(skeleton._keys_to_ignore_on_load_unexpected or ())
    buffers = [buffer for buffer, _ in skeleton.named_buffers()]
    # As in PreTrainedModel._adjust_missing_and_unexpected_keys: buffers that older checkpoints hold.
    if any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(buffer.endswith("position_ids") for buffer in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return any(re.search(pattern, name) for pattern in patterns)


def saved_names(skeleton: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` in the names and forms in which ``save_pretrained`` writes it; any part of a state will do."""
    from transformers import core_model_loading

    reverted: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(skeleton, dict(state))
    return reverted


def remember_conversions(skeleton: Any) -> None:
    """Make ``saved_names`` use the model's default conversions, unless it was loaded from a checkpoint."""
    from transformers import conversion_mapping, core_model_loading

    if skeleton._weight_conversions is None:
        defaults = conversion_mapping.get_model_conversion_mapping(skeleton, add_legacy=False)
        skeleton._weight_conversions = [
            item for item in defaults if not isinstance(item, core_model_loading.PrefixChange)
        ]


def forget_conversions(skeleton: Any) -> None:
    """Make ``saved_names`` convert nothing."""
    if skeleton is not None:
        skeleton._weight_conversions = []


def tied_away(skeleton: Any) -> set[str]:
    """Return the names that ``save_pretrained`` leaves out, because they are tied to others."""
    return set(skeleton.all_tied_weights_keys)


def ignored_on_save(skeleton: Any) -> set[str]:
    """Return the names that ``save_pretrained`` leaves out."""
    return set(skeleton._keys_to_ignore_on_save or ())


def write_configs(module: Any, skeleton: Any, folder: str) -> None:
    """Write the config of ``module`` to ``folder``, and its generation config if it has one."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(skeleton).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    vars(config).pop("quantization_config", None)  # of the checkpoint that was read: no parameter is quantized here
    config.save_pretrained(folder)
    if module.can_generate() and module.generation_config is not None:
        module.generation_config.save_pretrained(folder)
