"""The keys of a ``parallelize_module`` dict on a model: which match no module, and which modules none splits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_SPLITS = ("ColwiseParallel", "RowwiseParallel")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST, _MOST_NEAR = 3, 10


def unmatched_keys(module: nn.Module, styles: Mapping[str, str], model: str) -> Iterator[str]:
    """Yield a fault for each key that matches no module of ``module``: torch warns, and the module stays whole.

    Keys count from the model or from any module in it, as where a loop parallelizes block by block.

    Args:
        module: the model.
        styles: key -> style.
        model: the model's name.
    """
    names = [name for name, _ in module.named_modules()]
    leaves = [name for name, part in module.named_modules() if not list(part.children())]
    folded = list(dict.fromkeys(_NUMBER.sub("*", name) for name in leaves))
    for key in styles:
        if key and not any(matches(name, key) for name in names):
            yield f"{key!r} matches no module of {model}{_nearest(key, folded)}"


def _nearest(key: str, names: list[str]) -> str:
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    near = near or [name for name in names if name.rpartition(".")[2] == last][:1]
    if near:
        return f" ({near[0]} would do)"
    inner = dict.fromkeys(name.rpartition("*.")[2] for name in names if "*" in name)
    return f" (its blocks have {', '.join(list(inner)[:_MOST_NEAR])})" if inner else ""


def whole_modules(module: nn.Module, styles: Mapping[str, str]) -> Iterator[str]:
    """Yield a note of the linear layers and embeddings that no key splits, and that are priced as split."""
    from torch import nn

    split = [key for key, style in styles.items() if style in _SPLITS]
    parts = [name for name, part in module.named_modules() if isinstance(part, nn.Linear | nn.Embedding)]
    whole = dict.fromkeys(_NUMBER.sub("*", name) for name in parts if not any(matches(name, key) for key in split))
    if whole and split:
        more = f" and {len(whole) - _MOST} more" if len(whole) > _MOST else ""
        yield f"{', '.join(list(whole)[:_MOST])}{more}: no key splits them, and they are priced as split"


def matches(name: str, key: str) -> bool:
    """Return whether ``key`` matches the end of a module's FQN, component by component."""
    parts, patterns = name.split("."), key.split(".")
    tail = parts[-len(patterns) :]
    return len(parts) >= len(patterns) and all(map(fnmatchcase, tail, patterns))
