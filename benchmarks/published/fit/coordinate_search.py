"""Coordinate search for a few positive constants: the loss is the mean log error over rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from published.rows.priced_row import PricedRow

STEPS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)
"""Factors that each round tries on a constant."""


def loss(rows: Iterable[PricedRow]) -> float:
    """Return the mean of |log(predicted / measured)|; a source of n rows has weight sqrt(n)."""
    priced = [row for row in rows if row.predicted]
    counts = Counter(row.source for row in priced)
    weights = [1 / math.sqrt(counts[row.source]) for row in priced]
    errors = [abs(math.log((row.predicted or 1.0) / row.measured)) for row in priced]
    return sum(weight * error for weight, error in zip(weights, errors, strict=True)) / sum(weights)


def fit(
    start: Mapping[str, float],
    price: Callable[[Mapping[str, float]], Sequence[PricedRow]],
    bounds: Mapping[str, tuple[float, float]],
    rounds: int = 8,
) -> tuple[dict[str, float], float]:
    """Return the constants of a local minimum of the loss, and the loss.

    Args:
        start: the constants from which the search starts.
        price: returns the rows, priced with some constants.
        bounds: constant to be fitted -> least and largest value.
        rounds: most rounds over all constants.
    """
    best = dict(start)
    least = loss(price(best))
    for _ in range(rounds):
        before = least
        for name, (low, high) in bounds.items():
            for factor in STEPS:
                candidate = {**best, name: min(high, max(low, best[name] * factor))}
                value = loss(price(candidate))
                if value < least - 1e-6:
                    best, least = candidate, value
        if before - least < 1e-4:
            break
    return best, least
