"""Checks of ops by their schemas before they run: types of arguments, devices, number of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from planner.errors import GraphFormatError
from planner.graph.op_graph import Ref
from planner.model_rewrites.opaque_op import OpaqueArguments


def _is_int(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, float))


def _is_tensor(item: Any) -> bool:
    return isinstance(item, Ref) or _is_number(item)  # captured ops may have numbers, which torch converts to tensors


def _is_never(item: Any) -> bool:
    return False


def _all(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda item: isinstance(item, (list, tuple)) and all(map(kind, item))


def _maybe(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda item: item is None or kind(item)


_PLAIN: Final[Mapping[str, Callable[[Any], bool]]] = {
    "Tensor": _is_tensor,
    "int": _is_int,
    "SymInt": _is_int,
    "float": _is_number,
    "number": _is_number,
    "bool": lambda item: isinstance(item, bool),
    "str": lambda item: isinstance(item, str),
    "ScalarType": lambda item: isinstance(item, torch.dtype),
    "Layout": lambda item: isinstance(item, torch.layout),
    "MemoryFormat": lambda item: isinstance(item, torch.memory_format),
    "Device": lambda item: isinstance(item, torch.device),
    "Generator": _is_never,
}
_KINDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    **_PLAIN,
    **{f"Optional[{name}]": _maybe(kind) for name, kind in _PLAIN.items()},
    **{f"List[{name}]": _all(kind) for name, kind in _PLAIN.items()},
    **{f"Optional[List[{name}]]": _maybe(_all(kind)) for name, kind in _PLAIN.items()},
    "List[Optional[Tensor]]": _all(_maybe(_is_tensor)),
}


def computes_tensors(op: torch._ops.OpOverload) -> bool:
    """Return whether an op returns only tensors, takes only what a document can hold, and has no ``out`` argument."""
    result_types = {str(item.real_type) for item in op._schema.returns}
    other_arguments = [item for item in op._schema.arguments if str(item.real_type) not in _KINDS]
    has_out = any(item.is_out for item in op._schema.arguments)
    return result_types <= {"Tensor", "List[Tensor]"} and bool(result_types) and not other_arguments and not has_out


def check_arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Check that ``op`` takes these arguments by its schema, and that its results will be on the meta device.

    Any device may be given by keyword, because `run_op` replaces it by the meta device.

    Raises:
        GraphFormatError: a check fails. The message names the argument.
    """
    positional = [item for item in op._schema.arguments if not item.kwarg_only]
    if len(args) > len(positional):
        raise GraphFormatError.at(where, f"{op} takes {len(positional)} arguments and is given {len(args)}")
    arguments = {item.name: value for item, value in zip(positional, args, strict=False)}
    if unknown := (set(kwargs) & set(arguments)) | (set(kwargs) - {item.name for item in op._schema.arguments}):
        raise GraphFormatError.at(where, f"{op} takes no second or further argument {sorted(unknown)[0][:50]!r}")
    arguments |= kwargs
    for item in op._schema.arguments:
        if item.name in arguments:
            _check_one(op, item, arguments[item.name], by_name=item.name in kwargs, where=where)
        elif not item.has_default_value():
            raise GraphFormatError.at(where, f"{op} needs an argument {item.name!r}")
    if any("Device" in str(item.real_type) for item in op._schema.arguments) and not _has_place(op, arguments):
        raise GraphFormatError.at(where, f"{op} makes a tensor and says no device")


def _check_one(op: torch._ops.OpOverload, item: Any, value: Any, *, by_name: bool, where: str) -> None:
    kind = str(item.real_type)
    fixed = kind.startswith("List[") and item.N and _is_number(value)  # one number stands for a list of fixed length
    if not _KINDS[kind](value) and not (fixed and _KINDS[kind]([value])):
        raise GraphFormatError.at(where, f"the argument {item.name!r} of {op} is no {kind}")
    if isinstance(value, torch.device) and not by_name and value.type != "meta":
        raise GraphFormatError.at(where, f"{op} moves a tensor to {value.type}", what_to_do="Trace on the meta device.")


def _has_place(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Return whether the device of an op's result is determined: by a device argument, or by an input tensor."""
    if isinstance(arguments.get("device"), torch.device):
        return True
    return any(
        str(item.real_type) == "Tensor" and isinstance(arguments.get(item.name), Ref) for item in op._schema.arguments
    )


# --- how many tensors an op returns --------------------------------------------------------------------------------


def returns_list(op: torch._ops.OpOverload) -> bool:
    """Return whether ``op`` returns a list of tensors, of any length."""
    return str(op._schema.returns[0].real_type) == "List[Tensor]"


def count_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Return how many tensors ``op`` returns, without running it: there may be too many to create.

    Args:
        shape: shape of the first tensor among the arguments; empty if there is no tensor.

    Raises:
        ValueError: the number does not follow from the arguments.
    """
    if not returns_list(op):
        return len(op._schema.returns)
    arguments = {item.name: value for item, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
    name = op._schema.name.partition("::")[2].removesuffix("_copy").removeprefix("unsafe_")
    if op._schema.name == "shardplan::opaque":
        call = OpaqueArguments(**arguments)
        call.check()
        return len(call.dims)
    if name in ("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"):
        return len(arguments.get("tensors", ()))
    for sizes in (arguments.get("split_sizes"), arguments.get("split_size")):
        if isinstance(sizes, (list, tuple)):
            return len(sizes)
    if isinstance(arguments.get("indices"), (list, tuple)):
        return len(arguments["indices"]) + 1
    return _pieces(name, arguments, shape)


def _pieces(name: str, arguments: Mapping[str, Any], shape: Sequence[int]) -> int:
    axis = {"hsplit": 0 if len(shape) == 1 else 1, "vsplit": 0}.get(name, arguments.get("dim", 0))
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ValueError("there is no such dim")
    length = shape[axis]
    if name == "unbind":
        return length
    if name == "split" and _is_int(arguments.get("split_size")) and arguments["split_size"] > 0:
        return max(1, int(-(-length // arguments["split_size"])))
    if name == "chunk" and _is_int(arguments.get("chunks")) and arguments["chunks"] > 0:
        piece = -(-length // arguments["chunks"])
        return int(arguments["chunks"] if length == 0 else -(-length // piece))
    if (
        name in ("tensor_split", "hsplit", "vsplit")
        and _is_int(arguments.get("sections"))
        and arguments["sections"] > 0
    ):
        return int(arguments["sections"])
    raise ValueError("its arguments do not say into how many pieces")
