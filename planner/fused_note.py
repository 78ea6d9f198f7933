"""What a plan says of its fused ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from planner import fused_ops
from planner.graph import OpGraph
from planner.joined_linears import shared_inputs

_SOME = "run as fused ops: "
_JOINED = "linear layers add up gradients in their products"
NOTHING_FUSED = "nothing of the model is fused: it has no part whose code does what a fused op does."


def fused_note(graph: OpGraph) -> str:
    """Say how many ops of a model are fused, by kind, and in how many linear layers gradients are joined."""
    counts = Counter(op.target_name for op in graph.ops if op.target_name in fused_ops.NAMES)
    parts = ", ".join(f"{count} {name.split('.')[1]}" for name, count in sorted(counts.items()))
    joined = sum(bool(shared.joined) for shared in shared_inputs(graph, joins=True).values())
    said = NOTHING_FUSED if not parts else f"{_SOME}{parts}."
    return f"{said} Beside that {joined} {_JOINED}." if joined else said


def other_notes(notes: Iterable[str]) -> Iterator[str]:
    """Yield the notes that say something else."""
    yield from (note for note in notes if not note.startswith((NOTHING_FUSED, _SOME)))
