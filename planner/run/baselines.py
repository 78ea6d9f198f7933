"""Baselines: plans that people write by hand, as restrictions of the choices of the integer program.

Where the hand-written plan leaves something open, the baseline gets the cheapest choice, so that the comparison is
fair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, MeshSpec, divides, sharded_dim
from cost_model.layouts.uneven import Rounded, shards_once
from planner.errors import BaselineError
from planner.formulation.choice_filters import Accepts, AcceptsStored
from planner.graph.op_graph import OpGraph, Value
from planner.imported.tp_plans import STYLES
from planner.plan.patterns import match_keys
from planner.regions.regions import Region, block_of
from planner.strategies.enumerate import Strategy

R = Replicate()

LAUNCHED = ("ddp", "fsdp", "hsdp", "fsdp-tp", "tp")
"""Baselines as people launch them, each on meshes of its own (`planner.search.baseline_search`)."""

KEEP_GATHERED = "keep-gathered"
"""Beside baselines that are joined: FSDP groups may all stay gathered until backward too."""

NAMES = (*LAUNCHED, "data-parallel", "fully-sharded", "tensor-parallel")

_COLWISE = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep")
_ROWWISE = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """The choices that a baseline or pins allow.

    Attributes:
        accepts: (region, strategy) -> whether the strategy may be chosen.
        accepts_stored: (parameter, its FQNs, stored layout) -> whether the layout may be chosen.
    """

    accepts: Accepts
    accepts_stored: AcceptsStored


def batch_only(region: Region, strategy: Strategy, axes: Sequence[int], mesh: MeshSpec) -> bool:
    """Return whether a strategy is pure data parallelism on every mesh axis in ``axes``.

    That is: parameters are replicated, tensors that enter the region are replicated or `Shard(0)`, and model inputs are
    `Shard(0)` wherever the axes divide their batch.
    """
    for slot, layout in zip(region.slots, strategy.forward, strict=True):
        if layout is None:
            continue
        for axis in axes:
            placement = layout[axis]
            if slot.origin == "parameter" and placement != R:
                return False
            if slot.origin == "entry" and placement not in (R, Shard(0)):
                return False
            if slot.value.kind == "input" and placement != Shard(0) and _batch_divides(slot.value, mesh, axes):
                return False
    return True


def _batch_divides(value: Value, mesh: MeshSpec, axes: Sequence[int]) -> bool:
    layout: Layout = tuple(Shard(0) if axis in axes else R for axis in range(len(mesh.shape)))
    return divides(value.shape, layout, mesh.shape)


def restriction_of(name: str, mesh: MeshSpec, tp_plan: Mapping[str, str] | None, graph: OpGraph) -> Restriction:
    """Return the choices that a baseline allows on a mesh.

    Args:
        name: the baseline, one of `NAMES`.
        mesh: the mesh to plan on.
        tp_plan: the ``styles`` of `tensor_parallel`; the other baselines do not read it.
        graph: the graph of the model.
    """
    if name == "tensor-parallel":
        return tensor_parallel(mesh, tp_plan, graph)
    if name in ("fsdp-tp", "tp"):
        return megatron(mesh, tp_plan, graph, fsdp=name == "fsdp-tp")
    if name in ("ddp", "data-parallel"):
        return data_parallel(mesh)
    return fully_sharded(mesh, graph.rounded, replicas=name == "hsdp")


def _axes(mesh: MeshSpec) -> list[int]:
    """Return the axes with more than one rank."""
    return [axis for axis, size in enumerate(mesh.shape) if size > 1]


def data_parallel(mesh: MeshSpec) -> Restriction:
    """Return the restriction to data parallelism over all axes: parameters are replicated, the batch is split."""
    axes = _axes(mesh)
    return Restriction(
        accepts=lambda region, strategy: batch_only(region, strategy, axes, mesh),
        accepts_stored=lambda value, names, layout: all(placement == R for placement in layout),
    )


def fully_sharded(mesh: MeshSpec, rounded: Rounded | None = None, *, replicas: bool = False) -> Restriction:
    """Return the restriction to FSDP: stored layouts shard the first dim that all sharding axes divide evenly.

    Args:
        mesh: the mesh to plan on.
        rounded: lengths of dims that are rounded up (`OpGraph.rounded`).
        replicas: whether the outermost axis holds replicas (HSDP): it splits the batch, and shards no parameter.

    Raises:
        BaselineError: ``replicas`` on a mesh of one axis.
    """
    axes = _axes(mesh)
    if replicas and len(mesh.shape) < 2:
        raise BaselineError(
            f"hsdp on the mesh {mesh}, which has one axis.",
            what_to_do="Give an axis of replicas and one that shards, such as dp=2,fsdp=8, or the planner fsdp.",
        )
    sharding = [axis for axis in axes if axis > 0] if replicas else axes
    return Restriction(
        accepts=lambda region, strategy: batch_only(region, strategy, axes, mesh),
        accepts_stored=lambda value, names, layout: layout == _first_split(value, mesh, sharding, rounded or {}),
    )


def _first_split(value: Value, mesh: MeshSpec, axes: Sequence[int], rounded: Rounded) -> Layout:
    """Return the layout that shards the first dim that all ``axes`` divide evenly; replicated if none does."""
    for dim in range(len(value.shape)):
        layout: Layout = tuple(Shard(dim) if axis in axes else R for axis in range(len(mesh.shape)))
        if divides(value.shape, layout, mesh.shape) and shards_once(value.shape, layout, rounded):
            return layout
    return tuple(R for _ in mesh.shape)


def megatron(mesh: MeshSpec, styles: Mapping[str, str] | None, graph: OpGraph, *, fsdp: bool) -> Restriction:
    """Return the restriction to tensor parallelism on the innermost axis, as Megatron and Hugging Face have it.

    On that axis, the linear layers of blocks are sharded: as the model's plan says, or by input or output features
    where it has none. So are embedding and head, on either dim. Activations between them are split over the sequence
    or not at all, and never by samples. All other axes split the batch.

    Args:
        mesh: the mesh to plan on.
        styles: FQN pattern of modules -> style, as for `tensor_parallel`; None: the model has no plan.
        graph: the graph of the model.
        fsdp: whether the other axes shard stored parameters (FSDP); otherwise they hold replicas.
    """
    axis = len(mesh.shape) - 1
    data_axes = [a for a in _axes(mesh) if a != axis]
    placements = _block_placements(styles, graph, mesh.shape[axis])

    def accepts(region: Region, strategy: Strategy) -> bool:
        if not _batch_only_on(region, strategy, data_axes, mesh):
            return False
        for slot, layout in zip(region.slots, strategy.forward, strict=True):
            if layout is None or mesh.shape[axis] == 1:
                continue
            allowed = None if slot.parameter is None else placements.get(slot.parameter)
            if allowed is not None and layout[axis] not in allowed:
                return False
            if slot.origin == "entry" and layout[axis] == Shard(0) and len(slot.value.shape) > 1:
                return False
        return True

    def accepts_stored(value: Value, names: Sequence[str], layout: Layout) -> bool:
        allowed = [placements[name] for name in names if name in placements]
        if mesh.shape[axis] > 1 and any(layout[axis] not in each for each in allowed):
            return False
        return layout == _stored_beside(value, mesh, data_axes if fsdp else [], axis, layout[axis], graph.rounded)

    return Restriction(accepts=accepts, accepts_stored=accepts_stored)


def _stored_beside(
    value: Value, mesh: MeshSpec, axes: Sequence[int], tensor_axis: int, placement: Placement, rounded: Rounded
) -> Layout:
    """Return the layout with ``placement`` on the tensor-parallel axis that shards one dim over all of ``axes``.

    It is the first dim that divides evenly and that ``placement`` does not shard. If there is none, it is the dim that
    ``placement`` shards, if that divides; otherwise the tensor is replicated on ``axes``.
    """
    own_dim = sharded_dim(placement)
    dims = sorted(range(len(value.shape)), key=lambda dim: (dim == own_dim, dim))
    for dim in dims if axes else ():
        layout = tuple(
            placement if axis == tensor_axis else Shard(dim) if axis in axes else R for axis in range(len(mesh.shape))
        )
        if divides(value.shape, layout, mesh.shape) and shards_once(value.shape, layout, rounded):
            return layout
    return tuple(placement if axis == tensor_axis else R for axis in range(len(mesh.shape)))


def _block_placements(
    styles: Mapping[str, str] | None, graph: OpGraph, size: int
) -> Mapping[str, tuple[Placement, ...]]:
    """Return FQN -> its possible placements on a tensor-parallel axis of ``size`` ranks.

    Parameters of blocks that the model's plan does not name are replicated. Without a plan, and outside of blocks,
    weights of two dims are sharded on either of them, and other parameters are free: they are left out.
    """
    try:
        planned = _expert_layouts(styles, graph) if styles else {}
    except BaselineError:
        planned = {}
    placements: dict[str, tuple[Placement, ...]] = {}
    for value_name, names in graph.parameters.items():
        value = graph.values[value_name]
        for name in names:
            if planned and block_of(name) is not None:
                wanted = planned.get(name, R)
                placements[name] = (wanted if _splits(value, wanted, size) else R,)
            elif len(value.shape) == 2:
                splits = tuple(Shard(dim) for dim in (0, 1) if _splits(value, Shard(dim), size))
                # A vocabulary that does not divide may leave the head whole, as in frameworks without uneven splits.
                is_even = Shard(0) in splits and value.shape[0] not in graph.rounded
                may_be_whole = not splits or (block_of(name) is None and not is_even)
                placements[name] = (*splits, *((R,) if may_be_whole else ()))
            elif len(value.shape) > 2 and block_of(name) is None:
                placements[name] = (R,)  # a convolution
    return placements


def tensor_parallel(mesh: MeshSpec, styles: Mapping[str, str] | None, graph: OpGraph) -> Restriction:
    """Return the restriction to the tensor-parallel plan of a Hugging Face config.

    The plan applies to the innermost axis. All other axes are data parallel.

    Args:
        mesh: the mesh to plan on.
        styles: FQN pattern of modules -> style ("colwise", "rowwise", ...); None: the model has no such plan.
        graph: the graph of the model.

    Raises:
        BaselineError: the model has no such plan, or no parameter gets a layout from its styles.
    """
    if not styles:
        raise BaselineError(
            "this model carries no tensor-parallel plan (its Hugging Face config has no base_model_tp_plan).",
            what_to_do="Choose another planner, such as ilp, ddp or fsdp.",
        )
    layouts = _expert_layouts(styles, graph)
    axis = len(mesh.shape) - 1
    data_axes = [a for a in _axes(mesh) if a != axis]

    def accepts(region: Region, strategy: Strategy) -> bool:
        if not _batch_only_on(region, strategy, data_axes, mesh):
            return False
        planned = False
        for slot, layout in zip(region.slots, strategy.forward, strict=True):
            if layout is None:
                continue
            if slot.origin == "parameter" and slot.parameter is not None:
                placement = layouts.get(slot.parameter, R)
                planned = planned or slot.parameter in layouts
                if mesh.shape[axis] > 1 and layout[axis] != (
                    placement if _splits(slot.value, placement, mesh.shape[axis]) else R
                ):
                    return False
            elif slot.value.kind == "input" and layout[axis] != R:
                return False
            elif slot.origin == "entry" and layout[axis] == Shard(1) and len(slot.value.shape) > 2:
                return False  # a Hugging Face plan has no sequence parallelism
        return True

    def accepts_stored(value: Value, names: Sequence[str], layout: Layout) -> bool:
        placements = {layouts.get(name, R) for name in names}
        allowed = {p if _splits(value, p, mesh.shape[axis]) else R for p in placements}
        return all(layout[a] == R for a in data_axes) and (layout[axis] in allowed or mesh.shape[axis] == 1)

    return Restriction(accepts=accepts, accepts_stored=accepts_stored)


def _batch_only_on(region: Region, strategy: Strategy, axes: Sequence[int], mesh: MeshSpec) -> bool:
    return not axes or batch_only(region, strategy, axes, mesh)


def _splits(value: Value, placement: object, size: int) -> bool:
    return isinstance(placement, (Shard, _StridedShard)) and divides(value.shape, (placement,), (size,))


def _expert_layouts(styles: Mapping[str, str], graph: OpGraph) -> dict[str, Placement]:
    names = sorted({name for aliases in graph.parameters.values() for name in aliases})
    modules = sorted({name.rpartition(".")[0] for name in names})
    layouts: dict[str, Placement] = _experts_layouts(styles, graph)
    for pattern, matched in match_keys(styles, modules).items():
        style = styles[pattern]
        for module in matched:
            for name in names:
                if name.rpartition(".")[0] != module:
                    continue
                leaf = name.rpartition(".")[2]
                if style in _COLWISE:
                    layouts[name] = Shard(0)
                elif style in _ROWWISE and leaf == "weight":
                    layouts[name] = Shard(1)
                elif style == "embedding_rowwise" and leaf == "weight":
                    layouts[name] = Shard(0)
    if not layouts:
        style_names = sorted(set(styles.values()))
        raise BaselineError(
            "no module of this model matches its tensor-parallel plan in a style that has layouts here "
            f"(the plan has {', '.join(style_names)}).",
            what_to_do="Choose another planner, such as ilp, ddp or fsdp.",
        )
    return layouts


def _experts_layouts(styles: Mapping[str, str], graph: OpGraph) -> dict[str, Placement]:
    """Return FQN -> placement, on the tensor-parallel axis, of parameters that stack the matrices of all experts.

    A plan names these parameters themselves. It names all other parameters by their module.
    """
    shapes = {name: graph.values[value].shape for value, names in graph.parameters.items() for name in names}
    layouts: dict[str, Placement] = {}
    for pattern, matched in match_keys(styles, shapes).items():
        for name in matched:
            if len(shapes[name]) == 3 and styles[pattern] in STYLES:
                layouts[name] = STYLES[styles[pattern]].parameter(name, 3)
    return layouts


def names_in(planner: str) -> tuple[str, ...]:
    """Return the planners in ``planner``: several baselines may be joined by "+", with `KEEP_GATHERED` among them."""
    return tuple(planner.split("+"))


def _are_launched(names: tuple[str, ...]) -> bool:
    return names[0] in LAUNCHED and set(names) <= {*LAUNCHED, KEEP_GATHERED}


def parse_planner(name: str) -> tuple[str, int | None]:
    """Return (planner, seed) for ``ilp``, a baseline's name, several of `LAUNCHED` joined, or ``random:SEED``.

    Raises:
        BaselineError: ``name`` is none of these.
    """
    match = re.fullmatch(r"random:(\d+)", name)
    if match:
        return "random", int(match[1])
    if name == "ilp" or name in NAMES or _are_launched(names_in(name)):
        return name, None
    raise BaselineError(
        f"there is no planner {name!r}.", what_to_do=f"Choose one of ilp, {', '.join(NAMES)}, random:SEED."
    )


def micro_batches_for(planner: str, micro_batches: int | None) -> int | None:
    """Return the number of micro-batches to plan for; None: the search chooses it.

    A random planner does not choose. It gets one micro-batch unless ``micro_batches`` is given.
    """
    return 1 if micro_batches is None and planner.startswith("random") else micro_batches
