"""FQNs of parameters and modules: ties, and patterns that stand for the same part of all blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import nn

from planner.plan.patterns import match_keys


def tied_parameters(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return (name, other name) of each parameter that has two names."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((name, first[id(parameter)]))
        first.setdefault(id(parameter), name)
    return tuple(pairs)


def collapsed(values: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return FQN pattern -> value, with ``*`` for the number of a block wherever all blocks have the same value."""
    known = list(names)
    patterns: dict[str, str] = {}
    for fqn, value in values.items():
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", fqn)
        matched = match_keys([pattern], known)[pattern]
        is_shared = len(matched) > 1 and all(values.get(name) == value for name in matched)
        patterns[pattern if is_shared else fqn] = value
    return patterns


def names_of(fqns: Iterable[str], known: Iterable[str]) -> str:
    """Return FQNs of ``known`` ones as text, in patterns."""
    return ", ".join(collapsed(dict.fromkeys(sorted(fqns), ""), known))
