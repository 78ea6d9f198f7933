"""Reading and writing a plan's file: atomically, and as JSON that a person can read and edit."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.errors import PlanFormatError
from planner.plan.document import NOT_A_PLAN


def write_atomically(text: str, path: str | os.PathLike[str]) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the whole new one, never a part."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files private. A plan gets the permissions of any other new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_json(path: str | os.PathLike[str]) -> object:
    """Return the JSON value in the file at ``path``.

    Raises:
        PlanFormatError: there is no such file, or its content is no JSON text (truncated, binary).
    """
    file = os.fspath(path)
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        detail = f"Cannot read the plan file {file!r}: {error.strerror}."
        raise PlanFormatError(detail, file=file, what_to_do="Give the path of a plan file.") from error
    except UnicodeDecodeError as error:
        detail = f"{file!r} is not a plan: it is no text in UTF-8."
        raise PlanFormatError(detail, file=file, what_to_do=NOT_A_PLAN) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        detail = f"{file!r} is not a plan: it is no complete JSON text ({error.msg} at {where})."
        raise PlanFormatError(detail, file=file, where=where, what_to_do=NOT_A_PLAN) from error
    except ValueError as error:
        # Python does not parse integers with thousands of digits.
        detail = f"{file!r} is not a plan: {error}."
        raise PlanFormatError(detail, file=file, what_to_do=NOT_A_PLAN) from error
    except RecursionError as error:
        detail = f"{file!r} is not a plan: its JSON is nested too deeply."
        raise PlanFormatError(detail, file=file, what_to_do=NOT_A_PLAN) from error


def dumps(data: Mapping[str, object]) -> str:
    """Return the text of a plan's file: indented, with each layout on one line."""
    return _dumps(data, indent="") + "\n"


def _dumps(value: object, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if not isinstance(value, (Mapping, list)) or (len(indent) > 0 and len(indent) + len(flat) <= 100):
        return flat
    deeper = indent + "  "
    if isinstance(value, Mapping):
        lines = [
            f"{deeper}{json.dumps(key, ensure_ascii=False)}: {_dumps(item, deeper)}" for key, item in value.items()
        ]
        brackets = "{}"
    else:
        lines = [f"{deeper}{_dumps(item, deeper)}" for item in value]
        brackets = "[]"
    return brackets[0] + "\n" + ",\n".join(lines) + f"\n{indent}" + brackets[1]
