"""Sources of weights: names and lazy tensors of files, of folders, and of a state dict that some ranks hold."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from executor.weights.dcp.opened_state import OpenedState, is_training_state
from executor.weights.dcp.source import dcp_tensors, is_dcp_folder
from executor.weights.lazy_tensors import Box, LazyTensor, StoredTensor, in_memory
from executor.weights.ranks import Ranks
from planner.errors import WeightsError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""Name of a dtype in a safetensors file -> torch's dtype."""

Source = str | os.PathLike[str] | Mapping[str, torch.Tensor] | None


def open_source(source: Source, ranks: Ranks, names: Collection[str]) -> dict[str, LazyTensor]:
    """Return name -> lazy tensor of everything in ``source``. All ranks call this together.

    Args:
        source: path of a safetensors file, a folder with such files or with a DCP checkpoint, or a state dict. Ranks
            that have no state dict pass None, and get its values from the first rank that has one.
        ranks: the ranks that load together.
        names: names of the module: a training state has fused projections under their parts' names where these are
            the module's.

    Raises:
        WeightsError: a path that is none of these, a file that cannot be read, or no source on any rank.
    """
    if isinstance(source, Mapping | None):
        is_path = ranks.gathered(False)
        if not any(is_path):
            return _of_state_dicts(source, ranks)
    else:
        is_path = ranks.gathered(True)
        if all(is_path):
            with ranks.agreeing(what="opening the source of weights"):
                return _of_path(Path(source), names)
    raise WeightsError(
        f"Rank {is_path.index(True)} has a path as its source of weights, and rank {is_path.index(False)} has none.",
        what_to_do="Pass the path on every rank, or a state dict on one rank and None on the others.",
    )


def safetensors_tensors(file: Path) -> dict[str, LazyTensor]:
    """Return name -> lazy tensor of a safetensors file."""
    tensors: dict[str, LazyTensor] = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  it is no mapping
            header = opened.get_slice(name)
            kind = header.get_dtype()
            if kind not in SAFETENSORS_DTYPES:
                raise WeightsError(
                    f"{name!r} in {file} has the dtype {kind}.",
                    what_to_do=f"Convert it to one of {', '.join(SAFETENSORS_DTYPES)}.",
                )
            tensors[name] = StoredTensor(header.get_shape(), SAFETENSORS_DTYPES[kind], _SliceReader(file, name))
    return tensors


class _SliceReader:
    """Reads slices of one tensor of a safetensors file."""

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name

    def __call__(self, box: Box) -> torch.Tensor:
        # The file is mapped for one read only: pages that have been read would stay in this process's memory.
        with safe_open(self._file, framework="pt") as opened:
            if not box:
                scalar: torch.Tensor = opened.get_tensor(self._name)
                return scalar
            values: torch.Tensor = opened.get_slice(self._name)[box]
            return values


def _of_path(path: Path, names: Collection[str]) -> dict[str, LazyTensor]:
    if path.is_file():
        return _of_file(path)
    if not path.is_dir():
        raise WeightsError(
            f"{str(path)!r} is neither a file nor a folder on this rank.",
            what_to_do="Give a path that every rank can read; huggingface_hub.snapshot_download returns the folder of "
            "a model of the Hub.",
        )
    if is_training_state(path):
        return OpenedState.of(path).of_model(names)
    if is_dcp_folder(path):
        return dcp_tensors(path)
    index = path / INDEX_FILE
    if index.is_file():
        return _of_index(index)
    if (path / SINGLE_FILE).is_file():
        return _of_file(path / SINGLE_FILE)
    held = sorted(file.name for file in path.iterdir())[:8]
    raise WeightsError(
        f"The folder {str(path)!r} has neither {INDEX_FILE}, nor {SINGLE_FILE}, nor a DCP checkpoint; it has "
        f"{', '.join(held) or 'nothing'}.",
        what_to_do="Give the safetensors file itself, or save the weights as safetensors.",
    )


def _of_file(path: Path) -> dict[str, LazyTensor]:
    if path.name.endswith(".index.json"):
        return _of_index(path)
    if path.suffix != ".safetensors":
        raise WeightsError(
            f"{str(path)!r} is no safetensors file.",
            what_to_do="Convert it, or read it on one rank and pass the state dict there, None on the others.",
        )
    return safetensors_tensors(path)


def _of_index(index: Path) -> dict[str, LazyTensor]:
    files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    lost = sorted({file for file in files.values() if not (index.parent / file).is_file()})
    if lost:
        raise WeightsError(
            f"{str(index)!r} names {len(lost)} files that are not there: {', '.join(lost[:8])}.",
            what_to_do="Download or copy the whole folder.",
        )
    tensors: dict[str, LazyTensor] = {}
    for file in sorted(set(files.values())):
        tensors.update(safetensors_tensors(index.parent / file))
    return tensors


def _of_state_dicts(state: Mapping[str, torch.Tensor] | None, ranks: Ranks) -> dict[str, LazyTensor]:
    has_state = ranks.gathered(state is not None)
    if all(has_state):
        assert state is not None
        return {name: in_memory(tensor.detach()) for name, tensor in state.items()}
    if not any(has_state):
        raise WeightsError(
            "No rank has a source of weights: all of them passed None.",
            what_to_do="Pass a path on every rank, or a state dict on one of them.",
        )
    first = has_state.index(True)
    headers = None if state is None else {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = ranks.from_rank(headers, first)
    return {
        name: BroadcastTensor(shape, dtype, None if state is None else state[name], first, ranks)
        for name, (shape, dtype) in shapes.items()
    }


class BroadcastTensor(LazyTensor):
    """A tensor that one rank has; ``prepared`` sends all of it to every rank."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, tensor: torch.Tensor | None, source: int, ranks: Ranks
    ) -> None:
        super().__init__(shape, dtype)
        self._tensor, self._source, self._ranks = tensor, source, ranks

    def read(self, indices: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Raise: only the prepared tensor can be read."""
        raise AssertionError("call prepared() on every rank first")

    def prepared(self) -> LazyTensor:
        """Return the tensor, received from the rank that has it."""
        ranks = self._ranks
        if self._tensor is not None and ranks.rank == self._source:
            values = self._tensor.detach().to(ranks.device).contiguous()
        else:
            values = torch.empty(self.shape, dtype=self.dtype, device=ranks.device)
        dist.broadcast(values, src=ranks.global_rank(self._source), group=ranks.group)
        return in_memory(values)
