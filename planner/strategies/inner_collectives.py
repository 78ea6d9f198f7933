"""Collectives that an op of ours runs inside itself, where no port shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from cost_model.hardware.collective_kinds import CollectiveKind


class Kernel(NamedTuple):
    """A call of the attention kernel.

    Attributes:
        queries, keys: rows of each.
        causal: whether each row sees the keys up to its own alone.
        heads, kv_heads: of queries, and of keys.
    """

    queries: int
    keys: int
    causal: bool
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCollective:
    """A collective that each call of an op runs.

    Attributes:
        axis: of the mesh.
        nbytes: of the full buffer on one rank.
        phase: forward (and again, where a checkpointed block is recomputed) or backward.
        overlapped_with: what the op computes meanwhile; None where it waits.
    """

    kind: CollectiveKind
    axis: int
    nbytes: int
    phase: Literal["forward", "backward"] = "forward"
    overlapped_with: Kernel | None = None
