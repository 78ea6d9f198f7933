"""Packs the projections of a model: queries, keys and values as one linear layer, gates and their factors as another.

Each is one product then in place of two or three, of which those with few rows keep a GPU badly occupied, and one
gradient of the input. The model is another one afterwards, with parameters of other names (`packed_modules`):
it is planned, sharded and saved as that. Which modules are meant is found as for fused ops, and only linear layers that
nothing else refers to are packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.model_rewrites.fuse import gate_of, rotates
from planner.model_rewrites.packed_modules import (
    FACTOR,
    GATE,
    KEY,
    PACKED_ATTENTION,
    PACKED_GATE,
    QUERY,
    VALUE,
    PackedGatedMLP,
    PackedProjections,
    PartOfProjections,
    packed_rows,
    unpacked_rows,
)

_Layers = Mapping[str, nn.Linear]


def pack_projections(module: nn.Module) -> nn.Module:
    """Return ``module``, in which projections that read one tensor are one linear layer from now on.

    Its forward computes what it did, to rounding. Call it before an optimizer is made, and before `build_plan` and
    `shard_module`. Weights of the model as it was can be loaded afterwards (`load_state_dict` packs them), and
    `unpack_state_dict` gives them back. Of layers with hooks, adapters or shared weights nothing changes.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            activation = gate_of(child)
            layers = _layers(child, (GATE, FACTOR), uses)
            if activation is not None and layers is not None and _have_equal_rows(layers.values()):
                packed = _packed(layers, groups=layers[GATE].out_features)
                replaced = PackedGatedMLP(child, packed, activation).train(child.training)
                _pack_what_is_loaded(replaced, PACKED_GATE, layers, groups=layers[GATE].out_features)
                setattr(part, name, replaced)
        _pack_attention(part, uses)
    return module


def unpack_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` of a packed ``module``, of whole tensors, with the names that the model had before.

    Raises:
        KeyError: a parameter of ``module`` that is packed is not in ``state``.
    """
    found = dict(state)
    for prefix, part in module.named_modules():
        packing = vars(part).get("_packing")
        for kind in ("weight", "bias") if packing is not None else ():
            layer, rows, groups = packing
            packed = f"{prefix}.{layer}.{kind}".removeprefix(".")
            if kind == "bias" and packed not in found:
                continue
            for name, tensor in unpacked_rows(found.pop(packed), rows, groups).items():
                found[f"{prefix}.{name}.{kind}".removeprefix(".")] = tensor
    return found


def packed_layers(module: nn.Module) -> int:
    """Return how many linear layers of ``module`` are packed ones."""
    return sum("_packing" in vars(part) for part in module.modules())


def tp_plan_of(module: nn.Module) -> dict[str, str] | None:
    """Return the styles by FQN pattern that ``module`` carries (``tp_plan``, as Hugging Face's do), None without any.

    A packed layer has the style of the layers that it was made from, where that is one.
    """
    carried = getattr(module, "tp_plan", None)
    if not isinstance(carried, Mapping) or not carried:
        return None
    styles = {str(pattern): str(style) for pattern, style in carried.items()}
    if not packed_layers(module):
        return styles
    found = dict(styles)
    for packed, names in ((PACKED_ATTENTION, (QUERY, KEY, VALUE)), (PACKED_GATE, (GATE, FACTOR))):
        for pattern, style in styles.items():
            stem, dot, leaf = pattern.rpartition(".")
            if leaf == names[0] and all(styles.get(f"{stem}{dot}{name}") == style for name in names):
                found[f"{stem}{dot}{packed}"] = style
    return found


def _pack_attention(part: Any, uses: Mapping[int, int]) -> None:
    layers = _layers(part, (QUERY, KEY, VALUE), uses)
    width = getattr(part, "head_dim", None)
    if layers is None or not isinstance(width, int) or not rotates(type(part).forward):
        return
    heads, kv_heads, of_values = (layer.out_features / width for layer in layers.values())
    if kv_heads != of_values or kv_heads % 1 or heads % kv_heads:
        return
    groups = int(kv_heads)
    layer = _packed(layers, groups)
    _pack_what_is_loaded(part, PACKED_ATTENTION, layers, groups)
    for name in layers:
        delattr(part, name)
    setattr(part, PACKED_ATTENTION, layer)
    projections = PackedProjections(layer, (groups, int(heads) // groups, width))
    for name in layers:
        part.__dict__[name] = PartOfProjections(projections, name)


def _layers(part: Any, names: Sequence[str], uses: Mapping[int, int]) -> _Layers | None:
    """Return the linear layers of these names if they can be packed: nobody looks at one of them alone."""
    found = {name: part._modules.get(name) for name in names}
    if any(type(layer) is not nn.Linear or _is_watched(layer, uses) for layer in found.values()):
        return None
    layers: dict[str, nn.Linear] = {name: layer for name, layer in found.items() if layer is not None}
    kinds = {
        (layer.in_features, weight.dtype, weight.device, weight.requires_grad, layer.bias is None)
        for layer in layers.values()
        for weight in layer.parameters()
    }
    return layers if len(kinds) == 1 else None


def _is_watched(layer: Any, uses: Mapping[int, int]) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer) or any(uses[id(weight)] > 1 for weight in layer.parameters())


def _have_equal_rows(layers: Iterable[nn.Linear]) -> bool:
    return len({layer.out_features for layer in layers}) == 1


def _packed(layers: _Layers, groups: int) -> nn.Linear:
    """Return one layer in place of ``layers``, in which each of ``groups`` has its share of every one's rows."""
    first = next(iter(layers.values()))
    rows = sum(layer.out_features for layer in layers.values())
    with torch.device("meta"):
        found = nn.Linear(first.in_features, rows, bias=first.bias is not None, dtype=first.weight.dtype)
    for kind, parameter in first.named_parameters():
        with torch.no_grad():
            packed = packed_rows({name: getattr(layer, kind) for name, layer in layers.items()}, groups)
        setattr(found, kind, nn.Parameter(packed, requires_grad=parameter.requires_grad))
    return found.train(first.training)


def _pack_what_is_loaded(part: Any, packed: str, layers: _Layers, groups: int) -> None:
    """Have ``part`` take weights of the layers that it had."""
    part._packing = packed, {name: layer.out_features for name, layer in layers.items()}, groups
    part.register_load_state_dict_pre_hook(_pack_state)


def _pack_state(part: Any, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    packed, rows, groups = part._packing
    for kind in ("weight", "bias"):
        names = {name: f"{prefix}{name}.{kind}" for name in rows}
        if all(name in state for name in names.values()):
            parts = {name: state.pop(key) for name, key in names.items()}
            state[f"{prefix}{packed}.{kind}"] = packed_rows(parts, groups)
