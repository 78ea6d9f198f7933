"""Tensor-parallel plans of transformers: styles by name, which become layouts without a trace.

Tensors inside the model are DTensors, from the inputs of the root on. So the styles that correct a gradient of local
tensors by hand (``replicated_with_grad_allreduce``, ``mla_kv_a_proj``, ``moe_identity_expert``) have nothing to do.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout
from planner.errors import PlanTypeError, UnmatchedKeyError
from planner.imported.imported_plan import job_of
from planner.model_rewrites.fuse_projections import carried_tp_plan
from planner.plan.mesh import PlanMesh
from planner.plan.patterns import match_keys
from planner.plan.ports import Port, PortSpec, input_key, output_key
from planner.plan.sharding_plan import ShardingPlan

_FIELD = "tp_plan"
_BATCH_FIRST = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels", "pixel_values"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
)
"""Arguments of transformers' models that are tensors whose first dim is the batch."""

R = Replicate()
Placer = Callable[[str, int], Placement]
"""(name of a parameter in its module, its number of dims) -> its placement on the tensor-parallel axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a style does on the tensor-parallel axis.

    Attributes:
        parameter: placement of the parameters.
        input: placement of the first argument; None: as it comes.
        output: placement of the results; None: as they come.
        every_input: whether all arguments have the placement of the first.
    """

    parameter: Placer
    input: Placement | None = None
    output: Placement | None = None
    every_input: bool = False


def _replicated(name: str, ndim: int) -> Placement:
    return R


def _columns(name: str, ndim: int) -> Placement:
    return Shard(max(ndim - 2, 0))


def _rows(name: str, ndim: int) -> Placement:
    return R if name == "bias" else Shard(ndim - 1)


def _packed_columns(name: str, ndim: int) -> Placement:
    return Shard(0) if ndim == 1 else _StridedShard(ndim - 2, split_factor=2)


def _packed_rows(name: str, ndim: int) -> Placement:
    return R if ndim == 1 else _StridedShard(ndim - 1, split_factor=2)


def _first_dim(name: str, ndim: int) -> Placement:
    return Shard(0)


def _last_dim(name: str, ndim: int) -> Placement:
    return Shard(ndim - 1)


_BY_ROWS = Style(parameter=_rows, input=Shard(-1), output=R)
_GATHERED = Style(parameter=_columns, input=R, output=R)
_WHOLE = Style(parameter=_replicated)
_EXPERTS = Style(parameter=_replicated, input=R, output=R, every_input=True)

STYLES: Mapping[str, Style] = {
    "colwise": Style(parameter=_columns, input=R),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _BY_ROWS,
    "rowwise_split_input": _BY_ROWS,
    "rowwise_rep": _BY_ROWS,
    "packed_colwise": Style(parameter=_packed_columns, input=R),
    "packed_rowwise": Style(parameter=_packed_rows),
    "embedding_rowwise": Style(parameter=_first_dim, input=R, output=R),
    "embedding_colwise": Style(parameter=_last_dim, input=R, output=R),
    "sequence_parallel": Style(parameter=_replicated, input=Shard(1)),
    "replicated_with_grad_allreduce": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "moe_identity_expert": _WHOLE,
    "local_params": _WHOLE,
    "replicate": _WHOLE,
    "all_reduce": Style(parameter=_replicated, output=R),
    "moe_tp_experts": _EXPERTS,
    "ep_dispatch_experts": _EXPERTS,
    "grouped_gemm": Style(parameter=_first_dim),
}
"""The styles of transformers 5.24 (``ALL_PARALLEL_STYLES``)."""


@dataclass(slots=True)
class _Axes:
    """Layouts on a mesh whose tensor-parallel axis is ``axis``; the other axes split the batch."""

    mesh: PlanMesh
    axis: int | None
    plan: dict[str, Layout] = field(default_factory=dict)
    inputs: dict[str, PortSpec] = field(default_factory=dict)
    outputs: dict[str, Port] = field(default_factory=dict)

    def parameter(self, placement: Placement) -> Layout:
        """Return the layout of a parameter."""
        return tuple(placement if index == self.axis else R for index in range(len(self.mesh.axes)))

    def tensor(self, placement: Placement) -> Layout:
        """Return the layout of a tensor whose first dim is the batch."""
        return tuple(placement if index == self.axis else Shard(0) for index in range(len(self.mesh.axes)))


