"""What layers keep in transformers' cache, in the layouts of a plan for decoding.

A prompt leaves a state in the layout in which the layer computes it, which the plan does not say, or whole on every
rank, as transformers starts the state of a convolution. After each call a state is brought into its layout, in which
the next step reads it. The same holds for the keys and values that a decoder computes of an encoder's results.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.redistribute import Redistributor
from executor.resolve.fqns import modules_at
from executor.runtime.whole_batches import BatchForm
from planner.model_rewrites.cache_argument import CROSS, KEYS, STATES, VALUES, is_cache, layer_number
from planner.plan.ports import Port

_PLACES = frozenset({*STATES, CROSS, KEYS, VALUES})


def attach_states(
    module: nn.Module, inputs: Mapping[str, Mapping[str, Port]], redistributor: Redistributor, form: BatchForm
) -> None:
    """Hook the layers whose states have layouts.

    Args:
        module: the root.
        inputs: FQN of a module -> argument -> port; a state's path leads through the cache.
        redistributor: moves states.
        form: whether an axis splits the samples of a call.
    """
    for layer, _, ports in modules_at(module, inputs):
        states = {path: port for path, port in ports.items() if path.partition(".")[2].partition(".")[0] in _PLACES}
        if states:
            hook = _StateHook(states, inspect.signature(layer.forward), redistributor, form)
            layer.register_forward_hook(hook, with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _StateHook:
    """A forward hook on a layer that brings its states into the layouts of ``ports``."""

    ports: Mapping[str, Port]
    signature: inspect.Signature
    redistributor: Redistributor
    form: BatchForm

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = self.signature.bind_partial(*args, **kwargs).arguments
        for path, port in self.ports.items():
            argument, *place = path.split(".")
            cache: Any = arguments.get(argument)
            if not is_cache(cache):
                continue
            cache = cache.cross_attention_cache if place[0] == CROSS else getattr(cache, "self_attention_cache", cache)
            kept = cache.layers[layer_number(layer)]
            held, key = (getattr(kept, place[0]), int(place[1])) if place[0] in STATES else (vars(kept), place[-1])
            state = held.get(key)
            if isinstance(state, torch.Tensor):
                held[key] = self._placed(state, port)

    def _placed(self, state: torch.Tensor, port: Port) -> DTensor:
        mesh, redistributor = self.redistributor.device_mesh, self.redistributor
        if not isinstance(state, DTensor):
            state = DTensor.from_local(state, mesh, redistributor.replicated, run_check=False)
        return redistributor.redistribute(state, self.form.layout(port.layout, state.shape, redistributor))
