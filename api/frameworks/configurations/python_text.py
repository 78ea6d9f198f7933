"""Python text, parsed and never run: its calls by their names, and its constants."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.errors import JobError

_MOST_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a Python text says literally.

    Attributes:
        constants: name -> literal value, of names that are assigned once, and of options by their defaults.
        assigned: name -> expression, of names that are assigned once.
        defaults: name of an option of argparse -> its default.
    """

    constants: dict[str, object] = field(default_factory=dict)
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    defaults: dict[str, ast.expr] = field(default_factory=dict)
    _calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    _dicts: list[ast.Dict] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, title: str) -> Script:
        """Return what ``text`` says.

        Raises:
            JobError: it is no Python; ``title`` names what it is for.
        """
        if len(text) > _MOST_BYTES:
            raise JobError(f"The script for {title} has more than {_MOST_BYTES:,} characters.", what_to_do="Cut it.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(text.strip())
        except SyntaxError as error:
            where = f" at line {error.lineno}" if error.lineno else ""
            raise JobError(
                f"The script for {title} is not valid Python{where}: {error.msg}.", what_to_do="Correct the file."
            ) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise JobError(f"The script for {title} is not valid Python.", what_to_do="Correct the file.") from error
        script = cls()
        seen: set[str] = set()
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        aliases = {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = _name(node.func)
                script._calls.setdefault(aliases.get(name, name), []).append(node)
            elif isinstance(node, ast.Dict):
                script._dicts.append(node)
            for name, value in _assignments(node):
                if name in seen:
                    script.assigned.pop(name, None)
                elif value is not None:
                    script.assigned[name] = value
                seen.add(name)
        for call in script.calls("add_argument"):
            names = [text.removeprefix("--") for text in map(_text, call.args) if text and text.startswith("--")]
            default = script.keyword(call, "default")
            if names and default is not None:
                script.defaults[names[0].replace("-", "_")] = default
        values = {name: script.value(value) for name, value in (script.defaults | script.assigned).items()}
        script.constants.update({name: value for name, value in values.items() if value is not None})
        return script

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions and classes by the last part of their names."""
        return [call for name in names for call in self._calls.get(name, [])]

    def mappings(self) -> Iterator[list[tuple[str, ast.expr]]]:
        """Yield the dicts whose keys are texts, as (key, value); a part of an f-string that is computed is ``*``."""
        for node in self._dicts:
            pairs = [(_text(key), value) for key, value in zip(node.keys, node.values, strict=True)]
            yield [(key, value) for key, value in pairs if key is not None]

    def name_of(self, value: ast.expr) -> str:
        """Return the name of what a value calls; "" for other values."""
        if isinstance(value, ast.Name):
            value = self.assigned.get(value.id, value)
        return _name(value.func) if isinstance(value, ast.Call) else ""

    def argument(self, call: ast.Call, position: int, name: str) -> ast.expr | None:
        """Return an argument that is given by position or by name; None where it is not."""
        if len(call.args) > position and not any(isinstance(item, ast.Starred) for item in call.args):
            return call.args[position]
        return self.keyword(call, name)

    def keyword(self, call: ast.Call, name: str) -> ast.expr | None:
        """Return a keyword argument, also of a dict that is unpacked; None where it is not given."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
            value = keyword.value
            if keyword.arg is None and isinstance(value, ast.Name):
                value = self.assigned.get(value.id, value)
            if keyword.arg is None and isinstance(value, ast.Dict):
                for key, item in zip(value.keys, value.values, strict=True):
                    if _text(key) == name:
                        return item
        return None

    def value(self, node: ast.expr | None, depth: int = 8) -> object:
        """Return a literal value, of names too; None where it is computed."""
        if node is None or depth == 0:
            return None
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self.value(self.assigned[node.id], depth - 1)
        if isinstance(node, ast.Attribute):
            return self.value(self.defaults.get(node.attr), depth - 1)
        if isinstance(node, ast.Tuple | ast.List):
            items = [self.value(item, depth - 1) for item in node.elts]
            return None if None in items else tuple(items)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None

    def items(self, node: ast.expr | None) -> Sequence[ast.expr] | None:
        """Return the items of a tuple or list; None where it is none."""
        if isinstance(node, ast.Name):
            node = self.assigned.get(node.id)
        return node.elts if isinstance(node, ast.Tuple | ast.List) else None

    def constant(self, name: re.Pattern[str]) -> int | None:
        """Return the first whole number, from 1, that a name which matches is assigned or given as an argument."""
        named = [value for key, value in self.constants.items() if name.fullmatch(key)]
        for calls in self._calls.values():
            for call in calls:
                for keyword in call.keywords:
                    if keyword.arg is not None and name.fullmatch(keyword.arg):
                        named.append(self.value(keyword.value))
        return next((value for value in named if type(value) is int and 1 <= value <= 2**53), None)

    def subscripts(self, node: ast.expr | None) -> tuple[str, ...]:
        """Return the texts in the brackets of a value, as in ``mesh["dp", "tp"]``; () where there are none."""
        if isinstance(node, ast.Name):
            node = self.assigned.get(node.id)
        if not isinstance(node, ast.Subscript):
            return ()
        value = self.value(node.slice)
        return tuple(map(str, value)) if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def _assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, expression) of what a statement assigns; None for an expression that is not known."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
        yield from _pairs(node.target, None)


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
        for index, item in enumerate(target.elts):
            yield from _pairs(item, None if values is None else values[index])
