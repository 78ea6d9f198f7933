"""Names and shapes of a source of weights against a module's: which tensor goes where, or one error with all faults."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from executor.weights.lazy_tensors import LazyTensor, SelectedTensor, concatenated
from executor.weights.targets import Target
from planner.errors import WeightsError
from planner.model_rewrites.fused_projection_modules import interleave_rows

_MOST_NAMES = 8
"""Names that an error lists of each kind; it says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A tensor of a module with the tensor of the source that has its values.

    Attributes:
        target: the parameter or buffer.
        values: the tensor in the source.
        others: the same tensor under other names of a tied parameter, where the source has several.
    """

    target: Target
    values: LazyTensor
    others: tuple[LazyTensor, ...] = ()


def match_names(
    targets: Sequence[Target],
    tensors: Mapping[str, LazyTensor],
    *,
    strict: bool,
    is_ignored: Callable[[str], bool],
) -> list[Match]:
    """Return the tensor of the source for each of ``targets``.

    Args:
        targets: the module's tensors.
        tensors: name in the module -> tensor of the source.
        strict: whether all names have to match; otherwise unexpected names are ignored, and missing ones too where the
            module's tensor has values.
        is_ignored: whether a name of the source that the module does not have is ignored.

    Raises:
        WeightsError: names or shapes do not match; names all of them.
    """
    matches: list[Match] = []
    missing: list[str] = []
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for target in targets:
        names, values = values_of(target, tensors)
        if not values:
            if strict or target.tensor.is_meta:
                missing += [name for name in names if name not in tensors]
        elif values[0].shape != target.tensor.shape:
            mismatched[names[0]] = tuple(values[0].shape), tuple(target.tensor.shape)
        else:
            matches.append(Match(target=target, values=values[0], others=tuple(values[1:])))
    known = {name for target in targets for name in (*target.names, *target.unfused_names)}
    unexpected = [name for name in tensors if name not in known and not is_ignored(name)] if strict else []
    if missing or unexpected or mismatched:
        raise _error(missing, unexpected, mismatched, tensors, known)
    return matches


def values_of(target: Target, tensors: Mapping[str, LazyTensor]) -> tuple[list[str], list[LazyTensor]]:
    """Return the names under which ``target`` is looked for, and its values under each name that the source has."""
    own = [tensors[name] for name in target.names if name in tensors]
    if own:
        return [name for name in target.names if name in tensors], own
    if target.fused is None:
        return [target.names[0]], []
    names = list(target.fused.rows)
    if not all(name in tensors for name in names):
        return names, []
    parts = [tensors[name] for name in names]
    if any(part.shape[0] != rows for part, rows in zip(parts, target.fused.rows.values(), strict=True)):
        # Shown as a shape that differs.
        return names, [concatenated(parts, 0)] if len({part.shape[1:] for part in parts}) == 1 else parts
    rows = {name: torch.arange(part.shape[0]) for name, part in zip(names, parts, strict=True)}
    first = dict(zip(names, torch.tensor([0, *[part.shape[0] for part in parts[:-1]]]).cumsum(0), strict=True))
    order = interleave_rows({name: rows[name] + first[name] for name in names}, target.fused.groups)
    return names, [SelectedTensor(concatenated(parts, 0), 0, order)]


def _error(
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    tensors: Iterable[str],
    known: Iterable[str],
) -> WeightsError:
    sentences = []
    if missing:
        sentences.append(f"The source lacks {_listed(missing, sorted(set(tensors) - set(known)))}.")
    if unexpected:
        sentences.append(f"The module lacks {_listed(unexpected, sorted(set(known) - set(tensors)))}.")
    if mismatched:
        shown = [f"{name!r} is {there} there and {here} here" for name, (there, here) in mismatched.items()]
        more = f" and {len(shown) - _MOST_NAMES} more" if len(shown) > _MOST_NAMES else ""
        sentences.append(f"Shapes differ: {'; '.join(shown[:_MOST_NAMES])}{more}.")
    return WeightsError(
        " ".join(sentences) + " Nothing has been loaded.",
        what_to_do="Load the checkpoint of this model and config, or pass a state dict with these names; strict=False "
        "ignores names of the source that the module lacks, and names of the module that have values already.",
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


def _listed(names: Sequence[str], near: Sequence[str]) -> str:
    """Return the first of ``names``, each with the names in ``near`` that are spelled like it."""
    shown = []
    for name in names[:_MOST_NAMES]:
        close = difflib.get_close_matches(name, near, n=1, cutoff=0.7)
        shown.append(f"{name!r} (near: {close[0]!r})" if close else f"{name!r}")
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{len(names)} name{'s' if len(names) > 1 else ''}: {', '.join(shown)}{more}"
