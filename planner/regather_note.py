"""What a plan says of the inputs that are gathered again for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.ports import PortSpec, ports_of

_SOME = "gathered again for the backward, and not kept until then: "
_NAMED = 4
"""Keys that are named; the others are counted."""


def with_regather_note(notes: Iterable[str], input_plan: Mapping[str, PortSpec]) -> tuple[str, ...]:
    """Return ``notes`` with one on what ``input_plan`` has gathered again, in place of an earlier one."""
    keys = [key for key, spec in input_plan.items() if any(port.regather for _, port in ports_of(spec))]
    others = tuple(note for note in notes if not note.startswith(_SOME))
    if not keys:
        return others
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return (*others, f"{_SOME}{', '.join(keys[:_NAMED])}{more}.")
