"""Tables of sizes: integer inputs with one row for each image or video, such as ``image_grid_thw``.

The pieces (patches) of all images are the rows of another input, one image after the other: a row of the table says how
many there are along each dim of the image.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from planner.errors import JobError
from planner.model_rewrites.image_sizes.values import MOST_KEPT, on_meta, values_of, with_values
from planner.model_rewrites.tree_paths import tensors_in

_DIMS = (2, 3)
"""Columns of a table: height and width, or frames, height and width."""
_MOST_ROWS = 1 << 20


class SizeTable(NamedTuple):
    """A table of sizes.

    Attributes:
        tensor: the table.
        values: its values, on the CPU.
        packed: the tensor whose rows are the pieces of all images.
    """

    tensor: torch.Tensor
    values: torch.Tensor
    packed: torch.Tensor


def may_be_table(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the form of a table of sizes, whatever its values are."""
    is_of_integers = tensor.dtype in (torch.int32, torch.int64)
    return is_of_integers and tensor.dim() == 2 and tensor.shape[1] in _DIMS and 0 < len(tensor) <= _MOST_ROWS


def size_tables(tensors: Iterable[torch.Tensor]) -> list[SizeTable]:
    """Return the tables of sizes among the tensors of one call, as far as their values are known."""
    given = list(tensors)
    numbers = [tensor for tensor in given if tensor.is_floating_point() and tensor.dim() > 1]
    found = []
    for tensor in given:
        values = values_of(tensor) if numbers and may_be_table(tensor) else None
        if values is None:
            continue
        pieces = int(values.prod(-1).sum())
        packed = next((other for other in numbers if len(other) == pieces), None)
        if packed is not None and pieces > len(tensor):
            found.append(SizeTable(tensor, values, packed))
    return found


def check_known(arguments: Mapping[str, Any]) -> None:
    """Check that tables which transformers' models name as such have values.

    Raises:
        JobError: one of them is on meta without values.
    """
    for name, value in arguments.items():
        if name.endswith("grid_thw") and isinstance(value, torch.Tensor) and values_of(value) is None:
            raise JobError(
                f"{name} is on the meta device, and its values say the sizes of images, which decide shapes.",
                what_to_do=f"Give {name}, input_ids and mm_token_type_ids with values: in a factory, which runs on "
                'the meta device, with device="cpu".',
                field="example_inputs",
            )


def inputs_on_meta(tree: Any) -> Any:
    """Return ``tree`` with its tensors on meta; with a table of sizes among them, their values are known there."""
    move = on_meta if size_tables(tensors_in(tree)) else functools.partial(torch.empty_like, device="meta")
    return pytree.tree_map_only(torch.Tensor, move, tree)


def samples_of(tensors: Sequence[torch.Tensor], tables: Sequence[SizeTable]) -> int:
    """Return the number of samples of a call with ``tables``: the first dim of the first tensor that has samples.

    Without such a tensor, each image is a sample.
    """
    packed = {id(tensor) for table in tables for tensor in (table.tensor, table.packed)}
    return next((len(tensor) for tensor in tensors if tensor.dim() and id(tensor) not in packed), len(tables[0].tensor))


def check_alike(tables: Iterable[SizeTable], samples: int, names: dict[int, str]) -> None:
    """Check that all samples have images of the same sizes.

    Args:
        tables: the tables of a call.
        samples: samples in the call.
        names: ``id`` of a table -> name of the argument.

    Raises:
        JobError: one of them has others.
    """
    for tensor, values, _ in tables:
        name = names.get(id(tensor), "a table of sizes")
        advice = "Resize or pad the images of all samples to the same sizes: a plan has one shape for each tensor."
        if len(values) % samples:
            detail = f"{name} has {len(values)} images for {samples} samples."
            raise JobError(detail, what_to_do=advice, field="example_inputs")
        each = values.view(samples, -1, values.shape[1])
        differs = next((index for index in range(samples) if not torch.equal(each[index], each[0])), None)
        if differs is not None:
            detail = f"{name} has other sizes for sample {differs} than for sample 0: {_text(each[differs])}, not "
            raise JobError(f"{detail}{_text(each[0])}.", what_to_do=advice, field="example_inputs")


def _text(sizes: torch.Tensor) -> str:
    shown = ["x".join(map(str, row)) for row in sizes[:3].tolist()]
    return ", ".join(shown) + (", ..." if len(sizes) > len(shown) else "")


def sample_dim(
    tensor: torch.Tensor, tables: Sequence[SizeTable], tensors: Sequence[torch.Tensor], samples: int
) -> int | None:
    """Return the dim of ``tensor`` along which samples follow each other, in a call with ``tables``; None: in no dim.

    That of position ids [kinds, samples, tokens] is their second one.
    """
    shape = tuple(tensor.shape)
    if any(tensor is each for table in tables for each in (table.tensor, table.packed)):
        return 0
    are_ids = len(shape) == 3 and not tensor.is_floating_point() and shape[1] == samples
    if are_ids and any(tuple(other.shape) == shape[1:] for other in tensors):
        return 1
    return 0 if shape[:1] == (samples,) else None


def with_samples(tensor: torch.Tensor, dim: int, current: int, samples: int) -> torch.Tensor:
    """Return a meta tensor like ``tensor`` at another number of samples, all with the values of the first one."""
    rows = tensor.shape[dim] // current
    shape = (*tensor.shape[:dim], rows * samples, *tensor.shape[dim + 1 :])
    resized = torch.empty(shape, dtype=tensor.dtype, device="meta")
    values = values_of(tensor)
    if values is None or tensor.is_floating_point() or resized.numel() > MOST_KEPT:
        return resized
    times = [samples if each == dim else 1 for each in range(tensor.dim())]
    return with_values(resized, values.narrow(dim, 0, rows).repeat(times))


def whole_table(table: SizeTable, ranks: int) -> torch.Tensor:
    """Return the table of all images of a batch, of which each of ``ranks`` has a part with images of the same sizes.

    It is on the table's device; on the CPU if that is meta.
    """
    whole = table.values.repeat(ranks, 1)
    return whole if table.tensor.is_meta else whole.to(table.tensor.device)
