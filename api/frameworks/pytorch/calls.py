"""`Calls`: which tensors the modules of a model pass to each other in one forward, on meta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from executor.step_on_meta import meta_copy, meta_inputs
from planner.model_rewrites.eager_masks import unpacked_sequences

_SAMPLES, _TOKENS = 2, 8
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The tensors of one module's call.

    Attributes:
        arguments: position ("0") or keyword -> tensor.
        results: "" for a single tensor, position or key -> tensor.
        positional: number of positional arguments.
        tuple_length: number of results of a tuple; None: the result is no tuple.
    """

    arguments: Tensors
    results: Tensors
    positional: int
    tuple_length: int | None


@dataclass(frozen=True, slots=True)
class Calls:
    """The first call of each module that was called, by its FQN; empty where the model could not be run."""

    by_module: Mapping[str, Call] = field(default_factory=dict)

    def producer(self, tensor: torch.Tensor) -> str | None:
        """Return the innermost module whose only result is ``tensor``, itself and unchanged."""
        modules = [
            fqn
            for fqn, call in self.by_module.items()
            if call.results.get("") is tensor and not any(value is tensor for value in call.arguments.values())
        ]
        return max(modules, key=lambda fqn: fqn.count("."), default=None)

    def receivers(self, tensor: torch.Tensor) -> Iterator[tuple[str, str]]:
        """Yield (module, argument) wherever ``tensor`` is passed."""
        for fqn, call in self.by_module.items():
            for name, value in call.arguments.items():
                if value is tensor:
                    yield fqn, name


def observed_calls(module: nn.Module, example_inputs: Any = None) -> Calls:
    """Return the calls of one forward of a copy of ``module`` on meta.

    Args:
        module: the model, on any device.
        example_inputs: positional or keyword arguments; None: token ids, if the model is one of transformers that takes
            them.
    """
    if example_inputs is None:
        if getattr(module, "main_input_name", None) != "input_ids" or not hasattr(module, "config"):
            return Calls()
        example_inputs = {"input_ids": torch.zeros(_SAMPLES, _TOKENS, dtype=torch.long)}
        if getattr(module.config, "is_encoder_decoder", False):
            example_inputs["decoder_input_ids"] = example_inputs["input_ids"]
    inputs = meta_inputs(example_inputs)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    copied = meta_copy(module, "training").eval()
    calls: dict[str, Call] = {}
    for fqn, part in copied.named_modules():
        part.register_forward_hook(_recorder(fqn, calls), with_kwargs=True)
    with torch.no_grad(), unpacked_sequences():
        copied(*args, **kwargs)
    return Calls(calls)


def _recorder(fqn: str, calls: dict[str, Call]) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        named = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        call = Call(
            arguments={name: value for name, value in named.items() if isinstance(value, torch.Tensor)},
            results=_tensors(result),
            positional=len(args),
            tuple_length=len(result) if isinstance(result, tuple) else None,
        )
        calls.setdefault(fqn, call)

    return record


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return {"": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    if isinstance(result, tuple | list):
        return {str(index): value for index, value in enumerate(result) if isinstance(value, torch.Tensor)}
    return {}
