"""What each class of regions has alive at which candidates: tensors counted, and bytes added up by lifetime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.ilp.quantities import Lifetime
from planner.liveness.peak_candidates import PeakCandidate

Counts = npt.NDArray[np.float64]

_ROLES = {
    "saved": "activations",
    "saved_extra": "activations",
    "cached_extra": "activations",
    "recomputed": "recomputed_block",
    "recomputed_extra": "recomputed_block",
    "recompute_runs": "recomputed_block",
    "gradients": "transient",
    "backward_runs": "transient",
}
"""Role of what is counted at candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """How many members of a class of regions have what alive, by candidate.

    Attributes:
        candidates: those that are counted at.
        saved: [slots, candidates]: autograd keeps the slot's tensor, from the forward on.
        recomputed: [slots, candidates]: it keeps the tensor since its block was run again.
        saved_extra, recomputed_extra: [ops, candidates]: likewise, of tensors that exist only inside an op.
        cached_extra: [ops, candidates]: of these, results that selective checkpointing caches.
        gradients: [slots, candidates]: the gradient of the slot's tensor is there.
        backward_runs: [ops, candidates]: the op's own backward runs.
        recompute_runs: [ops, candidates]: the op's own forward runs again.
        saved_after_forward, saved_extra_after_forward: [slots] and [ops]: ``saved`` and ``saved_extra`` at the end of
            the forward.
        cached_extra_after_forward: [ops]: of ``cached_extra`` likewise.
    """

    candidates: tuple[PeakCandidate, ...]
    saved: Counts
    recomputed: Counts
    saved_extra: Counts
    recomputed_extra: Counts
    cached_extra: Counts
    gradients: Counts
    backward_runs: Counts
    recompute_runs: Counts
    saved_after_forward: Counts
    saved_extra_after_forward: Counts
    cached_extra_after_forward: Counts
    _lifetimes: tuple[Lifetime, ...] = field(init=False, repr=False, compare=False)
    _times: Counts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find which of what is counted is there at the same candidates, in proportion."""
        rows = [(role, counts) for name, role in _ROLES.items() for counts in getattr(self, name)]
        row_by_lifetime: dict[Lifetime, int] = {}
        times: list[tuple[int, int, float]] = []
        for column, (role, counts) in enumerate(rows):
            if counts.any():
                divisor = float(np.gcd.reduce(counts.astype(np.int64)))
                lifetime = _lifetime(self.candidates, role, counts / divisor)
                times.append((row_by_lifetime.setdefault(lifetime, len(row_by_lifetime)), column, divisor))
        matrix = np.zeros((len(row_by_lifetime), len(rows)))
        for row, column, count in times:
            matrix[row, column] = count
        object.__setattr__(self, "_lifetimes", tuple(row_by_lifetime))
        object.__setattr__(self, "_times", matrix)

    def add_up(
        self,
        *,
        tensors: Counts,
        extra: Counts,
        cached: Counts,
        running: Counts,
        gradients: Counts,
        working: Counts,
    ) -> Iterator[tuple[Lifetime, float]]:
        """Yield the bytes that there are, by lifetime.

        Args:
            tensors: of each slot's tensor.
            extra: of what autograd keeps of the inside of each op.
            cached: of what selective checkpointing caches of it.
            running, working: of what is there inside of each op while its forward, or its backward, runs.
            gradients: of the gradient of each slot's tensor.
        """
        nbytes = self._times @ np.concatenate([tensors, extra, cached, tensors, extra, running, gradients, working])
        for lifetime, amount in zip(self._lifetimes, nbytes.tolist(), strict=True):
            if amount:
                yield lifetime, amount


def _lifetime(candidates: Sequence[PeakCandidate], role: str, counts: Counts) -> Lifetime:
    by_candidate = zip(candidates, counts.tolist(), strict=True)
    return Lifetime.of({candidate.quantity(role): count for candidate, count in by_candidate})


def throughout(candidates: Sequence[PeakCandidate]) -> Lifetime:
    """Return the lifetime of activations of other micro-batches: all of a step but the update."""
    return Lifetime.of({candidate.quantity("activations"): 1.0 for candidate in candidates if candidate.position >= 0})
