"""What each class of regions has alive at which moments: tensors counted, and bytes added up by lifetime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.ilp.problem import Lifetime
from planner.liveness.peak_candidates import Moment

Counts = npt.NDArray[np.float64]

_ROLES = {
    "saved": "activations",
    "saved_extra": "activations",
    "cached_extra": "activations",
    "recomputed": "recomputed_block",
    "recomputed_extra": "recomputed_block",
    "runs": "recomputed_block",
    "gradients": "transient",
    "works": "transient",
}
"""Role of what is counted at moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """How many members of a class of regions have what alive, by moment.

    Attributes:
        moments: those that are counted at.
        saved: [slots, moments]: autograd keeps the slot's tensor, from the forward on.
        recomputed: [slots, moments]: it keeps the tensor since its block was run again.
        saved_extra, recomputed_extra: [ops, moments]: likewise, of tensors that exist only inside an op.
        cached_extra: [ops, moments]: of these, results that selective checkpointing caches.
        gradients: [slots, moments]: the gradient of the slot's tensor is there.
        works: [ops, moments]: the op's own backward runs.
        runs: [ops, moments]: the op's own forward runs again.
        held, held_extra: [slots] and [ops]: of ``saved`` and ``saved_extra``, at the end of the forward.
        held_cached: [ops]: of ``cached_extra`` likewise.
    """

    moments: tuple[Moment, ...]
    saved: Counts
    recomputed: Counts
    saved_extra: Counts
    recomputed_extra: Counts
    cached_extra: Counts
    gradients: Counts
    works: Counts
    runs: Counts
    held: Counts
    held_extra: Counts
    held_cached: Counts
    _lifetimes: tuple[Lifetime, ...] = field(init=False, repr=False, compare=False)
    _times: Counts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find which of what is counted is there at the same moments, in proportion."""
        rows = [(role, counts) for name, role in _ROLES.items() for counts in getattr(self, name)]
        found: dict[Lifetime, int] = {}
        times: list[tuple[int, int, float]] = []
        for column, (role, counts) in enumerate(rows):
            if counts.any():
                divisor = float(np.gcd.reduce(counts.astype(np.int64)))
                lifetime = _lifetime(self.moments, role, counts / divisor)
                times.append((found.setdefault(lifetime, len(found)), column, divisor))
        matrix = np.zeros((len(found), len(rows)))
        for row, column, count in times:
            matrix[row, column] = count
        object.__setattr__(self, "_lifetimes", tuple(found))
        object.__setattr__(self, "_times", matrix)

    def add_up(
        self,
        *,
        made: Counts,
        extra: Counts,
        cached: Counts,
        running: Counts,
        gradients: Counts,
        working: Counts,
    ) -> Iterator[tuple[Lifetime, float]]:
        """Yield the bytes that there are, by lifetime.

        Args:
            made: of each slot's tensor.
            extra: of what autograd keeps of the inside of each op.
            cached: of what selective checkpointing caches of it.
            running, working: of what is there inside of each op while its forward, or its backward, runs.
            gradients: of the gradient of each slot's tensor.
        """
        nbytes = self._times @ np.concatenate([made, extra, cached, made, extra, running, gradients, working])
        for lifetime, amount in zip(self._lifetimes, nbytes.tolist(), strict=True):
            if amount:
                yield lifetime, amount


def _lifetime(moments: Sequence[Moment], role: str, counts: Counts) -> Lifetime:
    return Lifetime.of({moment.quantity(role): count for moment, count in zip(moments, counts.tolist(), strict=True)})


def throughout(moments: Sequence[Moment]) -> Lifetime:
    """Return the lifetime of activations of other micro-batches: all of a step but the update."""
    return Lifetime.of({moment.quantity("activations"): 1.0 for moment in moments if moment.position >= 0})
