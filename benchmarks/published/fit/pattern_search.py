"""A minimiser for a few constants and a loss without gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

_ROUNDS = 600
_FINEST = 1 / 128

Point = dict[str, float]
Loss = Callable[[Mapping[str, float]], float]


def minimise(loss: Loss, start: Mapping[str, float], steps: Mapping[str, float]) -> tuple[Point, float]:
    """Return (the point, its loss) that pattern search ends at.

    Each constant in turn is moved by its step; a round that helped is repeated as one leap; steps are halved when no
    move helps. Hooke and Jeeves, "Direct Search", J. ACM 8(2), 1961. Deterministic. A loss of infinity marks a
    forbidden point. It finds a local minimum, and can rest on a kink: give it a smooth loss.
    """
    point, best = dict(start), loss(start)
    scale = 1.0
    for _ in range(_ROUNDS):
        moved, value = _explore(loss, point, best, {name: scale * step for name, step in steps.items()})
        if value >= best:
            scale /= 2
            if scale < _FINEST:
                break
            continue
        leap = {name: 2 * moved[name] - point[name] for name in point}
        point, best = moved, value
        if loss(leap) < best:
            point, best = leap, loss(leap)
    assert math.isfinite(best), "every point tried is forbidden"
    return point, best


def _explore(loss: Loss, point: Point, best: float, steps: Mapping[str, float]) -> tuple[Point, float]:
    """Return the point, and its loss, after one try of each constant in both directions."""
    for name, step in steps.items():
        for sign in (1.0, -1.0):
            tried = {**point, name: point[name] + sign * step}
            value = loss(tried)
            if value < best - 1e-12:
                point, best = tried, value
                break
    return point, best
