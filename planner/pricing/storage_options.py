"""Storage options: the stored layouts that a parameter can have, and the ways in which its gradient is reduced."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, divides, replicated, sharded_dim, split_factor
from cost_model.layouts.uneven import Rounded, shards_once
from planner.graph.op_graph import Value
from planner.pricing.run_spec import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOption:
    """A stored layout of a parameter, and how it is all-gathered and its gradient reduced.

    Attributes:
        stored: the layout between uses.
        accumulated: the layout to which every backward reduces the gradient. None: the gradient accumulates over
            micro-batches unreduced, in the layout in which the parameter's only use computes it, and is reduced once a
            step; or the parameter is frozen.
        fsdp_axes: indices of the mesh axes over which the parameter's FSDP group is all-gathered; None: the parameter
            is in no FSDP group and is all-gathered by itself.
    """

    stored: Layout
    accumulated: Layout | None
    fsdp_axes: tuple[int, ...] | None = None


def fsdp_use_layouts(option: StorageOption) -> tuple[Layout, Layout | None] | None:
    """Return the layouts of a parameter and of its gradient in its only use, if ``fully_shard`` runs ``option``.

    None if it cannot: ``fully_shard`` shards one dim over the axes that it all-gathers over, and leaves the placements
    on all other axes unchanged. A frozen parameter has no gradient.
    """
    axes, accumulated, stored = option.fsdp_axes, option.accumulated, option.stored
    if axes is None:
        return None
    split = stored[axes[0]]
    if not isinstance(split, Shard) or any(
        layout[axis] != split for layout in (stored, accumulated) if layout is not None for axis in axes
    ):
        return None
    if any(sharded_dim(placement) == split.dim for placement in stored[axes[-1] + 1 :]):
        return None  # an inner axis shards the same dim: a single all-gather cannot undo the outer split

    def in_use(layout: Layout, placement: Placement) -> Layout:
        return tuple(placement if axis in axes else other for axis, other in enumerate(layout))

    return in_use(stored, Replicate()), None if accumulated is None else in_use(accumulated, Partial())


def stored_layouts(
    value: Value, mesh_shape: Sequence[int], compute_layouts: Iterable[Layout] = (), rounded: Rounded | None = None
) -> list[Layout]:
    """Return every layout in which a parameter can be stored: replicated or evenly sharded on each axis.

    Args:
        compute_layouts: layouts in which ops use the parameter. Strided shards among their placements can be stored as
            well, because no redistribution leads to a strided shard.
        rounded: lengths of dims that are rounded up (`OpGraph.rounded`).
    """
    strided = dict.fromkeys(place for layout in compute_layouts for place in layout if isinstance(place, _StridedShard))
    layouts: list[Layout] = [()]
    for size in mesh_shape:
        placements: list[Placement] = [Replicate()]
        if size > 1:
            placements += [*(Shard(dim) for dim in range(len(value.shape))), *strided]
        layouts = [(*layout, placement) for layout in layouts for placement in placements]
    possible = [
        layout
        for layout in layouts
        if divides(value.shape, layout, mesh_shape)
        and not _mixes_strided_shards(layout)
        and shards_once(value.shape, layout, rounded or {})
    ]
    return possible or [replicated(len(mesh_shape))]


def _mixes_strided_shards(layout: Layout) -> bool:
    """Return whether a dim with a strided shard is sharded on another axis as well."""
    strided_dims = {place.dim for place in layout if isinstance(place, _StridedShard)}
    return any(sum(sharded_dim(place) == dim for place in layout) > 1 for dim in strided_dims)


def storage_options(
    value: Value, layouts: Sequence[Layout], run: Run, gradient_layouts: Sequence[Layout], is_used_again: bool
) -> tuple[StorageOption, ...]:
    """Return every storage option of a parameter whose stored layout is one of ``layouts``.

    Args:
        gradient_layouts: the layouts in which the parameter's uses compute its gradient.
        is_used_again: whether gradients of several uses add up.
    """
    trained = run.job.training and value.requires_grad
    if not is_used_again or not trained:
        once_a_step = [StorageOption(stored=layout, accumulated=None) for layout in layouts]
        if trained:
            return (*once_a_step, *_reduced_in_every_backward(layouts, run))
        return (*once_a_step, *(_in_fsdp_groups(layouts, run, trained=False) if run.job.training else ()))
    return tuple(
        StorageOption(stored=layout, accumulated=accumulated)
        for layout in layouts
        for accumulated in dict.fromkeys([*sorted(set(gradient_layouts), key=str), layout])
        if _strided_alike(accumulated, layout)
    )


def _strided_alike(one: Layout, other: Layout) -> bool:
    """Return whether both have the same strided shards: no redistribution leads to or from another layout of these."""
    return all(a == b or _StridedShard not in (type(a), type(b)) for a, b in zip(one, other, strict=True))


def _reduced_in_every_backward(layouts: Sequence[Layout], run: Run) -> list[StorageOption]:
    """Return the options that reduce the gradient in every micro-batch, in an FSDP group or by itself."""
    in_fsdp_groups = _in_fsdp_groups(layouts, run, trained=True)
    if run.micro_batches == 1:
        return in_fsdp_groups
    sharded = [layout for layout in layouts if split_factor(layout, run.mesh.shape) > 1]
    return [*(StorageOption(stored=layout, accumulated=layout) for layout in sharded), *in_fsdp_groups]


def _in_fsdp_groups(layouts: Sequence[Layout], run: Run, *, trained: bool) -> list[StorageOption]:
    mesh_shape = run.mesh.shape
    return [
        StorageOption(stored=layout, accumulated=accumulated, fsdp_axes=axes)
        for layout in layouts
        for axes in fsdp_axis_groups(mesh_shape)
        if isinstance(layout[axes[0]], Shard) and all(layout[axis] == layout[axes[0]] for axis in axes)
        for accumulated in (_layouts_after_reduce_scatter(layout, axes, mesh_shape) if trained else [None])
    ]


def fsdp_axis_groups(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of axis indices over which an FSDP group can be all-gathered: each axis, each adjacent pair."""
    axes = range(len(mesh_shape))
    pairs = [(outer, inner) for outer, inner in itertools.pairwise(axes) if mesh_shape[outer] > 1 < mesh_shape[inner]]
    return [*((axis,) for axis in axes), *pairs]


def _layouts_after_reduce_scatter(stored: Layout, axes: tuple[int, ...], mesh_shape: Sequence[int]) -> list[Layout]:
    """Return the layouts that a gradient can have after its reduce-scatter over ``axes``.

    On each other axis on which ``stored`` is replicated, the gradient is replicated or still partial.
    """
    placements = [
        [placement] if axis in axes or placement != Replicate() or mesh_shape[axis] == 1 else [placement, Partial()]
        for axis, placement in enumerate(stored)
    ]
    return [tuple(layout) for layout in itertools.product(*placements)]
