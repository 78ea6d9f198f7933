"""What each layer of a decoder keeps of earlier tokens, as transformers' own cache holds it.

Attention keeps keys and values, of all tokens or of a window, or the latents that multi-head latent attention (MLA)
computes them from. Recurrent layers (Mamba, gated delta rules, short convolutions) keep states of a fixed size, as does
attention to an encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.layer_caches import decoding_step
from planner.graph.layer_caches.decoding_step import CachedState, LayerStates
from planner.graph.op_graph import ATTENTION, Op, OpCache, OpGraph, build_digraph
from planner.model_rewrites.cache_argument import (
    CROSS,
    STATES,
    cache_argument,
    is_encoder_decoder,
    recurrent_layer_numbers,
    transformers_caches,
)
from planner.model_rewrites.eager_masks import masks_as_traced, unpacked_sequences
from planner.model_rewrites.mla import mla_modules
from planner.model_rewrites.random_branches import likelier_branches

_PROMPT = 8
"""Tokens of the prompt that is run on the meta device; the size of states does not depend on it."""


def with_layer_caches(graph: OpGraph, module: nn.Module, states: LayerStates, *, decodes: bool = False) -> OpGraph:
    """Return ``graph`` with what the layers of ``module``, a model of Hugging Face, keep of earlier tokens.

    Args:
        states: the layers that keep states.
        decodes: whether the graph is of a step of decoding, in which ops hold the states.

    Raises:
        ModelError: in the step, a layer does not read its states.
    """
    attention = _attention_caches(module)
    if not attention and not states:
        return graph
    if decodes:
        _check_states_are_read(graph, module, states)
    producers = {name: op for op in graph.ops for name in op.outputs}

    def cache_of(op: Op) -> OpCache | None:
        if op.target is not ATTENTION:
            return op.cache
        if decodes and _reads_state(producers, op.inputs[1]):
            return OpCache(window=0)  # an op holds its keys and values
        fqn = _nearest(graph.calls[op.call].fqn, attention.__contains__)
        return op.cache if fqn is None else attention[fqn]

    ops = [dataclasses.replace(op, cache=cache) if (cache := cache_of(op)) != op.cache else op for op in graph.ops]
    for fqn, (_, kept) in states.items() if not decodes else ():
        inside = [i for i, op in enumerate(ops) if _is_in(graph.calls[op.call].fqn, fqn)]
        holder = next((i for i in inside if len(graph.values[ops[i].outputs[0]].shape) > 2), None)
        if holder is not None and not any(ops[i].target is ATTENTION for i in inside):
            cache = OpCache(state_nbytes=sum(state.nbytes for state in kept))
            ops[holder] = dataclasses.replace(ops[holder], cache=cache)
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def _reads_state(producers: Mapping[str, Op], name: str) -> bool:
    """Return whether a value is a state, or made of one state alone."""
    while (op := producers.get(name)) is not None and op.target_name != decoding_step.OP_NAME:
        if len(op.inputs) != 1:
            return False
        name = op.inputs[0]
    return op is not None


def _check_states_are_read(graph: OpGraph, module: nn.Module, states: LayerStates) -> None:
    """Check that every layer with states reads one in a traced step of decoding.

    Raises:
        ModelError: one does not, or is opaque.
    """
    readers = {graph.calls[op.call].fqn for op in graph.ops if op.target_name == decoding_step.OP_NAME}
    # Attention beside a recurrent layer, in one block, has its number.
    reading = {number for fqn, (number, _) in states.items() if any(_is_in(reader, fqn) for reader in readers)}
    for fqn, (number, _) in states.items():
        if number not in reading:
            raise ModelError(
                f"decoding with {type(module).__name__} cannot be planned yet: in a step, {fqn} does not read its "
                "state from the cache, or cannot be traced.",
                what_to_do='Plan its forward pass (phase="prefill").',
                module=fqn,
            )


def _is_in(fqn: str, outer: str) -> bool:
    return f"{fqn}.".startswith(f"{outer}.")


def undecoded_layers(module: nn.Module) -> list[str]:
    """Return the kinds of layers of ``module`` whose step of decoding cannot be traced.

    Attention appends keys and values, or latents, to those of all tokens or of a window, and recurrent layers update
    states. Sparse attention chooses tokens by the keys of an indexer.
    """
    caches = transformers_caches(module)
    if caches is None:
        return []
    appending = {caches.DynamicLayer, caches.DynamicSlidingWindowLayer, caches.DummyLayer}
    layers = caches.DynamicCache(config=module.config).layers
    others = [layer for layer in layers if type(layer) not in appending]
    return sorted(
        {type(layer).__name__ for layer in others if not isinstance(layer, caches.LinearAttentionCacheLayerMixin)}
    )


def _attention_caches(module: nn.Module) -> dict[str, OpCache]:
    """Return FQN of a layer -> what its attention keeps, for layers that do not keep keys and values of all tokens."""
    latents = mla_modules(module)
    found = {
        fqn: OpCache(latents=(part.kv_lora_rank, part.qk_rope_head_dim))
        for fqn, part in module.named_modules()
        if part in latents
    }
    caches = transformers_caches(module)
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


def layer_states(module: nn.Module, meta: nn.Module, call: Mapping[str, Any]) -> LayerStates:
    """Return the layers that keep states of a fixed size, measured by a call on the meta device.

    They are recurrent layers, and attention of a decoder to its encoder.

    Args:
        module: the model; others than Hugging Face's have no such layers.
        meta: the same on the meta device, in the dtype of the job.
        call: keyword arguments of a call with one sequence; only an encoder-decoder is called with them.

    Raises:
        ModelError: it does not run with a cache.
    """
    caches, argument, recurrent = transformers_caches(module), cache_argument(meta), recurrent_layer_numbers(module)
    if caches is None or argument is None or not (recurrent or is_encoder_decoder(module)):
        return {}
    try:
        with torch.no_grad(), likelier_branches(), unpacked_sequences(), masks_as_traced():
            if is_encoder_decoder(module):
                kept = _cross_states(meta(**{**call, "use_cache": True})[argument])
            else:
                cache = caches.DynamicCache(config=module.config)
                meta(torch.zeros(1, _PROMPT, dtype=torch.long, device="meta"), **{argument: cache})
                kept = {number: _states(cache.layers[number]) for number in recurrent}
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__} does not run with transformers' cache: {str(error).splitlines()[0]}",
            what_to_do="Correct its config: a call with use_cache=True has to run.",
        ) from error
    layers = _layer_indices(module)
    # A block may have the index of the mixer inside it.
    inner = [fqn for fqn in layers if not any(other.startswith(f"{fqn}.") for other in layers)]
    return {fqn: (layers[fqn], kept[layers[fqn]]) for fqn in inner if kept.get(layers[fqn])}


def _cross_states(cache: Any) -> dict[int, tuple[CachedState, ...]]:
    """Return number of a layer -> keys and values of the encoder's results."""
    layers = getattr(getattr(cache, CROSS, None), "layers", ())
    return {
        number: tuple(
            CachedState(f"{CROSS}.{name}", tuple(held.shape[1:]), held.dtype)
            for name in ("keys", "values")
            if isinstance(held := getattr(layer, name, None), torch.Tensor)
        )
        for number, layer in enumerate(layers)
    }


def _states(layer: Any) -> tuple[CachedState, ...]:
    return tuple(
        CachedState(f"{name}.{number}", tuple(state.shape[1:]), state.dtype)
        for name in STATES
        for number, state in getattr(layer, name).items()
        if state is not None
    )


def _layer_indices(module: nn.Module) -> dict[str, int]:
    indices = {fqn: getattr(part, "layer_idx", None) for fqn, part in module.named_modules()}
    return {fqn: index for fqn, index in indices.items() if index is not None}


def _nearest(fqn: str, known: Callable[[str], bool]) -> str | None:
    """Return the innermost module of ``fqn`` and those around it that is ``known``."""
    parts = fqn.split(".")
    return next((name for n in range(len(parts), 0, -1) if known(name := ".".join(parts[:n]))), None)
