"""What each layer of a decoder keeps of earlier tokens, as transformers' own cache holds it.

Attention keeps keys and values, of all tokens or of a window, or the latents that multi-head latent attention (MLA)
computes them from. Recurrent layers (Mamba, gated delta rules, short convolutions) keep states of a fixed size.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from planner.graph.op_graph import ATTENTION, OpCache, OpGraph, build_digraph
from planner.model_rewrites.cache_argument import cache_argument
from planner.model_rewrites.mla import mla_modules

_PROMPT = 8
"""Tokens of the prompt that is run on the meta device; the size of states does not depend on it."""


def with_layer_caches(graph: OpGraph, module: nn.Module, meta: nn.Module) -> OpGraph:
    """Return ``graph`` with what the layers of ``module``, a Hugging Face decoder, keep of earlier tokens.

    Args:
        meta: the module on the meta device, in the dtype of the job.
    """
    attention, states = _attention_caches(module), _state_nbytes(module, meta)
    if not attention and not states:
        return graph
    ops = [
        dataclasses.replace(op, cache=attention[fqn])
        if op.target is ATTENTION and (fqn := _nearest(graph.calls[op.call].fqn, attention.__contains__)) is not None
        else op
        for op in graph.ops
    ]
    for fqn, nbytes in states.items():
        inside = [i for i, op in enumerate(ops) if f"{graph.calls[op.call].fqn}.".startswith(f"{fqn}.")]
        holder = next((i for i in inside if len(graph.values[ops[i].outputs[0]].shape) > 2), None)
        if holder is not None and not any(ops[i].target is ATTENTION for i in inside):
            ops[holder] = dataclasses.replace(ops[holder], cache=OpCache(state_nbytes=nbytes))
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def undecoded_layers(module: nn.Module) -> list[str]:
    """Return the kinds of layers of ``module`` whose step of decoding is not their forward over one token.

    Only attention that appends keys and values, or latents, to those of all tokens or of a window runs the same ops in
    both. Recurrent layers update states, and sparse attention chooses tokens by the keys of an indexer.
    """
    caches = _transformers_caches(module)
    if caches is None:
        return []
    appending = {caches.DynamicLayer, caches.DynamicSlidingWindowLayer, caches.DummyLayer}
    layers = caches.DynamicCache(config=module.config).layers
    return sorted({type(layer).__name__ for layer in layers if type(layer) not in appending})


def _attention_caches(module: nn.Module) -> dict[str, OpCache]:
    """Return FQN of a layer -> what its attention keeps, for layers that do not keep keys and values of all tokens."""
    latents = mla_modules(module)
    found = {
        fqn: OpCache(latents=(part.kv_lora_rank, part.qk_rope_head_dim))
        for fqn, part in module.named_modules()
        if part in latents
    }
    caches = _transformers_caches(module)
    if caches is None:
        return found
    config: Any = module.config
    kinds, arguments = caches.get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    kept = {}
    for index, (kind, given) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "dummy":
            kept[index] = 0
        elif given.get("sliding_window"):
            kept[index] = given["sliding_window"] - 1  # the token of a step is the last of its window
    windows = {fqn: OpCache(window=kept[index]) for fqn, index in _layer_indices(module).items() if index in kept}
    return windows | found


def _state_nbytes(module: nn.Module, meta: nn.Module) -> dict[str, int]:
    """Return FQN of a recurrent module -> bytes of its states for one sequence, measured on the meta device."""
    caches, argument = _transformers_caches(module), cache_argument(meta)
    if caches is None or argument is None:
        return {}
    cache = caches.DynamicCache(config=module.config)
    recurrent = [i for i, layer in enumerate(cache.layers) if isinstance(layer, caches.LinearAttentionCacheLayerMixin)]
    if not recurrent:
        return {}
    with torch.no_grad():
        meta(torch.zeros(1, _PROMPT, dtype=torch.long, device="meta"), **{argument: cache})
    nbytes = {}
    for index in recurrent:
        layer: Any = cache.layers[index]
        states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
        nbytes[index] = sum(state.nbytes for state in states if state is not None)
    layers = _layer_indices(module)
    # A block may have the index of the mixer inside it.
    inner = [fqn for fqn in layers if not any(other.startswith(f"{fqn}.") for other in layers)]
    return {fqn: nbytes[layers[fqn]] for fqn in inner if nbytes.get(layers[fqn])}


def _layer_indices(module: nn.Module) -> dict[str, int]:
    indices = {fqn: getattr(part, "layer_idx", None) for fqn, part in module.named_modules()}
    return {fqn: index for fqn, index in indices.items() if index is not None}


def _nearest(fqn: str, known: Callable[[str], bool]) -> str | None:
    """Return the innermost module of ``fqn`` and those around it that is ``known``."""
    parts = fqn.split(".")
    return next((name for n in range(len(parts), 0, -1) if known(name := ".".join(parts[:n]))), None)


def _transformers_caches(module: nn.Module) -> ModuleType | None:
    """Return transformers' module of caches; None where ``module`` has no config of transformers."""
    config = getattr(module, "config", None)
    return sys.modules.get("transformers.cache_utils") if hasattr(config, "get_text_config") else None
