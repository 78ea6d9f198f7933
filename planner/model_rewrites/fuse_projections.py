"""Fused projections: Q, K and V as one linear layer, gate and up of a gated MLP as another.

One GEMM replaces two or three, and one gradient of the input replaces two or three. Fusing changes the names of the
model's parameters (see `fused_projection_modules`); the model is planned, sharded and saved under the new names.
Modules are recognised as in `fuse_ops`. Only plain linear layers that are used nowhere else are fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.model_rewrites.fuse_ops import gated_mlp_activation, uses_rotary
from planner.model_rewrites.fused_projection_modules import (
    FUSED_GATE_UP,
    FUSED_QKV,
    GATE,
    KEY,
    QUERY,
    UP,
    VALUE,
    FusedGateUpMLP,
    FusedQKV,
    FusedQKVOutput,
    interleave_rows,
    split_rows,
)

_Layers = Mapping[str, nn.Linear]


class _FusedLayer(NamedTuple):
    """A module's fused layer: its name, old layer -> number of rows, and the number of groups of interleaved rows."""

    name: str
    rows: Mapping[str, int]
    groups: int


def fuse_projections(module: nn.Module) -> nn.Module:
    """Return ``module``, changed in place: linear layers that read the same tensor become one layer.

    The forward computes the same, up to rounding. Call this function before the optimizer is made, and before
    `build_plan` and `shard_module`. ``load_state_dict`` accepts weights under the old names, and `unfuse_state_dict`
    returns weights under the old names. Layers with hooks, adapters or shared weights stay unchanged.
    """
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            activation = gated_mlp_activation(child)
            layers = _fusible_layers(child, (GATE, UP), uses)
            if activation is not None and layers is not None and _have_equal_rows(layers.values()):
                fused = _fused_linear(layers, groups=layers[GATE].out_features)
                mlp = FusedGateUpMLP(child, fused, activation).train(child.training)
                _fuse_on_load(mlp, FUSED_GATE_UP, layers, groups=layers[GATE].out_features)
                setattr(part, name, mlp)
        _fuse_attention(part, uses)
    return module


