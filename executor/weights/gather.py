"""Whole tensors on one rank: the others send it their shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from executor.torch_internals.dtensor import local_of
from executor.weights.lazy_tensors import Indices, write_at
from executor.weights.local_shards import stored_indices
from executor.weights.ranks import Ranks


@torch.no_grad()
def whole_on_rank(tensor: torch.Tensor, rank: int, ranks: Ranks) -> torch.Tensor | None:
    """Return ``tensor`` whole and on the CPU on ``rank``, None on the other ranks. All ranks call this together.

    The rank holds the whole tensor and one shard at a time. Of a plain tensor its own is returned.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if ranks.rank == rank else None
    local = local_of(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if ranks.rank == rank else None
    here = ranks.global_rank(ranks.rank)
    for holder, indices in _holders(tensor, ranks.global_rank(rank)):
        if whole is not None:
            piece = local
            if holder != here:
                piece = local.new_empty([len(along) for along in indices])
                dist.recv(piece, src=holder, group=ranks.group)
            write_at(whole, indices, piece)
        elif holder == here:
            dist.send(local.contiguous(), dst=ranks.global_rank(rank), group=ranks.group)
    return whole


def _holders(tensor: DTensor, receiver: int) -> Iterator[tuple[int, Indices]]:
    """Yield (global rank, indices) of ranks that hold all of ``tensor`` together, each index once.

    Where several ranks have the same shard, the one nearest to the receiver is taken, if possible the receiver itself.
    """
    mesh, layout = tensor.device_mesh, tuple(tensor.placements)
    own = (mesh.mesh == receiver).nonzero()[0].tolist()
    splits = [hasattr(placement, "dim") and size > 1 for placement, size in zip(layout, mesh.shape, strict=True)]
    along_axes = [range(size) if is_split else [at] for size, is_split, at in zip(mesh.shape, splits, own, strict=True)]
    for coordinate in itertools.product(*along_axes):
        indices = stored_indices(tensor.shape, layout, mesh.shape, coordinate)
        if all(len(along) for along in indices):
            yield int(mesh.mesh[coordinate]), indices
