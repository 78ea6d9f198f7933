"""A step of decoding, traced: one token of each sequence, with the states of layers among what it reads.

With a state, a recurrent layer runs other ops than over a prompt, and attention to an encoder does not compute the
encoder's keys and values. A state is the result of an op without work, `cached_state`, so that the planner chooses its
layout like that of any activation.

Attention that is one op runs over the new token alone: `planner.profile` adds those before it. Where it is many ops,
their keys and values are states too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.op_graph import Op
from planner.model_rewrites.cache_argument import (
    CROSS,
    KEYS,
    STATES,
    VALUES,
    cache_argument,
    is_cache,
    is_encoder_decoder,
    transformers_caches,
)
from planner.model_rewrites.tree_paths import tensors_in

OP_NAME = "shardplan.cached_state.default"
APPEND = "shardplan.with_new_token.default"


@torch.library.custom_op("shardplan::cached_state", mutates_args=())
def cached_state(
    tokens: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, path: str, grows: bool
) -> torch.Tensor:
    """Return what a layer keeps of each sequence.

    Args:
        tokens: the layer's input, [batch, ...].
        sizes: shape of what it keeps of one sequence.
        dtype: its dtype.
        path: the layer's argument and where in it the state is, as in ``cache.conv_states.0``.
        grows: whether the step appends a token, along dim 2 of the result.

    Returns:
        a tensor [batch, *sizes].
    """
    return tokens.new_empty((tokens.shape[0], *sizes), dtype=dtype)


@cached_state.register_fake
def _(tokens: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, path: str, grows: bool) -> torch.Tensor:
    return tokens.new_empty((tokens.shape[0], *sizes), dtype=dtype)


@torch.library.custom_op("shardplan::with_new_token", mutates_args=())
def with_new_token(earlier: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return keys or values with those of the new token, as transformers concatenates them.

    What it returns is in the cache after the step, so that it has the layout of ``earlier``.

    Args:
        earlier: [batch, heads, tokens, width].
        new: [batch, heads, 1, width].
    """
    return torch.cat([earlier, new], dim=-2)


with_new_token.register_fake(lambda earlier, new: torch.cat([earlier, new], dim=-2))


def growing_tokens(op: Op) -> int:
    """Return the earlier tokens in keys or values that ``op`` stands for, if the step adds one; 0 for other ops."""
    return int(op.args[1][1]) if op.target_name == OP_NAME and op.args[4] else 0


def is_well_formed(op: Op) -> bool:
    """Return whether a `cached_state` that was sent has the arguments of one that was traced."""
    if len(op.args) != 5 or op.kwargs:
        return False
    _, sizes, _, path, grows = op.args
    place = path.partition(".")[2]
    name, _, number = place.partition(".")
    is_state = name in STATES and number.isdecimal()
    is_kept = place in (KEYS, VALUES, f"{CROSS}.{KEYS}", f"{CROSS}.{VALUES}")
    return (is_state or is_kept) and (not grows or (len(sizes) == 3 and sizes[1] > 0))


def state_path(op: Op) -> str | None:
    """Return the path of the state that ``op`` stands for; None for other ops.

    A plan has the state's layout under this path among the inputs of the layer.
    """
    return str(op.args[3]) if op.target_name == OP_NAME else None


class CachedState(NamedTuple):
    """What one layer keeps under one name.

    Attributes:
        place: where it is in the layer's part of the cache: `STATES` and a number, or `KEYS` or `VALUES`, after `CROSS`
            where they are of an encoder's results.
        sizes: its shape for one sequence.
        grows: whether it has one token more after the step.
    """

    place: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    grows: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return int(torch.Size(self.sizes).numel()) * self.dtype.itemsize


LayerStates = Mapping[str, tuple[int, tuple[CachedState, ...]]]
"""FQN of a layer -> its number in the cache, and its states."""


@contextmanager
def decoding_step(module: nn.Module, layers: LayerStates, earlier: int) -> Iterator[None]:
    """Within this context, a call of ``module``, a model of Hugging Face, is a step of decoding.

    An encoder-decoder then gets what its encoder made, in place of the encoder's inputs.

    Args:
        module: the model.
        layers: its layers that keep states.
        earlier: tokens of each sequence before the step; only layers that keep keys and values as states read it.
    """
    argument = cache_argument(module)
    if not layers or argument is None:
        yield
        return
    calls: dict[int, _LayerCall] = {}
    states = dict(layers.values())

    def with_cache(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        calls.clear()
        if is_encoder_decoder(module):
            tokens = kwargs["decoder_input_ids"]
            kwargs = {name: value for name, value in kwargs.items() if name != root.main_input_name}
            kwargs["encoder_outputs"] = (tokens.new_empty((len(tokens), 1, 1), dtype=torch.float32),)  # nobody reads it
        return args, {**kwargs, "use_cache": True, argument: _cache(module, states, calls, earlier)}

    def noting(number: int) -> Callable[..., None]:
        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature(layer.forward).bind_partial(*args, **kwargs).arguments
            tensors = tensors_in((args, kwargs))
            tokens = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1), None)
            cache = next((name for name, value in given.items() if is_cache(value)), None)
            if tokens is not None and cache is not None:
                calls[number] = _LayerCall(tokens, cache)

        return note

    with ExitStack() as hooks:
        for fqn, (number, _) in layers.items():
            handle = module.get_submodule(fqn).register_forward_pre_hook(noting(number), with_kwargs=True)
            hooks.callback(handle.remove)
        hooks.callback(module.register_forward_pre_hook(with_cache, with_kwargs=True).remove)
        yield


