"""Ports: the layouts of a module's arguments and results, and of their gradients."""

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
    """The layouts of one tensor at one module boundary.

    Attributes:
        layout: layout of the tensor after the boundary.
        grad: layout of the gradient after the boundary; None: the conjugate of ``layout`` (S -> S, R -> R, P -> R).
        source: layout of the tensor before the boundary. None (in plans written by hand): a DTensor is redistributed
            from its own layout, and a plain tensor is this rank's shard of ``layout``.
        source_grad: layout of the gradient before the boundary; None: not stated.
        reallgather: for a module's argument: whether the module's backward redistributes the argument again. Autograd
            then saves the tensor before the redistribution, not the redistributed one.
        from_local: the layout in which a plain tensor at the boundary is this rank's shard, as in
            ``DTensor.from_local``. None: see ``source``.
        to_local: whether the tensor becomes the plain local tensor after the boundary, as by ``DTensor.to_local``.
    """

    layout: Layout
    grad: Layout | None = None
    source: Layout | None = None
    source_grad: Layout | None = None
    reallgather: bool = False
    from_local: Layout | None = None
    to_local: bool = False

    def layouts(self) -> Iterator[Layout]:
        """Yield each of the port's layouts that is not None."""
        for layout in (self.layout, self.grad, self.source, self.source_grad, self.from_local):
            if layout is not None:
                yield layout


PortSpec = Port | tuple[Port | None, ...] | Mapping[str, Port]
"""The ports of one module: of its only tensor, of its positional tensors (None: unchanged), or by argument name.

A name is the position ("0") or the keyword of an argument. Dots lead into nested tuples, lists and dicts
("position_embeddings.0").
"""


def is_layout(value: object) -> bool:
    """Return whether ``value`` is a non-empty sequence of placements."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, Placement) for item in value)
    )


def as_layout(value: object) -> object:
    """Return a sequence of placements as a tuple, and a bare placement as a layout of one axis; else ``value``."""
    if isinstance(value, Placement):
        return (value,)
    return tuple(value) if is_layout(value) and isinstance(value, Sequence) else value


def normalised(value: object) -> object:
    """Return ``value`` with a ``Port`` in place of each bare layout, which is how torch and HyperParallel write it.

    ``Shard(0)`` and ``(Shard(0), Replicate())`` are one port, ``[(Shard(0),), None]`` one for each positional tensor,
    ``{"x": (Shard(0),)}`` is by name. Any other value is returned unchanged: validation reports it.
    """
    value = as_layout(value)
    if is_layout(value):
        assert isinstance(value, tuple)
        return Port(layout=value)
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
    """Return the key of ``output_plan`` for the module at ``fqn``: FQN + ".output" if named "output", else FQN."""
    # BERT has modules called "output": the key layer.0.output could mean that module, or the results of layer.0.
    return f"{fqn}.output" if fqn.rpartition(".")[2] == "output" else fqn


def resolve_input_ports(
    input_plan: Mapping[str, Spec], modules: Iterable[str], *, field: str = "input_plan"
) -> dict[str, Spec]:
    """Return module FQN -> value of ``input_plan`` for its arguments; ``field`` is the plan's field, for messages.

    Raises:
        PlanKeyError: a key does not end in ".input", matches no module, or contradicts another key.
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
    """Return module FQN -> value of ``output_plan`` for its results; ``field`` is the plan's field, for messages.

    Raises:
        PlanKeyError: a key matches no module, contradicts another key, or is ambiguous.
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
