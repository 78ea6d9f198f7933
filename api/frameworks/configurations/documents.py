"""Configurations that are YAML or JSON: their values by type, their unknown keys, and what is wrong, all at once."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

import yaml

from api.frameworks.launch import FIELDS, Launch, Reading
from planner.errors import JobError
from planner.plan.job_spec import JobPhase

T = TypeVar("T")

_NUMBER = re.compile(r"\d{1,18}")
_MOST = 2**53


@dataclass(slots=True)
class Notes:
    """What is found while a configuration is read, as in `api.frameworks.launch.Reading`."""

    faults: list[str] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    ulysses: str = ""

    def reading(self, launch: Launch, **others: Any) -> Reading:
        """Return the `Reading` of ``launch`` with these notes, each once; ``others``: its other fields."""
        return Reading(
            launch=launch,
            faults=tuple(dict.fromkeys(self.faults)),
            unpriced=tuple(dict.fromkeys(self.unpriced)),
            assumed=tuple(dict.fromkeys(self.assumed)),
            ulysses=self.ulysses,
            **others,
        )


@dataclass(slots=True)
class Section:
    """One mapping of a configuration. Its methods return values by type, and write what is wrong to ``notes``.

    Attributes:
        path: keys that lead to it, joined by dots; "" for the whole document.
        automatic: whether a value may be "auto", as in DeepSpeed's JSON.
    """

    values: Mapping[str, Any]
    notes: Notes
    path: str = ""
    automatic: bool = False

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def name(self, key: str) -> str:
        """Return the full name of a key."""
        return f"{self.path}.{key}" if self.path else key

    def given(self, key: str) -> bool:
        """Return whether a key has a value that is not "auto"."""
        return key in self and not (self.automatic and self.values[key] == "auto")

    def number(self, key: str, default: int, *, least: int = 1) -> int:
        """Return a whole number, at most 2**53."""
        value = self._value(key, default)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST:
            return value
        self.notes.faults.append(f"{self.name(key)} {shown(value)} is not a whole number of {least} or more")
        return default

    def switch(self, key: str, default: bool) -> bool:
        """Return a boolean; "true" and "false" as texts are booleans, as command lines have them."""
        value = self._value(key, default)
        texts = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in texts:
            return texts[value.lower()]
        if isinstance(value, bool):
            return value
        self.notes.faults.append(f"{self.name(key)} {shown(value)} is not true or false")
        return default

    def choice(self, key: str, options: Mapping[str, T], default: str) -> T:
        """Return the meaning of a word, whose case does not matter."""
        value = self._value(key, default)
        by_case = {name.lower(): name for name in options}
        name = by_case.get(str(value).lower())
        if name is not None and not isinstance(value, bool):
            return options[name]
        self.notes.faults.append(f"{self.name(key)} {shown(value)} is not one of {', '.join(options)}")
        return options[default]

    def section(self, key: str) -> Section:
        """Return the mapping at a key; an empty one where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.notes.faults.append(f"{self.name(key)} {shown(value)} is not a mapping of keys to values")
        values = value if isinstance(value, Mapping) else {}
        return Section(values, self.notes, self.name(key), self.automatic)

    def leave(self, *keys: str, because: str, unless: Sequence[object] = (False, 0, 1, "none", "auto")) -> None:
        """Note the keys that have a value other than those in ``unless`` as not priced."""
        for key in keys:
            if key in self and not any(self.values[key] is value or self.values[key] == value for value in unless):
                self.notes.unpriced.append(f"{self.name(key)}: {because}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            return default
        if self.automatic and value == "auto":
            self.notes.assumed.append(f"{self.name(key)} auto: {shown(default)} is taken")
            return default
        return value


def shown(value: object) -> str:
    """Return a value as YAML and JSON write it."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def divisors(number: int) -> str:
    """Return the divisors of a number as a list in words, such as "1, 2 or 4"."""
    found = [str(value) for value in range(1, number + 1) if number % value == 0]
    return " or ".join(part for part in (", ".join(found[:-1]), found[-1]) if part)


def read_yaml(text: str, title: str) -> Mapping[str, Any]:
    """Return the mapping that a YAML text holds.

    Raises:
        JobError: the text is not YAML, or no mapping.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise _unreadable(title, f"YAML{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(title, f"YAML: {str(error).splitlines()[0]}") from error
    return _mapping(document, title)


def read_json(text: str, title: str) -> Mapping[str, Any]:
    """Return the mapping that a JSON text holds.

    Raises:
        JobError: the text is not JSON, has a key twice, or is no mapping.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise _unreadable(title, f"JSON at line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise _unreadable(title, "JSON: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise _unreadable(title, f"JSON: {error}") from error
    except _DuplicateKeyError as error:
        raise _unreadable(title, f"JSON: the key {error} is there twice") from error
    return _mapping(document, title)


class _DuplicateKeyError(Exception):
    """A key that a JSON object has twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateKeyError(key)
        values[key] = value
    return values


def _mapping(document: object, title: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise _unreadable(title, "mapping of keys to values")
    return {str(key): value for key, value in document.items()}


def _unreadable(title: str, what: str) -> JobError:
    return JobError(f"The {title} configuration is not valid {what}.", what_to_do="Correct the file.")


def check_sayable(
    launch: Launch, title: str, says: Iterable[str], reasons: Iterable[str] = (), *, phase: JobPhase = "training"
) -> None:
    """Raise if a framework cannot say a launch.

    Args:
        launch: the configuration.
        title: the framework's name.
        says: the fields that it can say; others have to be as in ``Launch()``.
        reasons: why it cannot say this launch, as clauses.
        phase: the phase of all its launches.

    Raises:
        JobError: the launch cannot be said.
    """
    usual = Launch(phase=phase)
    others = [name for name in FIELDS if name not in says and getattr(launch, name) != getattr(usual, name)]
    found = [*(f"{name} {shown(getattr(launch, name))} cannot be said" for name in others), *reasons]
    if found:
        raise JobError(
            f"{title} does not run this configuration: {'; '.join(found)}.", what_to_do="Export for another framework."
        )


def known_keys(name: str) -> frozenset[str]:
    """Return the keys that a framework knows, as full names; "section.*" for a section whose keys are free."""
    text = (
        resources.files("api.frameworks.configurations")
        .joinpath("known_keys", f"{name}.txt")
        .read_text(encoding="utf-8")
    )
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def unknown_keys(values: Mapping[str, Any], known: frozenset[str], title: str) -> Iterator[str]:
    """Yield a fault for each key that a framework does not know, with the closest one that it knows."""
    sections = {name.rpartition(".")[0] for name in known}
    for key in _names(values, known, sections):
        yield f"{key} is not a key of {title}{closest(key, known)}"


def closest(key: str, known: Collection[str]) -> str:
    """Return the known key that is closest to ``key``, in brackets; "" where none is close."""
    last = key.rpartition(".")[2]
    if last != key and (last in known or f"{last}.*" in known):
        return f" (the closest is {last}, outside of {key.rpartition('.')[0]})"
    names = [name for name in known if not name.endswith(".*")]
    matches = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    if not matches:
        by_end = {name.rpartition(".")[2]: name for name in sorted(names)}
        ends = difflib.get_close_matches(last, by_end, n=1, cutoff=0.8)
        matches = [by_end[end] for end in ends]
    return f" (the closest is {matches[0]})" if matches else ""


def _names(values: Mapping[str, Any], known: frozenset[str], sections: set[str], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if f"{name}.*" in known or str(key).startswith("_"):
            continue
        if isinstance(value, Mapping) and name in sections:
            yield from _names(value, known, sections, name)
        elif name not in known:
            yield name
