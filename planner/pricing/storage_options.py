"""How a parameter can rest between its uses, and how its gradient is reduced for that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cost_model.layouts.layout import Layout, divides, replicated, sharded_dim, split_factor
from planner.graph.op_graph import Value
from planner.pricing.parameter_costs import StorageOption
from planner.pricing.run_spec import Run


def stored_layouts(value: Value, mesh_shape: Sequence[int], used: Iterable[Layout] = ()) -> list[Layout]:
    """Return every layout that a parameter can rest in: replicated or evenly split, per axis.

    Args:
        used: layouts in which it is computed with. Strided shards among them it can rest in as well: nothing leads
            from another layout to them.
    """
    strided = list(dict.fromkeys(place for layout in used for place in layout if isinstance(place, _StridedShard)))
    found: list[Layout] = [()]
    for size in mesh_shape:
        options: list[Placement] = [Replicate()]
        if size > 1:
            options += [*(Shard(dim) for dim in range(len(value.shape))), *strided]
        found = [(*layout, option) for layout in found for option in options]
    whole = replicated(len(mesh_shape))
    return [layout for layout in found if divides(value.shape, layout, mesh_shape) and not _mixes(layout)] or [whole]


def _mixes(layout: Layout) -> bool:
    """Tell whether a dim that a strided shard splits is split on another axis as well."""
    strided = {place.dim for place in layout if isinstance(place, _StridedShard)}
    return any(sum(sharded_dim(place) == dim for place in layout) > 1 for dim in strided)


def storage_options(
    value: Value, layouts: Sequence[Layout], run: Run, natural: Sequence[Layout], uses: int
) -> tuple[StorageOption, ...]:
    """Return every way in which a parameter can rest in one of ``layouts`` and its gradient get there.

    Args:
        value: the parameter.
        layouts: at rest.
        run: what is planned for.
        natural: the layouts in which its uses leave its gradient.
        uses: how many classes of regions use it.
    """
    trained = run.job.training and value.requires_grad
    if uses < 2 or not trained:
        once = [StorageOption(stored=layout, accumulated=None) for layout in layouts]
        return (*once, *(_reduced_every_time(layouts, run) if trained else ()))
    return tuple(
        StorageOption(stored=layout, accumulated=accumulated)
        for layout in layouts
        for accumulated in dict.fromkeys([*sorted(set(natural), key=str), layout])
    )


def _reduced_every_time(layouts: Sequence[Layout], run: Run) -> list[StorageOption]:
    """Return the choices that reduce a gradient in every micro-batch: with the block, or by itself."""
    mesh_shape = run.mesh.shape
    with_block = [
        StorageOption(stored=layout, accumulated=accumulated, fsdp_axes=axes)
        for layout in layouts
        for axes in fsdp_axis_groups(mesh_shape)
        if isinstance(layout[axes[0]], Shard) and all(layout[axis] == layout[axes[0]] for axis in axes)
        for accumulated in _left_by_block(layout, axes, mesh_shape)
    ]
    if run.micro_batches == 1:
        return with_block
    split = [layout for layout in layouts if split_factor(layout, mesh_shape) > 1]
    return [*(StorageOption(stored=layout, accumulated=layout) for layout in split), *with_block]


def fsdp_axis_groups(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the axes over which a block can be gathered: each by itself, and two that follow each other as one."""
    axes = range(len(mesh_shape))
    pairs = [(outer, inner) for outer, inner in itertools.pairwise(axes) if mesh_shape[outer] > 1 < mesh_shape[inner]]
    return [*((axis,) for axis in axes), *pairs]


def _left_by_block(stored: Layout, axes: tuple[int, ...], mesh_shape: Sequence[int]) -> list[Layout]:
    """Return the layouts in which a gradient can be once it is split over ``axes``: a sum is left on others."""
    options = [
        [placement] if a in axes or placement != Replicate() or mesh_shape[a] == 1 else [placement, Partial()]
        for a, placement in enumerate(stored)
    ]
    return [tuple(layout) for layout in itertools.product(*options)]
