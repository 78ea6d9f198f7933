"""TOML text of fitted constants, which ``tomllib`` reads, and the rounding of constants to four digits."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping

_WIDTH = 112
_SHORT = 24  # items shorter than this share lines
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def four_digits(value: float) -> float:
    """Return ``value`` rounded to four significant digits, as the files hold it."""
    return float(f"{value:.4g}")


def toml_text(tables: Mapping[str, object], header: str = "") -> str:
    """Return nested mappings of text, numbers and lists of them as TOML, under ``header`` as a comment."""
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    _append(lines, tables, ())
    return "\n".join(lines).strip() + "\n"


def _append(lines: list[str], table: Mapping[str, object], path: tuple[str, ...]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner}
    if path and plain:
        lines += ["", f"[{'.'.join(path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in inner.items():
        _append(lines, value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: object) -> str:
    if isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = [_value(item) for item in value]
        text = ", ".join(items)
        if len(text) < _WIDTH:
            return f"[{text}]"
        lines = textwrap.wrap(text, _WIDTH) if max(map(len, items)) < _SHORT else items
        return "[\n" + "".join(f"    {line.rstrip(',')},\n" for line in lines) + "]"
    raise TypeError(f"{value!r} is no TOML value; give text, numbers, lists or mappings of them")
