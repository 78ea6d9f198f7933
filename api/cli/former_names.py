"""Former names of commands and options: the command line still accepts them, but its help does not list them.

Each technique had an option of its own: ``--fused-ops`` is read as ``--techniques=fused-ops``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperGroup

from planner.plan.former_names import FORMER_NAMES
from planner.plan.techniques import FIELDS

_COMMANDS = {"runner-ups": "alternatives", "sizes": "sweep"}
_LIST = "--techniques"
_KERNEL = "--attention-kernel"
_TECHNIQUES = {f"--{name}": name for name in FIELDS} | {
    f"--{name.replace('_', '-')}": now.replace("_", "-") for name, now in FORMER_NAMES.items()
}
"""Option of a single technique -> name of the technique."""


class CommandsWithFormerNames(TyperGroup):
    """A command group that also accepts the former names of its commands and of their options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer has its own click from some version on
        """Return (name, command, arguments) for ``args``, with former names replaced by current ones."""
        name, *rest = args
        name = _COMMANDS.get(name, name)
        command = self.get_command(ctx, name)
        if command is not None and any(_LIST in parameter.opts for parameter in command.params):
            end = rest.index("--") if "--" in rest else len(rest)
            rest = [*_with_technique_list(rest[:end]), *rest[end:]]
        return super().resolve_command(ctx, [name, *rest])


def _with_technique_list(arguments: Sequence[str]) -> Iterator[str]:
    """Yield ``arguments`` with ``--techniques`` in place of the options of single techniques."""
    waits_for_kernel = False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if waits_for_kernel or (option == _KERNEL and equals):
            yield f"{_LIST}={argument if waits_for_kernel else value}"
            waits_for_kernel = False
        elif argument == _KERNEL:
            waits_for_kernel = True
        else:
            yield f"{_LIST}={_TECHNIQUES[argument]}" if argument in _TECHNIQUES else argument
    if waits_for_kernel:
        yield _KERNEL
