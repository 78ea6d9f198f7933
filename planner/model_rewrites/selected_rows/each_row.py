"""Functions that treat each row by itself."""

from __future__ import annotations

from typing import Any, cast

import torch

from planner.model_rewrites.selected_rows.selection import Selection, selection_of, with_rows
from planner.model_rewrites.tree_paths import tensors_in

_OPERATORS = {
    **dict.fromkeys(("truediv", "rtruediv"), "div"),
    "floordiv": "floor_divide",
    "mod": "remainder",
    "invert": "bitwise_not",
}
"""Names of operators -> names of elementwise ops."""

_EACH_ROW = {
    *("boundary", "dropout", "alpha_dropout", "feature_dropout", "embedding", "one_hot", "group_norm"),
    *("float", "double", "half", "bfloat16", "long", "int", "bool", "to", "type", "type_as"),
    *("contiguous", "clone", "detach", "zeros_like", "ones_like", "full_like"),
}
"""Functions that treat each row by itself, and are not elementwise ops."""

_ALONG_A_DIM = {
    *("softmax", "log_softmax", "logsumexp", "normalize", "cosine_similarity", "glu", "norm", "var", "std", "cumsum"),
    *("amax", "amin", "max", "min", "argmax", "argmin", "topk", "sort", "any", "all", "prod"),
    *("gather", "chunk", "split"),
}
"""Functions that work along a dim: it must be known, and not be that of the rows."""

_DIM_IS_THIRD = frozenset({"topk", "chunk", "split", "normalize", "norm", "cosine_similarity"})
_DEFAULT_DIMS = {"normalize": 1, "cosine_similarity": 1, "glu": -1, "topk": -1, "sort": -1}
RESHAPES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze"})


def treats_each_row(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function treats each row by itself, the rows being the first dim of its arguments."""
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or selection_of(first) is None:
        return _is_pointwise(name) and _broadcasts(args, kwargs)
    if name in RESHAPES:
        return True  # `with_rows` looks at the result
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_basic = all(part is Ellipsis or part is None or isinstance(part, (int, slice)) for part in index)
        return is_basic and (index[0] is Ellipsis or (isinstance(index[0], slice) and index[0] == slice(None)))
    if name in ("matmul", "mm", "__matmul__", "linear"):
        return first.dim() >= 2 and args[1].dim() == 2 and not any(selection_of(other) for other in args[1:])
    if name in ("layer_norm", "rms_norm"):
        return len(args[1]) < first.dim()
    if name in _ALONG_A_DIM:
        return _dim(name, args, kwargs, first) not in (None, 0)
    return name in _EACH_ROW or (_is_pointwise(name) and _broadcasts(args, kwargs))


def with_packed_rows(name: str, args: tuple[Any, ...], selection: Selection) -> tuple[Any, ...]:
    """Return the arguments of an elementwise op on selected rows, with other tensors that have one row for each.

    Such rows, as the features of images that are added to their tokens, get the places of those that are selected.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    most = max((tensor.dim() for tensor in tensors), default=0)
    if not _is_pointwise(name):
        return args
    return tuple(
        _in_their_places(arg, selection)
        if isinstance(arg, torch.Tensor) and selection_of(arg) is None and arg.dim() == most and arg.shape[0] != 1
        else arg
        for arg in args
    )


def _in_their_places(packed: torch.Tensor, selection: Selection) -> torch.Tensor:
    mask = selection.mask
    condition = mask.reshape(tuple(mask.shape) + (1,) * (packed.dim() - 1))
    zeros = torch.zeros_like(condition, dtype=packed.dtype).expand(tuple(mask.shape) + tuple(packed.shape[1:]))
    rows = zeros.masked_scatter(condition, packed).flatten(0, mask.dim() - 1)
    return cast(torch.Tensor, with_rows(name="masked_scatter", result=rows, selection=selection))


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor) -> int | None:
    """Return the dim along which a function works; None if the call does not say it."""
    position = 2 if name in _DIM_IS_THIRD else 1
    given = kwargs.get("dim", args[position] if len(args) > position else _DEFAULT_DIMS.get(name))
    return given % first.dim() if isinstance(given, int) else None


def _is_pointwise(name: str) -> bool:
    """Return whether a function's op is elementwise, as torch tags it."""
    plain = name.strip("_")
    for each in (plain, _OPERATORS.get(plain, plain), plain.removeprefix("r")):
        packet = getattr(torch.ops.aten, each, None)
        if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
            return True
    return False


def _broadcasts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all rows have the same dims, and other tensors the same elements for each row."""
    tensors = tensors_in((args, kwargs))
    dims = {tensor.dim() for tensor in tensors if selection_of(tensor) is not None}
    others = [tensor for tensor in tensors if selection_of(tensor) is None]
    most = max(dims)
    return len(dims) == 1 and all(x.dim() < most or (x.dim() == most and x.shape[0] == 1) for x in others)
