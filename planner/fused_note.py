"""What a plan says of its fused ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from planner import fused_ops
from planner.graph import OpGraph

_SOME = "run as fused ops: "
NOTHING_FUSED = "nothing of the model is fused: it has no part whose code does what a fused op does."


def fused_note(graph: OpGraph) -> str:
    """Say how many ops of a model are fused, by kind."""
    counts = Counter(op.target_name for op in graph.ops if op.target_name in fused_ops.NAMES)
    parts = ", ".join(f"{count} {name.split('.')[1]}" for name, count in sorted(counts.items()))
    return f"{_SOME}{parts}." if parts else NOTHING_FUSED


def other_notes(notes: Iterable[str]) -> Iterator[str]:
    """Yield the notes that say something else."""
    yield from (note for note in notes if note != NOTHING_FUSED and not note.startswith(_SOME))
