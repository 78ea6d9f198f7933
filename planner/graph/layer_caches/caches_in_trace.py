"""A trace for inference, whose graph says what the layers keep of earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import JobError, ModelError
from planner.graph.example_inputs import own_cache
from planner.graph.layer_caches.decoding_step import decoding_step, growing_tokens
from planner.graph.layer_caches.kept import (
    eager_attention,
    filled_cache,
    has_caches,
    layer_states,
    states_after_prompt,
    with_keys_and_values,
    with_layer_caches,
)
from planner.graph.op_graph import OpGraph
from planner.model_rewrites.cache_argument import is_encoder_decoder, recurrent_layer_numbers

T = TypeVar("T")


def trace_with_caches(
    module: nn.Module,
    meta: nn.Module,
    call: Mapping[str, Any],
    trace: Callable[[], tuple[OpGraph, T]],
    *,
    earlier: int | None,
) -> tuple[OpGraph, T]:
    """Return the result of ``trace``, with what the layers keep.

    A step is traced again where its attention runs op by op: its ops then read keys and values of all tokens.

    Args:
        module: the model, of Hugging Face.
        meta: the same on the meta device, in the dtype of the job, which ``trace`` traces.
        call: keyword arguments of a call with one sequence.
        trace: gives a graph of ``meta``, and anything else.
        earlier: tokens of each sequence before a step of decoding; None: the trace is of a prompt.

    Raises:
        JobError: the model keeps states elsewhere than in transformers' usual cache.
        ModelError: it does not run with a cache, or does not read its states, or nothing is known of a cache.
    """
    decodes = earlier is not None
    if is_encoder_decoder(module) and not decodes:
        graph, rest = trace()
        cache = None
        with suppress(ModelError):  # without a call by keyword, what is one op counts alone
            cache = filled_cache(module, meta, call)
        states = states_after_prompt(graph, module, cache, _tokens_of(call))
        return with_layer_caches(graph, module, states), rest
    cache = filled_cache(module, meta, call)
    states = layer_states(module, cache)
    if decodes and not states and (recurrent_layer_numbers(module) or is_encoder_decoder(module)):
        raise own_cache(module)
    with decoding_step(meta, states if decodes else {}, earlier or 0):
        graph, rest = trace()
    eager = eager_attention(graph, module, cache)
    if eager:
        tokens = earlier if earlier is not None else _tokens_of(call)
        states = with_keys_and_values(states, module, cache, eager, tokens)
        if decodes:
            with decoding_step(meta, states, tokens):
                graph, rest = trace()
    graph = with_layer_caches(graph, module, states, decodes=decodes)
    if decodes and not has_caches(graph):
        raise ModelError(
            f"decoding with {type(module).__name__} cannot be planned yet: what its layers keep is not known.",
            what_to_do='Plan its forward pass (phase="prefill").',
        )
    return graph, rest


def _tokens_of(call: Mapping[str, Any]) -> int:
    """Return the tokens of a decoder's sequence in the arguments of a call; 0 where no argument is of tokens."""
    leaves = pytree.tree_leaves(call.get("decoder_input_ids", dict(call)))
    tokens = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.long and leaf.dim() == 2
    ]
    return int(tokens[0].shape[1]) if tokens else 0


def check_tokens(graph: OpGraph, name: str, tokens: int | None) -> None:
    """Check that the graph of a step of decoding is for ``tokens`` earlier tokens, where that matters.

    Raises:
        JobError: it was traced for another number.
    """
    traced = {growing_tokens(op) for op in graph.ops} - {0}
    if tokens is not None and traced - {tokens}:
        raise JobError(
            f"the graph of {name} was traced for {max(traced)} tokens in the cache, and the job has {tokens}.",
            what_to_do="Trace the model for this job: trace_module(module, batch=..., seq=..., phase=...).",
            field="seq",
        )
