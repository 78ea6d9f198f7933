"""What each layer of a decoder keeps of earlier tokens, as transformers' own cache holds it.

Attention keeps keys and values, of all tokens or of a window, or the latents that multi-head latent attention (MLA)
computes them from. Recurrent layers (Mamba, gated delta rules, short convolutions) keep states of a fixed size, as does
attention to an encoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.capture import masks_select_all
from planner.graph.layer_caches import decoding_step
from planner.graph.layer_caches.decoding_step import CachedState, LayerStates
from planner.graph.op_graph import ATTENTION, Op, OpCache, OpGraph, build_digraph
from planner.model_rewrites import opaque_op
from planner.model_rewrites.cache_argument import (
    CROSS,
    KEYS,
    SHORT_PROMPT,
    STATES,
    VALUES,
    cache_argument,
    is_encoder_decoder,
    layer_number,
    recurrent_layer_numbers,
    transformers_caches,
)
from planner.model_rewrites.eager_masks import masks_as_traced, unpacked_sequences
from planner.model_rewrites.mla import mla_modules
from planner.model_rewrites.random_branches import likelier_branches

_PRODUCTS = ("aten.linear", "aten.addmm", "aten.matmul", "aten.mm")
"""Beginnings of the names of ops by which layers project."""


def with_layer_caches(graph: OpGraph, module: nn.Module, states: LayerStates, *, decodes: bool = False) -> OpGraph:
    """Return ``graph`` with what the layers of ``module``, a model of Hugging Face, keep of earlier tokens.

    Args:
        states: the layers that keep states.
        decodes: whether the graph is of a step of decoding, in which ops hold the states.

    Raises:
        ModelError: in the step, a layer does not read its states.
    """
    attention = _attention_caches(module)
    if decodes:
        _check_states_are_read(graph, module, states)
    producers = _producers(graph)
    keeping = {op.name for op in graph.ops if op.target is ATTENTION}
    if not decodes:
        keeping &= {op.name for op in _attention_that_keeps(graph, module)}

    def cache_of(op: Op) -> OpCache | None:
        if op.target is not ATTENTION:
            return op.cache
        if op.name not in keeping or (decodes and _reads_state(producers, op.inputs[1])):
            return OpCache(window=0)  # in a step, an op holds its keys and values
        fqn = _nearest(graph.calls[op.call].fqn, attention.__contains__)
        return op.cache if fqn is None else attention[fqn]

    ops = [dataclasses.replace(op, cache=cache) if (cache := cache_of(op)) != op.cache else op for op in graph.ops]
    for fqn, (_, kept) in states.items() if not decodes else ():
        nbytes = sum(state.nbytes for state in kept)
        inside = [i for i, op in enumerate(ops) if _is_in(graph.calls[op.call].fqn, fqn)]
        if kept[0].place == KEYS:
            holder = _maker_of_keys(graph, ops, inside, kept[0]) if inside else _opaque_around(graph, ops, fqn)
            if holder is not None:
                before = ops[holder].cache or OpCache()
                ops[holder] = dataclasses.replace(ops[holder], cache=OpCache(kv_nbytes=before.kv_nbytes + nbytes))
        elif not any(ops[i].target is ATTENTION for i in inside):
            holder = next((i for i in inside if len(graph.values[ops[i].outputs[0]].shape) > 2), None)
            if holder is not None:
                ops[holder] = dataclasses.replace(ops[holder], cache=OpCache(state_nbytes=nbytes))
    return dataclasses.replace(graph, digraph=build_digraph(ops))


def _attention_that_keeps(graph: OpGraph, module: nn.Module) -> list[Op]:
    """Return the ops of attention that keep keys and values of a prompt: those of a decoder, not of an encoder.

    An encoder of images is known by its layers, which have no number in the cache. Where no layer has one, all keep.
    """
    encoder, numbers = _encoder(module), _decoder_numbers(module)
    fqns = {op.name: graph.calls[op.call].fqn for op in graph.ops if op.target is ATTENTION}
    ops = [op for op in graph.ops if op.name in fqns and (encoder is None or not _is_in(fqns[op.name], encoder))]
    numbered = [op for op in ops if _nearest(fqns[op.name], numbers.__contains__) is not None]
    return numbered or ops


def _encoder(module: nn.Module) -> str | None:
    """Return the FQN of the encoder of an encoder-decoder; None for others."""
    get_encoder: Any = getattr(module, "get_encoder", None)
    if get_encoder is None or not is_encoder_decoder(module):
        return None
    encoder = get_encoder()
    return next((fqn for fqn, part in module.named_modules() if part is encoder and fqn), None)


def _decoder_numbers(module: nn.Module) -> dict[str, int]:
    """Return FQN of a layer -> its number in the cache, without those of an encoder, which keep nothing."""
    encoder = _encoder(module)
    numbers = _layer_numbers(module)
    return {fqn: n for fqn, n in numbers.items() if encoder is None or not _is_in(fqn, encoder)}


def states_after_prompt(graph: OpGraph, module: nn.Module, cache: Any, tokens: int) -> LayerStates:
    """Return what layers of an encoder-decoder keep of a prompt whose attention is no single op.

    Args:
        graph: the traced model.
        module: the model.
        cache: transformers' cache after a call with one sequence; None: not known.
        tokens: tokens of a sequence of the decoder.
    """
    eager, cross = set(eager_attention(graph, module, cache)), _cross_states(cache)
    single = {graph.calls[op.call].fqn for op in _attention_that_keeps(graph, module)}
    innermost = _innermost(module)
    layers: dict[int, list[str]] = {}
    for fqn, number in _decoder_numbers(module).items():
        if fqn in innermost:
            layers.setdefault(number, []).append(fqn)
    kept: dict[str, tuple[int, tuple[CachedState, ...]]] = {}
    for number, fqns in layers.items():
        if number in eager:
            states = with_keys_and_values({}, module, cache, [number], tokens)
            kept[fqns[0]] = states[fqns[0]]
        # A layer's attention to the encoder comes behind that to its own tokens.
        if number in cross and not any(_is_in(op, fqns[-1]) for op in single):
            states_of_cross = tuple(
                state._replace(place=state.place.removeprefix(f"{CROSS}.")) for state in cross[number]
            )
            kept[fqns[-1]] = (number, (*kept.get(fqns[-1], (number, ()))[1], *states_of_cross))
    return kept


def has_caches(graph: OpGraph) -> bool:
    """Return whether the graph of a trace for inference says of any layer what it keeps."""
    return any(op.target is ATTENTION or op.cache or op.target_name == decoding_step.OP_NAME for op in graph.ops)


def _maker_of_keys(graph: OpGraph, ops: Sequence[Op], inside: Sequence[int], keys: CachedState) -> int | None:
    """Return the number of the op that makes the keys of a layer, or that makes them with queries and values.

    Args:
        graph: the graph.
        ops: its ops.
        inside: numbers of those in the layer.
        keys: the layer's keys of one sequence, [heads, tokens, width].
    """
    products = [i for i in inside if ops[i].target_name.startswith(_PRODUCTS)]
    width = keys.sizes[0] * keys.sizes[2]
    of_width = (i for i in products if graph.values[ops[i].outputs[0]].shape[-1] == width)
    return next(of_width, next(iter(products), None))


def _opaque_around(graph: OpGraph, ops: Sequence[Op], fqn: str) -> int | None:
    """Return the number of the op of an opaque module that the module ``fqn`` is in."""
    opaque = (i for i, op in enumerate(ops) if op.target_name == opaque_op.OP_NAME)
    return next((i for i in opaque if _is_in(fqn, graph.calls[ops[i].call].fqn)), None)


def eager_attention(graph: OpGraph, module: nn.Module, cache: Any) -> list[int]:
    """Return the numbers of the layers whose attention is no single op of ``graph``, and that keep keys and values.

    Such attention (with sinks, or with soft-capped scores) runs op by op.

    Args:
        graph: the traced model.
        module: the model.
        cache: transformers' cache after a call.
    """
    layers = _self_attention(cache).layers if cache is not None else []
    keeping = {n for n, layer in enumerate(layers) if isinstance(getattr(layer, KEYS, None), torch.Tensor)}
    numbers, producers = _layer_numbers(module), _producers(graph)
    ops = [op for op in _attention_that_keeps(graph, module) if not _reads_state(producers, op.inputs[1])]
    if len(ops) >= len(keeping):
        return []
    nearest = (_nearest(graph.calls[op.call].fqn, numbers.__contains__) for op in ops)
    return sorted(keeping.intersection(numbers.values()).difference(numbers[fqn] for fqn in nearest if fqn is not None))


def with_keys_and_values(
    states: LayerStates, module: nn.Module, cache: Any, layers: Sequence[int], earlier: int
) -> LayerStates:
    """Return ``states`` with the keys and values of some layers.

    Args:
        states: the layers that keep states.
        module: the model.
        cache: transformers' cache after a call with one sequence.
        layers: numbers of layers of attention.
        earlier: tokens of each sequence before the step, or of the prompt.
    """
    kept: dict[int, tuple[CachedState, ...]] = {}
    for number in layers:
        layer = _self_attention(cache).layers[number]
        most = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else earlier + 1
        kept[number] = tuple(
            CachedState(name, (held.shape[1], min(earlier, most), held.shape[3]), held.dtype, grows=earlier < most)
            for name, held in ((KEYS, layer.keys), (VALUES, layer.values))
        )
    added = {fqn: (number, kept[number]) for fqn, number in _innermost(module).items() if number in kept}
    return {**states, **{fqn: (n, (*states.get(fqn, (n, ()))[1], *each)) for fqn, (n, each) in added.items()}}


def _self_attention(cache: Any) -> Any:
    return getattr(cache, "self_attention_cache", cache)


def _producers(graph: OpGraph) -> dict[str, Op]:
    return {name: op for op in graph.ops for name in op.outputs}


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
    windows = {fqn: OpCache(window=kept[index]) for fqn, index in _layer_numbers(module).items() if index in kept}
    return windows | found


def filled_cache(module: nn.Module, meta: nn.Module, call: Mapping[str, Any]) -> Any:
    """Return transformers' cache after a call with one sequence on the meta device; None where there is no such cache.

    Where no layer has states, the result is None too if the call fails, as calls that depend on values do.

    Args:
        module: the model.
        meta: the same on the meta device, in the dtype of the job.
        call: keyword arguments of a call with one sequence; only an encoder-decoder is called with them.

    Raises:
        ModelError: a model with states does not run with a cache.
    """
    caches, argument = transformers_caches(module), cache_argument(meta)
    if caches is None or argument is None:
        return None
    try:
        with torch.no_grad(), likelier_branches(), unpacked_sequences(), masks_as_traced(), masks_select_all():
            if is_encoder_decoder(module):
                return meta(**{**call, "use_cache": True})[argument]
            config: Any = module.config
            cache = caches.DynamicCache(config=config)
            meta(torch.zeros(1, SHORT_PROMPT, dtype=torch.long, device="meta"), **{argument: cache})
            return cache
    except Exception as error:
        if not recurrent_layer_numbers(module) and not is_encoder_decoder(module):
            return None
        raise ModelError(
            f"{type(module).__name__} does not run with transformers' cache: {str(error).splitlines()[0]}",
            what_to_do="Correct its config: a call with use_cache=True has to run.",
        ) from error


def layer_states(module: nn.Module, cache: Any) -> LayerStates:
    """Return the layers that keep states of a fixed size: recurrent layers, and attention of a decoder to its encoder.

    Args:
        module: the model.
        cache: the result of `filled_cache`.
    """
    if is_encoder_decoder(module):
        kept = _cross_states(cache)
    else:
        kept = {} if cache is None else {n: _states(cache.layers[n]) for n in recurrent_layer_numbers(module)}
    return {fqn: (number, kept[number]) for fqn, number in _innermost(module).items() if kept.get(number)}


def _cross_states(cache: Any) -> dict[int, tuple[CachedState, ...]]:
    """Return number of a layer -> keys and values of the encoder's results."""
    layers = getattr(getattr(cache, CROSS, None), "layers", ())
    return {
        number: tuple(
            CachedState(f"{CROSS}.{name}", tuple(held.shape[1:]), held.dtype)
            for name in (KEYS, VALUES)
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


def _layer_numbers(module: nn.Module) -> dict[str, int]:
    numbers = {fqn: layer_number(part) for fqn, part in module.named_modules()}
    return {fqn: number for fqn, number in numbers.items() if number is not None}


def _innermost(module: nn.Module) -> dict[str, int]:
    """Return FQN of a layer -> its number in the cache. A block may have the number of the layer inside it."""
    numbers = _layer_numbers(module)
    return {fqn: n for fqn, n in numbers.items() if not any(other.startswith(f"{fqn}.") for other in numbers)}


def _nearest(fqn: str, known: Callable[[str], bool]) -> str | None:
    """Return the innermost module of ``fqn`` and those around it that is ``known``."""
    parts = fqn.split(".")
    return next((name for n in range(len(parts), 0, -1) if known(name := ".".join(parts[:n]))), None)
