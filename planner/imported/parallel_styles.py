"""Styles of ``torch.distributed.tensor.parallel``: layouts of parameters, and ports at the modules that they name.

As in torch, tensors between styled modules are plain where a style says ``use_local_output``: each rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement

from cost_model.layouts.layout import Layout
from planner.errors import KeyConflictError, MeshError, PlanTypeError
from planner.imported.imported_plan import ImportedPlan, job_of, unused_name
from planner.plan.mesh import PlanMesh
from planner.plan.ports import Port, input_key, output_key
from planner.plan.sharding_plan import ShardingPlan

STYLES = (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
)
"""torch's styles, which become entries of a plan. A style of another type, a subclass too, is run as it is."""

_FIELD = "parallelize_plan"
Ports = dict[str, Port]
"""Name of an argument or a result -> its port."""


@dataclass(slots=True)
class _Entries:
    """What the styles of a plan say so far."""

    plan: dict[str, Layout | str] = field(default_factory=dict)
    inputs: dict[str, Ports] = field(default_factory=dict)
    outputs: dict[str, Ports] = field(default_factory=dict)
    sharders: dict[str, Any] = field(default_factory=dict)
    said_by: dict[tuple[str, str], str] = field(default_factory=dict)

    def put(self, kind: str, fqn: str, key: str, value: Any) -> None:
        """Add ``value`` for ``fqn`` to the entries ``kind``, named by the style at ``key``.

        Raises:
            KeyConflictError: another key has said something else of it.
        """
        entries = getattr(self, kind)
        other = self.said_by.setdefault((kind, fqn), key)
        if entries.setdefault(fqn, value) != value:
            raise KeyConflictError(
                f"{_FIELD} has the styles of {other!r} and {key!r} for {fqn or 'the root'!r}, which disagree.",
                field=_FIELD,
                key=key,
                other=other,
                what_to_do="Name each module by one style, or join the styles of its input and output in one.",
            )


def plan_from_styles(
    module: nn.Module, mesh: PlanMesh, styles: ParallelStyle | Mapping[str, ParallelStyle]
) -> ImportedPlan:
    """Return the plan of ``parallelize_module(module, mesh, styles)``; ``module`` is only read.

    A style of the user's own becomes the name of a Sharder, which applies it.

    Args:
        module: the module that the keys start from.
        mesh: a mesh of one axis.
        styles: FQN pattern, with ``*``, ``?`` and ``[0-2]`` within components, -> style; or the root's style.

    Raises:
        MeshError: a mesh of several axes.
        PlanTypeError: a value that is no style, or a style on a module that it does not take.
        KeyConflictError: two styles that disagree about a module.
    """
    if len(mesh.axes) != 1:
        raise MeshError(
            f"Styles of parallelize_module are on a mesh of one axis, but the mesh is {mesh}.",
            what_to_do=f'Slice the mesh, as in mesh["{mesh.names[-1]}"].',
        )
    by_key = styles if isinstance(styles, Mapping) else {"": styles}
    entries = _Entries()
    unmatched = []
    for key, style in by_key.items():
        if not isinstance(style, ParallelStyle):
            raise _wrong_style(key, style, "is no ParallelStyle", "Give a style of torch.distributed.tensor.parallel.")
        matches = list(_matches(module, key))
        if not matches:
            unmatched.append(key)
        for fqn, part in matches:
            _add(entries, key, fqn, part, style)
    plan = ShardingPlan(
        mesh=mesh,
        plan=entries.plan,
        input_plan={input_key(fqn): ports for fqn, ports in entries.inputs.items()},
        output_plan={output_key(fqn): ports for fqn, ports in entries.outputs.items()},
        job=job_of(module),
    )
    return ImportedPlan(plan=plan, sharders=entries.sharders, unmatched=tuple(unmatched))


