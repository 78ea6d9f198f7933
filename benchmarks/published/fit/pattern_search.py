"""Pattern search: minimization of a loss of a few constants without its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

_ROUNDS = 600
_FINEST = 1 / 128

Point = dict[str, float]
Loss = Callable[[Mapping[str, float]], float]


def minimise(loss: Loss, start: Mapping[str, float], steps: Mapping[str, float]) -> tuple[Point, float]:
    """Return the point of a local minimum and its loss.

    Each constant in turn is moved by its step. A round that lowers the loss is repeated as one leap; steps are halved
    when no move lowers it. Deterministic. A loss of infinity marks a forbidden point. The search may stop at a kink, so
    the loss should be smooth. Source: Hooke and Jeeves, "Direct Search", J. ACM 8(2), 1961.
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
    assert math.isfinite(best), "every candidate is forbidden"
    return point, best


def _explore(loss: Loss, point: Point, best: float, steps: Mapping[str, float]) -> tuple[Point, float]:
    """Return the point and its loss after moving each constant in the first direction that lowers the loss, if any."""
    for name, step in steps.items():
        for sign in (1.0, -1.0):
            candidate = {**point, name: point[name] + sign * step}
            value = loss(candidate)
            if value < best - 1e-12:
                point, best = candidate, value
                break
    return point, best
