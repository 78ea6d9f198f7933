"""`ClassTimeline`: live tensors of a region class at each peak candidate, and their bytes by lifetime."""

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
"""Attribute of `ClassTimeline` -> role of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """At each peak candidate, the number of members of a region class in which a tensor is alive or an op runs.

    Attributes:
        candidates: the peak candidates.
        saved: [slots, candidates]: the slot's tensor is alive since the forward: saved for backward, or cached by
            selective checkpointing. (In inference: alive.)
        recomputed: [slots, candidates]: the slot's tensor is alive since the recomputation of its block.
        saved_extra, recomputed_extra: [ops, candidates]: the same for tensors that exist only inside an op.
        cached_extra: [ops, candidates]: GEMM results inside an op that selective checkpointing caches are alive.
        gradients: [slots, candidates]: the gradient of the slot's tensor is alive.
        backward_runs: [ops, candidates]: the op's backward runs. (In inference: its forward.)
        recompute_runs: [ops, candidates]: the op is recomputed.
        saved_after_forward, saved_extra_after_forward, cached_extra_after_forward: [slots], [ops] and [ops]: the
            numbers of ``saved``, ``saved_extra`` and ``cached_extra`` at the end of the forward.
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
        """Compute one lifetime for all rows of counts that are proportional to each other."""
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
        """Yield (lifetime, bytes) of the class, given the bytes of one member.

        Args:
            tensors: [slots]: bytes of each slot's tensor.
            extra: [ops]: bytes that autograd saves inside each op.
            cached: [ops]: bytes that selective checkpointing caches inside each op.
            running: [ops]: bytes inside each op while it is recomputed.
            gradients: [slots]: bytes of the gradient of each slot's tensor.
            working: [ops]: bytes inside each op while its backward runs. (In inference: its forward.)
        """
        nbytes = self._times @ np.concatenate([tensors, extra, cached, tensors, extra, running, gradients, working])
        for lifetime, amount in zip(self._lifetimes, nbytes.tolist(), strict=True):
            if amount:
                yield lifetime, amount


def _lifetime(candidates: Sequence[PeakCandidate], role: str, counts: Counts) -> Lifetime:
    by_candidate = zip(candidates, counts.tolist(), strict=True)
    return Lifetime.of({candidate.quantity(role): count for candidate, count in by_candidate})


def throughout(candidates: Sequence[PeakCandidate]) -> Lifetime:
    """Return the lifetime of activations of other micro-batches: all candidates except the optimizer's step."""
    return Lifetime.of({candidate.quantity("activations"): 1.0 for candidate in candidates if candidate.position >= 0})
