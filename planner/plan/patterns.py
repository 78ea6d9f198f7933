"""Keys of a plan: FQN patterns, matched component by component as in ``parallelize_module``.

``layers.*.mlp`` matches the ``mlp`` of every layer, ``layers.{0-7}.mlp`` the ``mlp`` of the first eight. ``*`` stands
for any characters of one component, but not for a dot. ``{0-7}`` stands for a number from 0 to 7. Every other character
stands for itself. ``""`` is the root. Unlike in torch, a key that matches nothing is an error, and so are two keys that
give one FQN different values.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from planner.errors import KeyConflictError, PlanKeyError, UnmatchedKeyError

Value = TypeVar("Value")


def check_pattern(pattern: str, *, field: str) -> None:
    """Raise ``PlanKeyError`` where ``pattern`` has an empty component, which no FQN has."""
    if pattern and not all(pattern.split(".")):
        raise PlanKeyError(
            f"{field} has the key {pattern!r}, which has an empty component.",
            field=field,
            key=pattern,
            what_to_do="Write names and * with single dots between them; the root is an empty key.",
        )


_SPECIAL = re.compile(r"(\*|\{\d{1,6}-\d{1,6}\})")
_WIDEST = 10_000
"""The most numbers that a range may stand for. No list of blocks is longer."""


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(map(_part, _SPECIAL.split(pattern))))


def _part(text: str) -> str:
    if text == "*":
        return "[^.]*"
    if not _SPECIAL.fullmatch(text):
        return re.escape(text)
    first, last = map(int, text[1:-1].split("-"))
    return f"(?:{'|'.join(map(str, range(first, min(last + 1, first + _WIDEST)))) or '(?!)'})"


def match_keys(patterns: Iterable[str], fqns: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return pattern -> the FQNs that it matches, in the order of ``fqns``; an empty tuple where it matches none."""
    unique_fqns = list(dict.fromkeys(fqns))
    names = set(unique_fqns)
    by_depth: dict[int, list[str]] = defaultdict(list)
    for name in unique_fqns:
        by_depth[name.count(".")].append(name)
    matches: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        if _SPECIAL.search(pattern):
            fullmatch = _compiled(pattern).fullmatch
            # The root's FQN is empty: it has no component that a * could stand for.
            matches[pattern] = tuple(name for name in by_depth[pattern.count(".")] if name and fullmatch(name))
        else:
            matches[pattern] = (pattern,) if pattern in names else ()
    return matches


def resolve_keys(entries: Mapping[str, Value], fqns: Iterable[str], *, field: str, what: str) -> dict[str, Value]:
    """Return FQN -> value for each FQN that a pattern in ``entries`` matches.

    Args:
        entries: pattern -> value.
        fqns: all FQNs of the module.
        field: the plan's field, for messages.
        what: what an FQN names, for messages: "parameter", "module".

    Raises:
        UnmatchedKeyError: a pattern matches nothing.
        KeyConflictError: two patterns match the same FQN and their values differ.
    """
    all_fqns = list(fqns)
    values: dict[str, Value] = {}
    named_by: dict[str, str] = {}
    for pattern, names in match_keys(entries, all_fqns).items():
        if not names:
            raise unmatched(pattern, all_fqns, field=field, what=what)
        for name in names:
            if name in values and values[name] != entries[pattern]:
                raise _disagreement(field, pattern, named_by[name], name)
            values.setdefault(name, entries[pattern])
            named_by.setdefault(name, pattern)
    return values


def unmatched(key: str, fqns: Iterable[str], *, field: str, what: str) -> UnmatchedKeyError:
    """Return the error for a key that matches nothing; it suggests the FQNs closest to the key."""
    close = difflib.get_close_matches(key, list(fqns), n=3, cutoff=0.5)
    hint = f" Close to it: {', '.join(repr(name) for name in close)}." if close else ""
    return UnmatchedKeyError(
        f"{field} has the key {key!r}, but the module has no attribute of that name: it matches no {what}.",
        field=field,
        key=key,
        what_to_do=f"Correct or remove the key.{hint}",
    )


def _disagreement(field: str, key: str, other: str, name: str) -> KeyConflictError:
    return KeyConflictError(
        f"{field} has two keys for {name!r} that disagree: {other!r} and {key!r}.",
        field=field,
        key=key,
        other=other,
        what_to_do="Keep one of them, or give both the same value.",
    )