def unfuse_state_dict(module: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` under the names that the parameters had before `fuse_projections`.

    Args:
        module: the model with fused projections.
        state: its state dict, of unsharded tensors.

    Raises:
        KeyError: a fused parameter of ``module`` is missing from ``state``.
    """
    unfused = dict(state)
    for prefix, part in module.named_modules():
        layer: _FusedLayer | None = vars(part).get("_fused_layer")
        for kind in ("weight", "bias") if layer is not None else ():
            assert layer is not None
            name = f"{prefix}.{layer.name}.{kind}".removeprefix(".")
            if kind == "bias" and name not in unfused:
                continue
            for old_layer, tensor in split_rows(unfused.pop(name), layer.rows, layer.groups).items():
                unfused[f"{prefix}.{old_layer}.{kind}".removeprefix(".")] = tensor
    return unfused


class FusedParameter(NamedTuple):
    """A parameter of a fused layer: old name of each part -> number of its rows, and the number of groups of rows."""

    rows: Mapping[str, int]
    groups: int


def fused_parameters(module: nn.Module) -> dict[str, FusedParameter]:
    """Return name -> parts of each parameter of ``module`` that `fuse_projections` made, all names from the root."""
    fused: dict[str, FusedParameter] = {}
    for prefix, part in module.named_modules():
        layer: _FusedLayer | None = vars(part).get("_fused_layer")
        if layer is None:
            continue
        for kind, _ in part.get_submodule(layer.name).named_parameters(recurse=False):
            rows = {f"{prefix}.{old}.{kind}".removeprefix("."): count for old, count in layer.rows.items()}
            fused[f"{prefix}.{layer.name}.{kind}".removeprefix(".")] = FusedParameter(rows, layer.groups)
    return fused


def count_fused_projections(module: nn.Module) -> int:
    """Return the number of linear layers of ``module`` that `fuse_projections` made."""
    return sum("_fused_layer" in vars(part) for part in module.modules())


def carried_tp_plan(module: nn.Module) -> dict[str, str] | None:
    """Return the tensor-parallel styles by FQN pattern in ``module.tp_plan`` (Hugging Face); None without any.

    A fused layer gets the style of the layers that it replaces, if all of them have the same style.
    """
    carried = getattr(module, "tp_plan", None)
    if not isinstance(carried, Mapping) or not carried:
        return None
    styles = {str(pattern): str(style) for pattern, style in carried.items()}
    return styles_with_fused(styles) if count_fused_projections(module) else styles


def styles_with_fused(styles: Mapping[str, str]) -> dict[str, str]:
    """Return ``styles`` by FQN pattern, with the styles of the fused layers that replace layers in it."""
    with_fused = dict(styles)
    for fused, names in ((FUSED_QKV, (QUERY, KEY, VALUE)), (FUSED_GATE_UP, (GATE, UP))):
        for pattern, style in styles.items():
            stem, dot, leaf = pattern.rpartition(".")
            if leaf == names[0] and all(styles.get(f"{stem}{dot}{name}") == style for name in names):
                with_fused[f"{stem}{dot}{fused}"] = style
    return with_fused


def _fuse_attention(attention: Any, uses: Mapping[int, int]) -> None:
    layers = _fusible_layers(attention, (QUERY, KEY, VALUE), uses)
    width = getattr(attention, "head_dim", None)
    if layers is None or not isinstance(width, int) or not uses_rotary(type(attention).forward):
        return
    heads, key_heads, value_heads = (layer.out_features / width for layer in layers.values())
    if key_heads != value_heads or key_heads % 1 or heads % key_heads:
        return
    groups = int(key_heads)
    fused = _fused_linear(layers, groups)
    _fuse_on_load(attention, FUSED_QKV, layers, groups)
    for name in layers:
        delattr(attention, name)
    setattr(attention, FUSED_QKV, fused)
    qkv = FusedQKV(fused, (groups, int(heads) // groups, width))
    for name in layers:
        attention.__dict__[name] = FusedQKVOutput(qkv, name)


def _fusible_layers(part: Any, names: Sequence[str], uses: Mapping[int, int]) -> _Layers | None:
    """Return the linear layers of these names; None if they cannot be fused: they differ, or are used elsewhere."""
    modules = {name: part._modules.get(name) for name in names}
    if any(type(layer) is not nn.Linear or _is_used_elsewhere(layer, uses) for layer in modules.values()):
        return None
    layers: dict[str, nn.Linear] = {name: layer for name, layer in modules.items() if layer is not None}
    kinds = {
        (layer.in_features, weight.dtype, weight.device, weight.requires_grad, layer.bias is None)
        for layer in layers.values()
        for weight in layer.parameters()
    }
    return layers if len(kinds) == 1 else None


def _is_used_elsewhere(layer: Any, uses: Mapping[int, int]) -> bool:
    """Return whether a layer has hooks, a forward of its own (adapters), or a weight that other modules share."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer) or any(uses[id(weight)] > 1 for weight in layer.parameters())


def _have_equal_rows(layers: Iterable[nn.Linear]) -> bool:
    return len({layer.out_features for layer in layers}) == 1


def _fused_linear(layers: _Layers, groups: int) -> nn.Linear:
    """Return one linear layer with the rows of all ``layers``, as `interleave_rows` orders them."""
    first = next(iter(layers.values()))
    rows = sum(layer.out_features for layer in layers.values())
    with torch.device("meta"):
        fused = nn.Linear(first.in_features, rows, bias=first.bias is not None, dtype=first.weight.dtype)
    for kind, parameter in first.named_parameters():
        with torch.no_grad():
            weight = interleave_rows({name: getattr(layer, kind) for name, layer in layers.items()}, groups)
        setattr(fused, kind, nn.Parameter(weight, requires_grad=parameter.requires_grad))
    return fused.train(first.training)


def _fuse_on_load(part: Any, name: str, layers: _Layers, groups: int) -> None:
    """Let ``part.load_state_dict`` accept the weights of the layers that the layer called ``name`` replaces."""
    part._fused_layer = _FusedLayer(name, {old: layer.out_features for old, layer in layers.items()}, groups)
    part.register_load_state_dict_pre_hook(_fuse_state)


def _fuse_state(part: Any, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    """Replace the old layers' weights in ``state`` by the fused layer's: a pre-hook of ``load_state_dict``."""
    layer: _FusedLayer = part._fused_layer
    for kind in ("weight", "bias"):
        keys = {name: f"{prefix}{name}.{kind}" for name in layer.rows}
        if all(key in state for key in keys.values()):
            parts = {name: state.pop(key) for name, key in keys.items()}
            state[f"{prefix}{layer.name}.{kind}"] = interleave_rows(parts, layer.groups)
