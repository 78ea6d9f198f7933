"""`AxisRule` and `InnerCollective`: how one of the executor's own ops runs on one mesh axis; collectives inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch.distributed.tensor.placement_types import Placement

from cost_model.hardware.collective_kinds import CollectiveKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRule:
    """One way to run an op on one mesh axis.

    Attributes:
        inputs: placements of the inputs; None for a plain tensor.
        outputs: placements of the outputs; None for a plain tensor.
        output_gradients: placements in which the outputs' gradients arrive; None where there is none.
        input_gradients: placements of the gradients of the inputs; None where there is none.
    """

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]
    output_gradients: tuple[Placement | None, ...]
    input_gradients: tuple[Placement | None, ...]


class Kernel(NamedTuple):
    """One call of an attention kernel.

    Attributes:
        queries, keys: numbers of queries and of keys per head.
        causal: whether a query sees only the keys up to its own position.
        heads, kv_heads: numbers of query heads, and of key and value heads.
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
        axis: index of the mesh axis.
        nbytes: bytes of the full buffer on one rank.
        phase: the pass that runs it; a forward collective runs again if its block is recomputed.
        overlapped_with: the kernel of the same op that it overlaps with; None where the op waits for it.
    """

    kind: CollectiveKind
    axis: int
    nbytes: int
    phase: Literal["forward", "backward"] = "forward"
    overlapped_with: Kernel | None = None
