"""The slice of a global batch that a rank feeds to the sharded module."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from cost_model.layouts.layout import Layout, divides, format_layout, shard_counts, sharded_dim
from executor.resolve.checks import check_member, check_mesh
from executor.resolve.sharded_as import sharded_as
from planner.errors import PlanLayoutError, UnmatchedKeyError
from planner.model_rewrites.image_sizes.positions import POSITION_IDS, with_position_ids
from planner.model_rewrites.image_sizes.tables import check_alike, samples_of, size_tables, whole_table
from planner.model_rewrites.image_sizes.values import as_numbers, values_of, with_values
from planner.model_rewrites.tree_paths import look_into_dataclasses, path_text, tensors_in
from planner.plan.ports import ports_of
from planner.plan.sharding_plan import ShardingPlan


def root_layouts(plan: ShardingPlan) -> dict[str, Layout]:
    """Return argument name -> layout of that argument of the root module; "" is the first argument."""
    spec = plan.input_plan.get("input", plan.input_plan.get(""))
    return {} if spec is None else {name: port.layout for name, port in ports_of(spec)}


_sources: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = WeakTensorKeyDictionary()
"""Slice -> the global tensor that it was cut from, while both live. Global, because callers pass plain tensors on."""


_unmade_ids: MutableMapping[torch.Tensor, Callable[[nn.Module], torch.Tensor]] = WeakTensorKeyDictionary()
"""Slice of a table of sizes -> makes this rank's slice of the position ids that its batch lacks."""


def position_ids_of(table: torch.Tensor, module: nn.Module) -> torch.Tensor | None:
    """Return this rank's slice of the position ids of a batch that ``local_batch`` has cut; None: they are not needed.

    Args:
        table: the slice of the batch's table of sizes.
        module: the root, which makes them of the whole batch.
    """
    make = _unmade_ids.get(table)
    return None if make is None else make(module)


def _position_ids(
    batch: Mapping[str, Any], layout: Layout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], root: nn.Module
) -> torch.Tensor:
    ids = with_position_ids(root, (), batch)[POSITION_IDS]
    return slice_of(ids, layout, mesh_shape, coordinate, POSITION_IDS)


