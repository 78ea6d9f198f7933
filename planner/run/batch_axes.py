"""`batch_axes`: the mesh axes that split only the batch, which keeps the programs of large meshes small."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_model.layouts.layout import MeshSpec
from planner.run.pins import Pin


def batch_axes(mesh: MeshSpec, batch: int, pins: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the axes of ``mesh`` that split only the batch: all but the two innermost.

    Axes of one rank do not count. The result is empty if the axes do not divide the batch evenly, or if a pin on a
    compute layout names one of them.

    Args:
        mesh: the mesh of a run.
        batch: samples in the global batch.
        pins: the job's pins.
    """
    outer = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1)[:-2]
    pinned = {pin.axis for pin in map(Pin.parse, pins) if pin.used}
    divides = batch % math.prod(mesh.shape[axis] for axis in outer) == 0
    return outer if divides and pinned.isdisjoint(mesh.names[axis] for axis in outer) else ()
