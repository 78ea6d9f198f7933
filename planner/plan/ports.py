"""Layouts at module boundaries: what enters or leaves a module, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from planner.errors import KeyConflictError, PlanKeyError
from planner.plan.patterns import match_keys, resolve_keys

Spec = TypeVar("Spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The layout of one tensor at one module boundary.

    Attributes:
        layout: after the boundary, in the forward pass.
        grad: of the gradient at that point; None is the conjugate of ``layout`` (S -> S, R -> R, P -> R).
        source: before the boundary; None where the plan does not say (written by hand): then whatever arrives is
            redistributed, and a plain tensor is this rank's piece of ``layout``.
        source_grad: of the gradient before the boundary.
        reallgather: of what a module is called with: whether the module's backward has it redistributed again, so that
            only what it was made from is kept until then.
    """

    layout: Layout
    grad: Layout | None = None
    source: Layout | None = None
    source_grad: Layout | None = None
    reallgather: bool = False

    def layouts(self) -> Iterator[Layout]:
        """Yield each layout that is given."""
        for layout in (self.layout, self.grad, self.source, self.source_grad):
            if layout is not None:
                yield layout


PortSpec = Port | tuple[Port | None, ...] | Mapping[str, Port]
"""The ports of one module: its only tensor, its positional tensors (None: left alone), or by argument name.

A name is the position ("0") or the keyword of an argument, with dots into nested tuples, lists and dicts
("position_embeddings.0").
"""


def is_layout(value: object) -> bool:
    """Tell whether ``value`` is a non-empty sequence of placements."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, Placement) for item in value)
    )


def normalised(value: object) -> object:
    """Return ``value`` with each bare layout, as torch and HyperParallel write it, made a ``Port``.

    ``(Shard(0), Replicate())`` is one port, ``[(Shard(0),), None]`` one per positional tensor, ``{"x": (Shard(0),)}``
    by name. Whatever is none of these comes back as it is, for validation to name.
    """
    if is_layout(value):
        assert isinstance(value, Sequence)
        return Port(layout=tuple(value))
    if isinstance(value, Mapping):
        return {name: normalised(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(normalised(item) for item in value)
    return value


def ports_of(spec: PortSpec) -> Iterator[tuple[str, Port]]:
    """Yield (argument name, port); the name of a module's only tensor is ""."""
    if isinstance(spec, Port):
        yield "", spec
    elif isinstance(spec, Mapping):
        yield from spec.items()
    else:
        for index, port in enumerate(spec):
            if port is not None:
                yield str(index), port


def input_key(fqn: str) -> str:
    """Return the key of ``input_plan`` for the module at ``fqn``."""
    return f"{fqn}.input" if fqn else "input"


def output_key(fqn: str) -> str:
    """Return the key of ``output_plan`` for the module at ``fqn``: the FQN, unless it would read as a suffix."""
    # BERT calls modules "output": layer.0.output could be that module, or what leaves layer.0.
    return f"{fqn}.output" if fqn.rpartition(".")[2] == "output" else fqn


def resolve_input_ports(
    input_plan: Mapping[str, Spec], modules: Iterable[str], *, field: str = "input_plan"
) -> dict[str, Spec]:
    """Return module FQN -> what ``input_plan`` has for its arguments; ``field`` of the plan is for messages.

    Raises:
        PlanKeyError: a key does not end in ".input", matches no module, or disagrees with another.
    """
    entries: dict[str, Spec] = {}
    for key, spec in input_plan.items():
        module, _, suffix = key.rpartition(".")
        if key and suffix != "input":
            raise PlanKeyError(
                f"{field} has the key {key!r}, which does not say what it means of that module.",
                field=field,
                key=key,
                what_to_do=f"Write {key + '.input'!r}.",
            )
        _put(entries, module, spec, field=field, key=key)
    return resolve_keys(entries, modules, field=field, what="module")


def resolve_output_ports(
    output_plan: Mapping[str, Spec], modules: Iterable[str], *, field: str = "output_plan"
) -> dict[str, Spec]:
    """Return module FQN -> what ``output_plan`` has for its results; ``field`` of the plan is for messages.

    Raises:
        PlanKeyError: a key matches no module, disagrees with another, or can be read in two ways.
    """
    module_fqns = list(modules)
    entries: dict[str, Spec] = {}
    for key, spec in output_plan.items():
        _put(entries, _output_module(key, module_fqns, field), spec, field=field, key=key)
    return resolve_keys(entries, module_fqns, field=field, what="module")


def _output_module(key: str, module_fqns: list[str], field: str) -> str:
    module, _, suffix = key.rpartition(".")
    if suffix != "output":
        return key
    matches = match_keys((key, module), module_fqns)
    if matches[key] and matches[module]:
        raise PlanKeyError(
            f"{field} has the key {key!r}: that is a module, and also the output of {module!r}.",
            field="output_plan",
            key=key,
            what_to_do=f"Write {key + '.output'!r} for the first or {module!r} for the second.",
        )
    return key if matches[key] else module


def _put(entries: dict[str, Spec], module: str, spec: Spec, *, field: str, key: str) -> None:
    if module in entries and entries[module] != spec:
        raise KeyConflictError(
            f"{field} names {module!r} twice, with ports that disagree.",
            field=field,
            key=key,
            other=module,
            what_to_do="Keep one of the two keys.",
        )
    entries[module] = spec
