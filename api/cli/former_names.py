"""Former names of commands and options: the command line still accepts them, but its help does not list them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from planner.plan.former_names import FORMER_NAMES

_COMMANDS = {"runner-ups": "alternatives", "sizes": "sweep"}
_OPTIONS = {f"--{name.replace('_', '-')}": f"--{now.replace('_', '-')}" for name, now in FORMER_NAMES.items()}


class CommandsWithFormerNames(TyperGroup):
    """A command group that also accepts the former names of its commands and of their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer has its own click from some version on
        """Return (name, command, arguments) for ``args``, with former names replaced by current ones."""
        name, *rest = args
        end = rest.index("--") if "--" in rest else len(rest)
        renamed = [_with_current_name(argument) for argument in rest[:end]]
        return super().resolve_command(ctx, [_COMMANDS.get(name, name), *renamed, *rest[end:]])


def _with_current_name(argument: str) -> str:
    option, equals, value = argument.partition("=")
    return _OPTIONS.get(option, option) + equals + value