def _matches(module: nn.Module, key: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) for the submodules that ``key`` matches, component by component as in torch."""
    if key == "":
        yield "", module
        return
    first, _, rest = key.partition(".")
    for name, child in module.named_children():
        if fnmatchcase(name, first):
            for fqn, part in _matches(child, rest):
                yield f"{name}.{fqn}" if fqn else name, part


def _add(entries: _Entries, key: str, fqn: str, part: nn.Module, style: ParallelStyle) -> None:
    """Add what ``style``, which ``key`` gives to the module ``part`` at ``fqn``, says."""
    if type(style) in (ColwiseParallel, RowwiseParallel):
        for name, layout in _split_parameters(key, part, style).items():
            entries.put("plan", f"{fqn}.{name}" if fqn else name, key, layout)
        inside = _inside(part, style)
        inputs = Port(layout=inside, from_local=style.input_layouts)  # type: ignore[attr-defined]
        entries.put("inputs", fqn, key, {"": inputs})
        outputs = Port(layout=style.output_layouts, to_local=style.use_local_output)  # type: ignore[attr-defined]
        entries.put("outputs", fqn, key, {"": outputs})
    elif type(style) is SequenceParallel:
        for name, _ in part.named_parameters():
            entries.put("plan", f"{fqn}.{name}" if fqn else name, key, (Replicate(),))
        sequence = style.sequence_sharding
        entries.put("inputs", fqn, key, {"": Port(layout=sequence, from_local=sequence)})
        if style.use_local_output:
            entries.put("outputs", fqn, key, {"": Port(layout=sequence, to_local=True)})
    elif type(style) is PrepareModuleInput:
        _put_inputs(entries, key, fqn, style)
    elif type(style) is PrepareModuleOutput:
        _put_outputs(entries, key, fqn, style)
    elif type(style) is PrepareModuleInputOutput:
        _put_inputs(entries, key, fqn, style.prepare_module_input)
        _put_outputs(entries, key, fqn, style.prepare_module_output)
    else:
        known = next((name for name, other in entries.sharders.items() if other is style), None)
        name = known or unused_name(type(style).__name__, entries.sharders)
        entries.sharders[name] = style
        entries.put("plan", fqn, key, name)


def _split_parameters(key: str, part: nn.Module, style: ParallelStyle) -> dict[str, Layout]:
    """Return parameter -> layout in a linear layer or an embedding that a style splits by columns or by rows."""
    by_columns = type(style) is ColwiseParallel
    if isinstance(part, nn.Linear):
        weight, bias = (Shard(0), Shard(0)) if by_columns else (Shard(1), Replicate())
        layouts: dict[str, Layout] = {"weight": (weight,), "bias": (bias,)}
    elif isinstance(part, nn.Embedding):
        layouts = {"weight": (Shard(1) if by_columns else Shard(0),)}
    else:
        detail = f"takes nn.Linear and nn.Embedding, but the module is a {type(part).__name__}"
        raise _wrong_style(key, style, detail, "Name the linear layers and embeddings inside it.")
    return {name: layout for name, layout in layouts.items() if part._parameters.get(name) is not None}


def _inside(part: nn.Module, style: ParallelStyle) -> Layout:
    """Return the layout of the input in which the split module runs."""
    rows_of_a_linear = type(style) is RowwiseParallel and isinstance(part, nn.Linear)
    return (Shard(-1) if rows_of_a_linear else Replicate(),)


def _put_inputs(entries: _Entries, key: str, fqn: str, style: PrepareModuleInput) -> None:
    layouts = _named(style.input_layouts) | style.input_kwarg_layouts
    desired = _named(style.desired_input_layouts) | style.desired_input_kwarg_layouts
    ports = _ports(layouts, desired, to_local=style.use_local_output)
    if ports:
        entries.put("inputs", fqn, key, ports)


def _put_outputs(entries: _Entries, key: str, fqn: str, style: PrepareModuleOutput) -> None:
    layouts, desired = _named(style.output_layouts), _named(style.desired_output_layouts)
    if len(style.output_layouts) == 1:
        layouts, desired = ({"": each["0"]} for each in (layouts, desired))
    ports = _ports(layouts, desired, to_local=style.use_local_output)
    if ports:
        entries.put("outputs", fqn, key, ports)


def _named(layouts: Sequence[Placement | None] | None) -> dict[str, Placement | None]:
    return {str(index): placement for index, placement in enumerate(layouts or ())}


def _ports(layouts: Mapping[str, Any], desired: Mapping[str, Any], *, to_local: bool) -> Ports:
    """Return the ports of tensors that come in ``layouts`` and are needed as ``desired``; None: left as it is."""
    ports: Ports = {}
    for name, placement in layouts.items():
        if placement is not None:
            wanted = desired.get(name) or placement
            ports[name] = Port(layout=(wanted,), from_local=(placement,), to_local=to_local)
    return ports


def _wrong_style(key: str, style: object, detail: str, advice: str) -> PlanTypeError:
    return PlanTypeError(
        f"{_FIELD} has {type(style).__name__} for {key!r}, which {detail}.", field=_FIELD, key=key, what_to_do=advice
    )
