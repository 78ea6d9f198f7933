"""The indices of a tensor that each rank of a mesh stores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import Layout
from executor.torch_internals.weights import split_by_placement
from executor.weights.lazy_tensors import Indices, full_indices


def stored_indices(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Indices:
    """Return the indices that the rank at ``coordinate`` stores of a tensor of ``shape``.

    Axes split the tensor in the order of the mesh, as in ``distribute_tensor``; a strided shard is several pieces.
    """
    indices = list(full_indices(shape))
    for placement, ranks, index in zip(layout, mesh_shape, coordinate, strict=True):
        dim = getattr(placement, "dim", None)
        split = None if dim is None else split_by_placement(indices[dim], placement, ranks)
        if split is not None:
            dim, pieces = split
            # Where there are fewer indices than ranks, the last ranks have none.
            indices[dim] = pieces[index] if index < len(pieces) else indices[dim][:0]
    return tuple(indices)


def local_indices(tensor: torch.Tensor) -> Indices:
    """Return the indices of ``tensor`` that this rank stores: of a plain tensor, all."""
    if not isinstance(tensor, DTensor):
        return full_indices(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "resolve_plan rejects meshes without this rank"
    return stored_indices(tensor.shape, tuple(tensor.placements), mesh.shape, coordinate)
