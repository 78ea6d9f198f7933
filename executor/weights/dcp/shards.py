"""Shards as ``torch.distributed.checkpoint`` (DCP) writes them: a shard may be several pieces of its tensor.

torch describes the shard of a DTensor by one offset and one size. A strided shard, of experts' packed weights for
instance, has several of each; torch then refuses to save it ("Failed to validate global plan").
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from executor.torch_internals.dtensor import local_of
from executor.weights.lazy_tensors import pieces_of
from executor.weights.local_shards import local_indices


class DcpShards:
    """What this rank stores of a DTensor, to be saved with a ``SavePlanner``."""

    def __init__(self, tensor: DTensor) -> None:
        self._shape = tensor.shape
        local = local_of(tensor).detach()
        self._pieces: dict[torch.Size, torch.Tensor] = {}
        for box in itertools.product(*map(pieces_of, local_indices(tensor))):
            offsets = torch.Size([there.start for there, _ in box])
            self._pieces[offsets] = local[tuple(here for _, here in box)]

    def __create_write_items__(self, name: str, shards: object) -> list[WriteItem]:
        """Return one item for each piece."""
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self._shape,
                ),
            )
            for offsets, piece in self._pieces.items()
        ]

    def piece(self, offsets: torch.Size) -> torch.Tensor:
        """Return the piece at ``offsets``."""
        return self._pieces[offsets]


class SavePlanner(DefaultSavePlanner):
    """A planner that finds the pieces of ``DcpShards``."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written at ``index``."""
        stored = self.state_dict[index.fqn]
        if isinstance(stored, DcpShards):
            assert index.offset is not None
            return stored.piece(torch.Size(index.offset))
        return super().lookup_object(index)


def for_dcp(tensor: torch.Tensor) -> DcpShards | torch.Tensor:
    """Return what to save for ``tensor`` with a ``SavePlanner``."""
    return DcpShards(tensor) if isinstance(tensor, DTensor) else tensor.detach()
