"""Tensors of a checkpoint that ``torch.distributed.checkpoint`` (DCP) has written, read by slices."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from executor.weights.lazy_tensors import Box, LazyTensor, StoredTensor

_METADATA_FILE = ".metadata"
MODEL = "model"
"""Key of the model in the checkpoints that shardplan writes."""


def is_dcp_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds a DCP checkpoint."""
    return (folder / _METADATA_FILE).is_file()


def dcp_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Return name -> lazy tensor of a DCP checkpoint: of its entry ``model`` if it has one, else of all entries."""
    entries = dcp_entries(folder)
    model = {path[1:]: tensor for path, tensor in entries.items() if path[0] == MODEL and len(path) > 1}
    return {".".join(path): tensor for path, tensor in (model or entries).items()}


def dcp_entries(folder: Path) -> dict[tuple[str, ...], LazyTensor]:
    """Return path of keys -> lazy tensor of a DCP checkpoint, for each of its tensors."""
    metadata = FileSystemReader(folder).read_metadata()
    paths: dict[str, tuple[str, ...]] = metadata.planner_data or {}
    return {
        tuple(map(str, paths.get(name, (name,)))): StoredTensor(
            item.size, item.properties.dtype, _SliceReader(folder, metadata, name), reads_slices=False
        )
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


class _SliceReader:
    """Reads slices of one tensor of a DCP checkpoint; every piece of a file that a slice touches is read whole."""

    def __init__(self, folder: Path, metadata: Metadata, name: str) -> None:
        self._folder, self._metadata, self._name = folder, metadata, name

    def __call__(self, box: Box) -> torch.Tensor:
        item = self._metadata.state_dict_metadata[self._name]
        assert isinstance(item, TensorStorageMetadata)
        offsets = torch.Size([along.start for along in box])
        sizes = torch.Size([along.stop - along.start for along in box])
        values = torch.empty(sizes, dtype=item.properties.dtype)
        reader = FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        items = create_read_items_for_chunk_list(self._name, item, [ChunkStorageMetadata(offsets, sizes)])
        reader.read_data(LoadPlan(items), _IntoTensor(values)).wait()  # type: ignore[arg-type]
        return values


class _IntoTensor:
    """The part of a load planner that ``FileSystemReader.read_data`` calls: all pieces go into one tensor."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """Return the view of the tensor that a piece is copied to."""
        values = self._values
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the piece has been copied."""
