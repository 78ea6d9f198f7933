"""What a plan says of the inputs that are gathered again for the backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.job import Job
from planner.ports import PortSpec, ports_of

_SOME = "gathered again for the backward, and not kept until then: "
_NOTHING = "nothing is gathered again for the backward."
_NAMED = 4
"""Keys that are named; the others are counted."""


def with_regather_note(notes: Iterable[str], input_plan: Mapping[str, PortSpec], job: Job) -> tuple[str, ...]:
    """Return ``notes`` with one on what ``input_plan`` has gathered again, in place of an earlier one.

    Args:
        job: the plan's; where it asked for this, and nothing came of it, the note says so.
    """
    keys = [key for key, spec in input_plan.items() if any(port.regather for _, port in ports_of(spec))]
    others = tuple(note for note in notes if not note.startswith((_SOME, _NOTHING)))
    if not keys:
        return (*others, _NOTHING) if job.regather else others
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return (*others, f"{_SOME}{', '.join(keys[:_NAMED])}{more}.")