class _LayerCall(NamedTuple):
    """The call of a layer with number: its input, and the name of the argument that is the cache."""

    tokens: torch.Tensor
    cache: str


def _cache(
    module: nn.Module, states: Mapping[int, Sequence[CachedState]], calls: Mapping[int, _LayerCall], earlier: int
) -> Any:
    """Return a cache of transformers in which layers have states, and other attention keeps nothing.

    Args:
        module: the model.
        states: number of a layer -> its states.
        calls: number of a layer -> its call, once it is called.
        earlier: tokens of each sequence before the step.
    """
    caches: Any = transformers_caches(module)
    config: Any = module.config
    config = config.get_text_config(decoder=True)
    cache = caches.DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        made = {state.place: _Made(state, calls, number) for state in states.get(number, ())}
        layer.update = _as_given
        if KEYS in made:
            _add_keys_and_values(layer, made[KEYS], made[VALUES], earlier)
        for place, state in made.items():
            name, _, index = place.partition(".")
            if name in STATES:
                _add_state(layer, name, int(index), state)
    if not is_encoder_decoder(module):
        return cache
    cross = caches.DynamicCache(config=config)
    cross.layers = [_CrossAttention(states.get(number, ()), calls, number) for number in range(len(cache.layers))]
    both = caches.EncoderDecoderCache(cache, caches.DynamicCache(config=config))
    both.cross_attention_cache, both.is_updated = cross, dict.fromkeys(range(len(cache.layers)), True)
    return both


def _add_state(layer: Any, name: str, index: int, made: _Made) -> None:
    """Give a recurrent layer of a cache one more state."""
    held = getattr(layer, name)
    if not isinstance(held, _States):
        held = _States(held)
        setattr(layer, name, held)
    held[index] = made
    getattr(layer, f"is_{name}_initialized")[index] = True
    layer.has_previous_state[index] = True
    if name == STATES[0]:
        layer.conv_kernel_size[index] = made.state.sizes[-1]


def _add_keys_and_values(layer: Any, keys: _Made, values: _Made, earlier: int) -> None:
    """Give a layer of attention the keys and values of earlier tokens, to which it appends the new ones."""

    def update(new_keys: torch.Tensor, new_values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        both = (keys, new_keys), (values, new_values)
        keys_and_values = [torch.ops.shardplan.with_new_token(state.get(), new) for state, new in both]
        return keys_and_values[0], keys_and_values[1]

    layer.update, layer.get_seq_length = update, lambda: earlier
    layer.is_initialized, layer.cumulative_length = True, earlier


def _as_given(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Update a layer of attention: there is nothing but the new keys and values."""
    return keys, values


@dataclass(slots=True)
class _Made:
    """A state that the op `cached_state` makes when its layer first reads it."""

    state: CachedState
    calls: Mapping[int, _LayerCall]
    layer: int
    value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.value is None:
            if self.layer not in self.calls:
                raise ModelError(f"what layer {self.layer} keeps is read outside of the layer.")
            call, state = self.calls[self.layer], self.state
            path = f"{call.cache}.{state.place}"
            self.value = torch.ops.shardplan.cached_state(call.tokens, state.sizes, state.dtype, path, state.grows)
        return self.value


class _States(dict[int, Any]):
    """The states of a recurrent layer by number."""

    def __getitem__(self, index: int) -> Any:
        value = super().__getitem__(index)
        return value.get() if isinstance(value, _Made) else value


class _CrossAttention:
    """A layer of the cache of what the encoder made: keys and values that no step changes."""

    def __init__(self, states: Sequence[CachedState], calls: Mapping[int, _LayerCall], layer: int) -> None:
        self._made = {state.place.rpartition(".")[2]: _Made(state, calls, layer) for state in states}

    @property
    def keys(self) -> torch.Tensor:
        return self._made[KEYS].get()

    @property
    def values(self) -> torch.Tensor:
        return self._made[VALUES].get()

    def get_seq_length(self) -> int:
        return self._made[KEYS].state.sizes[1]