def plan_from_tp_plan(
    module: nn.Module, mesh: PlanMesh, tp_plan: Mapping[str, str] | None = None, *, axis: str | None = None
) -> ShardingPlan:
    """Return the plan that ``tp_plan`` says; ``module`` is only read.

    Args:
        module: a model of transformers, or another whose inputs are named as theirs.
        mesh: its other axes split the batch.
        tp_plan: FQN pattern of modules or parameters -> name of a style; None: ``module.tp_plan``.
        axis: name of the tensor-parallel axis of ``mesh``; None: "tp" if there is one, else the last.

    Raises:
        PlanTypeError: a style that transformers does not have, or a model without a plan.
        UnmatchedKeyError: a key that matches no module and no parameter, or no such axis.
    """
    styles = carried_tp_plan(module) if tp_plan is None else tp_plan
    if styles is None:
        raise PlanTypeError(
            f"{type(module).__name__} carries no tensor-parallel plan.",
            field=_FIELD,
            what_to_do="Pass tp_plan, or let build_plan plan.",
        )
    return plan_on_axis(module, mesh, styles, _index_of(mesh, axis))


def plan_on_axis(module: nn.Module, mesh: PlanMesh, styles: Mapping[str, str], axis: int | None) -> ShardingPlan:
    """Return the plan of ``styles`` on the mesh axis ``axis``; None: every axis splits the batch, and none the model.

    Raises:
        PlanTypeError: see `plan_from_tp_plan`.
        UnmatchedKeyError: see `plan_from_tp_plan`.
    """
    axes = _Axes(mesh, axis)
    modules, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    # Keys that name a parameter win over those that name its module.
    for key, name in sorted(styles.items(), key=lambda entry: entry[0].count("."), reverse=True):
        style = _style(key, name)
        of_modules, of_parameters = (match_keys((key,), names)[key] for names in (modules, parameters))
        if not of_modules and not of_parameters:
            raise UnmatchedKeyError(
                f"{_FIELD} has the key {key!r}, which matches no module and no parameter.",
                field=_FIELD,
                key=key,
                what_to_do="Correct or remove the key.",
            )
        for fqn in of_parameters:
            attribute = fqn.rpartition(".")[2]
            axes.plan.setdefault(fqn, axes.parameter(style.parameter(attribute, parameters[fqn].dim())))
        for fqn in of_modules:
            _add_module(axes, fqn, modules[fqn], style)
    return ShardingPlan(
        mesh=mesh,
        plan=axes.plan,
        input_plan={"input": dict(_root_inputs(module, axes)), **axes.inputs},
        output_plan=axes.outputs,
        job=job_of(module),
        model=type(module).__name__,
    )


def _index_of(mesh: PlanMesh, axis: str | None) -> int:
    name = axis or ("tp" if "tp" in mesh.names else mesh.names[-1])
    if name not in mesh.names:
        raise UnmatchedKeyError(
            f"The mesh {mesh} has no axis {name!r}.", field="axis", key=name, what_to_do="Name an axis of the mesh."
        )
    return mesh.names.index(name)


def _style(key: str, name: str) -> Style:
    if name in STYLES:
        return STYLES[name]
    close = difflib.get_close_matches(name, STYLES, n=1)
    raise PlanTypeError(
        f"{_FIELD} has the style {name!r} for {key!r}, which a plan cannot say.",
        field=_FIELD,
        key=key,
        what_to_do=f"Write {close[0]!r}." if close else f"Give one of {', '.join(STYLES)}.",
    )


def _add_module(axes: _Axes, fqn: str, part: nn.Module, style: Style) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        path = f"{fqn}.{name}" if fqn else name
        axes.plan.setdefault(path, axes.parameter(style.parameter(name, parameter.dim())))
    if style.input is not None:
        port = Port(layout=axes.tensor(style.input))
        count = len(inspect.signature(part.forward).parameters) if style.every_input else 1
        axes.inputs[input_key(fqn)] = port if count == 1 else {str(index): port for index in range(count)}
    if style.output is not None:
        axes.outputs[output_key(fqn)] = Port(layout=axes.tensor(style.output))


def _root_inputs(module: nn.Module, axes: _Axes) -> Iterator[tuple[str, Port]]:
    arguments = inspect.signature(module.forward).parameters
    names = [name for name in _BATCH_FIRST if name in arguments] or [next(iter(arguments), "0")]
    for name in names:
        yield name, Port(layout=axes.tensor(R))
