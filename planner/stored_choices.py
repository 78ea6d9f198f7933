"""How a parameter can rest between its uses, and how its gradient is reduced for that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layout import Layout, divides, replicated, split_factor
from planner.graph import Value
from planner.parameter_costs import StoredChoice
from planner.run import Run


def stored_layouts(value: Value, mesh_shape: Sequence[int]) -> list[Layout]:
    """Return every layout that a parameter can rest in: replicated or evenly split, per axis."""
    found: list[Layout] = [()]
    for size in mesh_shape:
        options = [Replicate(), *(Shard(dim) for dim in range(len(value.shape)))] if size > 1 else [Replicate()]
        found = [(*layout, option) for layout in found for option in options]
    return [layout for layout in found if divides(value.shape, layout, mesh_shape)] or [replicated(len(mesh_shape))]


def stored_choices(
    value: Value, layouts: Sequence[Layout], run: Run, natural: Sequence[Layout], uses: int
) -> tuple[StoredChoice, ...]:
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
        once = [StoredChoice(stored=layout, accumulated=None) for layout in layouts]
        return (*once, *(_reduced_every_time(layouts, run) if trained else ()))
    return tuple(
        StoredChoice(stored=layout, accumulated=accumulated)
        for layout in layouts
        for accumulated in dict.fromkeys([*sorted(set(natural), key=str), layout])
    )


def _reduced_every_time(layouts: Sequence[Layout], run: Run) -> list[StoredChoice]:
    """Return the choices that reduce a gradient in every micro-batch: with the block, or by itself."""
    mesh_shape = run.mesh.shape
    with_block = [
        StoredChoice(stored=layout, accumulated=accumulated, gathered_over=axis)
        for layout in layouts
        for axis, placement in enumerate(layout)
        if isinstance(placement, Shard)
        for accumulated in _left_by_block(layout, axis, mesh_shape)
    ]
    if run.micro_batches == 1:
        return with_block
    split = [layout for layout in layouts if split_factor(layout, mesh_shape) > 1]
    return [*(StoredChoice(stored=layout, accumulated=layout) for layout in split), *with_block]


def _left_by_block(stored: Layout, axis: int, mesh_shape: Sequence[int]) -> list[Layout]:
    """Return the layouts in which a gradient can be once it is split over ``axis``: a sum is left on others."""
    options = [
        [placement] if a == axis or placement != Replicate() or mesh_shape[a] == 1 else [placement, Partial()]
        for a, placement in enumerate(stored)
    ]
    return [tuple(layout) for layout in itertools.product(*options)]
