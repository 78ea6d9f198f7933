"""Minimization without derivatives by the downhill simplex of Nelder and Mead (1965), with restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]


def minimize(function: Callable[[Point], float], start: Sequence[float], steps: Sequence[float]) -> Point:
    """Return the point of a local minimum of ``function``.

    Args:
        function: the function to minimize.
        start: a corner of the first simplex.
        steps: sizes of the simplex, one for each restart.
    """
    best = np.array(start, dtype=np.float64)
    for step in steps:
        best = _descend(function, best, step)
    return best


def _descend(function: Callable[[Point], float], start: Point, step: float, most_steps: int = 4000) -> Point:
    points = [start, *(start + step * row for row in np.eye(len(start)))]
    values = [function(point) for point in points]
    for _ in range(most_steps):
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-10:
            break
        center = np.mean(points[:-1], axis=0)
        reflected = 2 * center - points[-1]
        value = function(reflected)
        if value < values[0]:
            further = 3 * center - 2 * points[-1]
            beyond = function(further)
            points[-1], values[-1] = (further, beyond) if beyond < value else (reflected, value)
        elif value < values[-2]:
            points[-1], values[-1] = reflected, value
        else:
            nearer = 0.5 * (center + points[-1])
            value = function(nearer)
            if value < values[-1]:
                points[-1], values[-1] = nearer, value
            else:
                points = [points[0], *(0.5 * (points[0] + point) for point in points[1:])]
                values = [values[0], *(function(point) for point in points[1:])]
    return points[int(np.argmin(values))]
