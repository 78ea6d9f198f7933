"""An op's arguments as JSON and back: numbers, text, names of values, torch's few constants, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from planner.errors import GraphFormatError
from planner.graph.op_graph import Ref

MAX_DEPTH: Final = 6
"""Most levels of nested lists; ops have two."""
MAX_LIST: Final = 10_000
MAX_TEXT: Final = 1_000
MAX_INT: Final = 2**63 - 1

_DTYPES: Final = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2
float8_e4m3fnuz float8_e5m2fnuz complex64 complex128
"""
DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in _DTYPES.split()}
"""Names of dtypes that a document may hold."""

_LAYOUTS: Final = {"strided": torch.strided}
_FORMATS: Final = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
_DEVICES: Final = {name: torch.device(name) for name in ("meta", "cpu", "cuda")}
_FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_CONSTANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dtype": DTYPES,
    "layout": _LAYOUTS,
    "memory_format": _FORMATS,
    "device": _DEVICES,
    "float": _FLOATS,
}


class CannotWriteError(ValueError):
    """Raised for an argument that a document cannot hold."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in a document.

    Raises:
        CannotWriteError: a document cannot hold this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if DTYPES.get(name) is not dtype:
        raise CannotWriteError(f"the dtype {dtype}")
    return name


def written(item: Any) -> Any:
    """Return the JSON value of an argument.

    Raises:
        CannotWriteError: a document cannot hold this argument. The message says what it is.
    """
    if item is None or isinstance(item, (bool, str)):
        return item
    if isinstance(item, int):
        return int(item)
    if isinstance(item, float):
        return float(item) if math.isfinite(item) else {"float": str(float(item))}
    if isinstance(item, Ref):
        return {"value": item.value}
    if isinstance(item, tuple):
        return {"tuple": [written(part) for part in item]}
    if isinstance(item, list):
        return [written(part) for part in item]
    if isinstance(item, torch.dtype):
        return {"dtype": dtype_name(item)}
    return _written_constant(item)


def _written_constant(item: Any) -> Any:
    if isinstance(item, torch.device) and item.type in _DEVICES:
        return {"device": item.type}
    for kind, constants in (("layout", _LAYOUTS), ("memory_format", _FORMATS)):
        for name, constant in constants.items():
            if item is constant:
                return {kind: name}
    raise CannotWriteError(f"a {type(item).__name__} among its arguments")


class ArgumentReader:
    """Reads arguments; ``has_value`` returns whether a name is that of a value which an op may refer to."""

    def __init__(self, has_value: Callable[[str], bool]) -> None:
        self._has_value = has_value

    def read(self, item: Any, where: str, depth: int = 0) -> Any:
        """Return the argument that the JSON value ``item`` stands for.

        Args:
            item: a JSON value.
            where: its place in the document, for messages.
            depth: number of lists around it.

        Raises:
            GraphFormatError: it stands for no argument.
        """
        if item is None or isinstance(item, (bool, float)):
            return item
        if isinstance(item, int):
            return item if abs(item) <= MAX_INT else _refuse(where, "a whole number of more than 63 bits")
        if isinstance(item, str):
            return item if len(item) <= MAX_TEXT else _refuse(where, f"a text of more than {MAX_TEXT} characters")
        if isinstance(item, list):
            return self._list(item, where, depth)
        if isinstance(item, dict) and len(item) == 1:
            ((kind, content),) = item.items()
            return self._tagged(kind, content, where, depth)
        return _refuse(where, f"an object with the keys {sorted(map(str, item))[:5]}")

    def _list(self, items: list[Any], where: str, depth: int) -> list[Any]:
        if depth >= MAX_DEPTH:
            _refuse(where, f"lists nested deeper than {MAX_DEPTH}")
        if len(items) > MAX_LIST:
            _refuse(where, f"a list of more than {MAX_LIST} items")
        return [self.read(part, f"{where}[{index}]", depth + 1) for index, part in enumerate(items)]

    def _tagged(self, kind: str, content: Any, where: str, depth: int) -> Any:
        if kind == "tuple" and isinstance(content, list):
            return tuple(self._list(content, where, depth))
        if not isinstance(content, str):
            return _refuse(where, f"{str(kind)[:50]!r} with a {type(content).__name__}")
        if kind == "value":
            return Ref(content) if self._has_value(content) else _refuse(where, f"the unknown value {content[:100]!r}")
        if content in _CONSTANTS.get(kind, {}):
            return _CONSTANTS[kind][content]
        return _refuse(where, f"{str(kind)[:50]!r}: {content[:100]!r}, which stands for nothing")


def _refuse(where: str, what: str) -> Any:
    raise GraphFormatError.at(where, f"it holds {what}")
