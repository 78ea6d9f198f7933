"""Frozen dataclasses read from plain mappings (TOML, YAML, JSON), with errors that say what, where and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any


class ClusterError(ValueError):
    """A cluster, device or link description that cannot be read: the message says what, where, and what is accepted."""


def close_matches(word: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """Return up to six of ``candidates`` that resemble ``word``: first those that contain it, then similar names."""
    names = list(candidates)
    containing = [name for name in names if word and word in name]
    alike = [name for name in difflib.get_close_matches(word, names, n=4, cutoff=0.5) if name not in containing]
    return tuple((containing + alike)[:6])


def check_keys(data: Mapping[str, object], accepted: Iterable[str], where: str) -> None:
    """Raise ClusterError for the first key of ``data`` that is not in ``accepted``."""
    names = tuple(accepted)
    for key in data:
        if key not in names:
            near = close_matches(str(key), names)
            hint = f"did you mean {' or '.join(near)}?" if near else f"accepted: {', '.join(names)}"
            raise ClusterError(f"{where}: unknown key {key!r}; {hint}")


def as_mapping(value: object, where: str) -> Mapping[str, object]:
    """Return ``value`` if it is a mapping with text keys, else raise ClusterError."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ClusterError(f"{where} must be a mapping of names to values, not {value!r}")
    return value


def as_number(value: object, where: str) -> float:
    """Return ``value`` as a finite float. Numeric text is accepted: YAML 1.1 reads ``5e10`` as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ClusterError(f"{where} must be a number, not {value!r}")
    try:
        number = float(value)
    except ValueError:
        raise ClusterError(f"{where} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise ClusterError(f"{where} must be a finite number, not {value!r}")
    return number


def as_integer(value: object, where: str) -> int:
    """Return ``value`` as an int; a whole float or its text is accepted."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = as_number(value, where)
    if not number.is_integer():
        raise ClusterError(f"{where} must be a whole number, not {value!r}")
    return int(number)


def _as_field(value: object, field: Field[Any], where: str) -> object:
    if field.type == "float":
        return as_number(value, where)
    if field.type == "int":
        return as_integer(value, where)
    if field.type == "bool" and not isinstance(value, bool):
        raise ClusterError(f"{where} must be true or false, not {value!r}")
    if field.type == "str" and not isinstance(value, str):
        raise ClusterError(f"{where} must be text, not {value!r}")
    return value


def read_fields(cls: type[Any], data: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the values of ``data`` as keyword arguments of dataclass ``cls``, converted to the fields' types.

    Fields of other types than float, int, bool and str are not converted.

    Raises:
        ClusterError: a key is unknown, a field without default is missing, or a value has the wrong type.
    """
    fields_by_name = {field.name: field for field in fields(cls)}
    check_keys(data, fields_by_name, where)
    missing = [
        name
        for name, field in fields_by_name.items()
        if name not in data and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}; give a value for each")
    return {name: _as_field(value, fields_by_name[name], f"{where}.{name}") for name, value in data.items()}


def require_positive(owner: object, names: Iterable[str], where: str) -> None:
    """Raise ClusterError for the first attribute of ``owner`` among ``names`` that is not above zero."""
    for name in names:
        if not getattr(owner, name) > 0:
            raise ClusterError(f"{where}.{name} is {getattr(owner, name)}; it must be above 0")
