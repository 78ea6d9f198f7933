"""A safetensors file that is written tensor by tensor, so that the whole file is never in memory.

The format: eight bytes with the length of the header, little endian; the header, JSON with dtype, shape and offsets of
each tensor; then the bytes of the tensors, without gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from executor.weights.sources import SAFETENSORS_DTYPES
from planner.errors import WeightsError

_ALIGNMENT = 8
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class SafetensorsFile:
    """A new safetensors file; ``write`` fills in its tensors in any order."""

    def __init__(self, path: Path, headers: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write the header.

        Args:
            path: the file, which does not exist.
            headers: name -> a tensor, perhaps on meta, with the dtype and shape of the one to be written.
            metadata: texts by name, kept in the header.
        """
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name, tensor in headers.items():
            start, end = end, end + tensor.numel() * tensor.dtype.itemsize
            kind = dtype_name(name, tensor.dtype)
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (math.ceil(len(text) / _ALIGNMENT) * _ALIGNMENT - len(text))
        self._headers = header
        self._stream = path.open("xb")
        self._stream.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
        self._first = self._stream.tell()
        self._stream.truncate(self._first + end)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of ``name``, a tensor on the CPU."""
        header = self._headers[name]
        assert header["shape"] == list(tensor.shape), f"{name} has shape {tuple(tensor.shape)}, not {header['shape']}"
        start, end = header["data_offsets"]
        if start == end:
            return
        self._stream.seek(self._first + start)
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._stream.write(flat.numpy().data)

    def sync(self) -> None:
        """Wait until the file is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in safetensors.

    Raises:
        WeightsError: safetensors has no such dtype; names the tensor, ``name``.
    """
    if dtype not in _DTYPE_NAMES:
        raise WeightsError(f"{name!r} has the dtype {dtype}, which safetensors does not have.")
    return _DTYPE_NAMES[dtype]
