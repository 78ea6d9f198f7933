"""Collectives that an op of ours runs inside itself, where no port shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.report import CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCollective:
    """A collective that each call of an op runs.

    Attributes:
        axis: of the mesh.
        nbytes: of the full buffer on one rank.
        phase: forward (and again, where a checkpointed block is recomputed) or backward.
    """

    kind: CollectiveKind
    axis: int
    nbytes: int
    phase: Literal["forward", "backward"] = "forward"