def global_tensor_of(local: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of a global batch from which ``local_batch`` has cut ``local``; None: it is not known."""
    source = _sources.get(local)
    return None if source is None else source()


def data_shard(plan: ShardingPlan, device_mesh: DeviceMesh) -> tuple[int, int]:
    """Return (rank, number of ranks) for a ``DistributedSampler``: which shard of the samples this process reads.

    Processes that need the same samples, because tensors or sequences are split between them, get the same rank. The
    number of ranks is 1 where an input is not split along the samples: then every process reads all samples. Pass the
    samples to ``local_batch`` with ``is_local=True``, which cuts them further where the plan splits some inputs finer.

    Args:
        plan: its input ports of the root say how dim 0, the samples, is split.
        device_mesh: a mesh with the shape of the plan's mesh.

    Raises:
        PlanMismatchError: ``device_mesh`` has other axes, or this process is no rank of it.
    """
    check_mesh(plan.mesh, device_mesh)
    check_member(device_mesh)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    rank, ranks = 0, 1
    for axis in _sample_axes(root_layouts(plan).values()):
        rank, ranks = rank * device_mesh.shape[axis] + coordinate[axis], ranks * device_mesh.shape[axis]
    return rank, ranks


def _sample_axes(layouts: Iterable[Layout]) -> list[int]:
    """Return the outermost axes that split dim 0 of every input alike: a shard of one input has one of each other."""
    splits = [[axis for axis, placement in enumerate(layout) if sharded_dim(placement) == 0] for layout in layouts]
    alike = itertools.takewhile(lambda axes: len(set(axes)) == 1, zip(*splits, strict=False))
    return [axes[0] for axes in alike]


def _of_local_samples(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return how each input is split further, within the samples of one ``data_shard``."""
    axes = set(_sample_axes(layouts.values()))
    return {
        name: tuple(Replicate() if axis in axes else placement for axis, placement in enumerate(layout))
        for name, layout in layouts.items()
    }


@overload
def local_batch(
    batch: Any, device_mesh: nn.Module, *, pad: Mapping[str, float] | None = None, is_local: bool = False
) -> Any: ...


@overload
def local_batch(
    batch: Any,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    pad: Mapping[str, float] | None = None,
    is_local: bool = False,
) -> Any: ...


def local_batch(
    batch: Any,
    device_mesh: DeviceMesh | nn.Module,
    plan: ShardingPlan | None = None,
    *,
    pad: Mapping[str, float] | None = None,
    is_local: bool = False,
) -> Any:
    """Return this rank's slice of a global micro-batch; with a sharded module, on the module's device.

    A tensor that the plan does not name, such as an attention mask, is split as a named tensor of the same shape.
    A table of the sizes of images, such as ``image_grid_thw``, is returned for all images of the global micro-batch.

    Args:
        batch: a tuple of positional or a dict of keyword arguments of the root module. Every rank passes the same
            values.
        device_mesh: a mesh with the shape of the plan's mesh; or the sharded module, which knows its mesh and plan.
        plan: its input ports of the root have the layout of each tensor. None: the plan of the sharded module.
        pad: name of a tensor -> the value with which its samples and its sequences are padded, at their ends, to sizes
            that the plan's axes divide: for example ``{"input_ids": 0, "attention_mask": 0, "labels": -100}``. None:
            sizes that do not divide are an error.
        is_local: whether ``batch`` has this rank's own samples only, those of its `data_shard`. Sequences are whole,
            and are cut here if the plan splits them.

    Raises:
        PlanMismatchError: the module was not sharded, or this process is no rank of the mesh.
        PlanLayoutError: the layout of a tensor does not divide the tensor evenly, or ``pad`` has no value for it.
        UnmatchedKeyError: the plan does not name a tensor, and does not say how it is split.
        JobError: samples have images of other sizes than the first one, or tokens that do not go with them.
    """
    device = None
    if isinstance(device_mesh, nn.Module):
        known = sharded_as(device_mesh)
        if isinstance(batch, Mapping):
            batch = with_position_ids(device_mesh, (), batch)
        device_mesh, plan = known.device_mesh, known.plan
        device = device_mesh.device_type
    if plan is None:
        raise TypeError("local_batch() needs a plan with a device mesh; or give the sharded module alone")
    check_member(device_mesh)
    layouts = root_layouts(plan)
    mesh_shape, ranks = tuple(device_mesh.shape), 1
    if is_local:
        ranks = math.prod(mesh_shape[axis] for axis in _sample_axes(layouts.values()))
        layouts = _of_local_samples(layouts)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    first = next(iter(batch), "") if isinstance(batch, dict) else "0"
    look_into_dataclasses(batch)

    def layout_of(name: str) -> Layout | None:
        return layouts.get(name, layouts.get("") if name == first else None)

    sources = {path_text(path): leaf for path, leaf in pytree.tree_leaves_with_path(batch)}
    if pad is not None:
        batch = _padded(batch, _planned(batch, layout_of), mesh_shape, pad)
    planned = _planned(batch, layout_of)
    tables = _whole_tables(batch, ranks, layout_of)
    ids = layouts.get(POSITION_IDS) if isinstance(batch, Mapping) and POSITION_IDS not in batch else None

    def local_slice(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name = path_text(path)
        if name in tables:
            table = as_numbers(tables[name] if device is None else tables[name].to(device))
            if ids is not None:
                _unmade_ids[table] = functools.partial(_position_ids, dict(batch), ids, mesh_shape, tuple(coordinate))
            return table
        layout = layout_of(name)
        if layout is None:
            layout = layout_like(leaf.shape, planned, name, layouts)
        piece = slice_of(leaf, layout, mesh_shape, tuple(coordinate), name)
        if leaf.is_meta and (values := values_of(leaf)) is not None:
            with_values(piece, slice_of(values, layout, mesh_shape, tuple(coordinate), name))
        piece = piece if device is None else piece.to(device)
        if not is_local:
            _sources[piece] = weakref.ref(sources[name])
        return piece

    return pytree.tree_map_with_path(local_slice, batch)


def _planned(batch: Any, layout_of: Callable[[str], Layout | None]) -> list[tuple[tuple[int, ...], Layout]]:
    """Return shape and layout of each tensor of ``batch`` that the plan names."""
    leaves = ((path_text(path), leaf) for path, leaf in pytree.tree_leaves_with_path(batch))
    tensors = ((layout_of(name), leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor))
    return [(tuple(leaf.shape), layout) for layout, leaf in tensors if layout is not None]


def _whole_tables(batch: Any, ranks: int, layout_of: Callable[[str], Layout | None]) -> dict[str, torch.Tensor]:
    """Return name -> table of the sizes of all images, for those tables that ``batch`` has the parts of one rank of.

    No plan names a table: it is no tensor of the graph.

    Raises:
        JobError: samples have images of other sizes than the first one.
    """
    tensors = tensors_in(batch)
    names = {id(leaf): path_text(path) for path, leaf in pytree.tree_leaves_with_path(batch)}
    tables = [table for table in size_tables(tensors) if layout_of(names[id(table.tensor)]) is None]
    if not tables:
        return {}
    check_alike(tables, samples_of(tensors, tables), names)
    return {names[id(table.tensor)]: whole_table(table, ranks) for table in tables}


def _padded(
    batch: Any,
    planned: Sequence[tuple[tuple[int, ...], Layout]],
    mesh_shape: tuple[int, ...],
    pad: Mapping[str, float],
) -> Any:
    """Return ``batch`` padded along dims 0 and 1 to multiples of the ranks that split them.

    Raises:
        PlanLayoutError: a tensor needs padding, and ``pad`` has no value for it.
    """
    # (dim, its length) -> the length after padding, the same for all tensors with that length.
    lengths: dict[tuple[int, int], int] = {}
    for shape, layout in planned:
        for dim, count in enumerate(shard_counts(layout, mesh_shape, len(shape))[:2]):
            length = lengths.get((dim, shape[dim]), shape[dim])
            lengths[dim, shape[dim]] = length + -length % count

    def padded(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        target = [lengths.get((dim, length), length) for dim, length in enumerate(leaf.shape)]
        if target == list(leaf.shape):
            return leaf
        name = path_text(path)
        if name not in pad:
            raise PlanLayoutError(
                f"The input {name!r} of shape {tuple(leaf.shape)} has to be padded to {tuple(target)}, but pad has no "
                "value for it.",
                field="input_plan",
                key=name,
                what_to_do=f"Add {name!r} to pad, with the value that the model ignores there.",
            )
        # torch's widths go from the last dim to the first.
        widths = [width for dim in reversed(range(leaf.dim())) for width in (0, target[dim] - leaf.shape[dim])]
        return torch.nn.functional.pad(leaf, widths, value=pad[name])

    return pytree.tree_map_with_path(padded, batch)


def layout_like(
    shape: Sequence[int], planned: Iterable[tuple[Sequence[int], Layout]], name: str, named: Iterable[str]
) -> Layout:
    """Return the layout of a tensor that the plan does not name: that of a named tensor with the same leading dims.

    That is the first named tensor of the same shape, or else the first one with the same dims up to its last sharded
    one. A tensor that has a single row where that tensor is sharded is replicated.

    Args:
        shape: shape of the tensor, global if ``planned`` has global shapes, local if it has local ones.
        planned: shape and layout of each named tensor.
        name: name of the tensor in the error message.
        named: names of the arguments in the plan, for the error message.

    Raises:
        UnmatchedKeyError: no named tensor says how the tensor is split.
    """
    tensors = [(tuple(other), layout) for other, layout in planned]
    for other, layout in sorted(tensors, key=lambda item: item[0] != tuple(shape)):
        dims = [dim for dim in map(sharded_dim, layout) if dim is not None]
        last = max(dims, default=-1) + 1
        # A tensor of one dim may be a table that is as long as the batch.
        if tuple(shape) == other or (len(shape) > 1 and tuple(shape[:last]) == other[:last]):
            return layout
        if not dims or (len(shape) > 1 and all(dim >= len(shape) or shape[dim] == 1 for dim in dims)):
            return (Replicate(),) * len(layout)
    raise UnmatchedKeyError(
        f"The argument {name!r} of shape {tuple(shape)} is not in the plan, and its shape "
        "does not say how it is split.",
        field="input_plan",
        key=name,
        what_to_do=f"Plan with {name!r} among the example inputs; the plan has {', '.join(map(repr, named))}.",
    )


def slice_of(
    tensor: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], name: str
) -> torch.Tensor:
    """Return the shard of ``tensor`` in ``layout`` that the rank at ``coordinate`` of the mesh holds.

    Args:
        tensor: the global tensor.
        layout: its layout on the mesh; a partial placement counts as replicated.
        mesh_shape: sizes of the mesh's axes.
        coordinate: index of the rank along each axis.
        name: name of the tensor in the error message.

    Raises:
        PlanLayoutError: ``layout`` does not divide the tensor evenly.
    """
    if not divides(tensor.shape, layout, mesh_shape):
        raise _uneven(tensor.shape, layout, mesh_shape, name)
    for placement, size, index in zip(layout, mesh_shape, coordinate, strict=True):
        dim = sharded_dim(placement)
        if dim is not None:
            length = tensor.shape[dim] // size
            tensor = tensor.narrow(dim, index * length, length)
    return tensor.contiguous()


def _uneven(shape: Sequence[int], layout: Layout, mesh_shape: tuple[int, ...], name: str) -> PlanLayoutError:
    """Return the error for a tensor of the batch that its layout does not divide; it names the sizes that would do."""
    dims = len(shape)
    if any(dim is not None and dim >= dims for dim in map(sharded_dim, layout)):
        legal = "Give the tensor the dims that the plan was made for."
    else:
        counts = enumerate(shard_counts(layout, mesh_shape, dims))
        uneven = [(dim, count) for dim, count in counts if shape[dim] % count]
        legal = "Feed " + " and ".join(
            f"a multiple of {count} along dim {dim} ({shape[dim] // count * count or count} or "
            f"{(shape[dim] // count + 1) * count}, not {shape[dim]})"
            for dim, count in uneven
        )
        legal += ", or pass pad= to pad the batch."
    return PlanLayoutError(
        f"The input {name!r} of shape {tuple(shape)} does not divide under "
        f"({', '.join(format_layout(layout))}) on the mesh {mesh_shape}.",
        field="input_plan",
        key=name,
        what_to_do=legal,
    )
