"""A note on weights that an axis leaves whole because it does not divide them, while it splits others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cost_model.layouts.layout import MeshSpec, sharded_dim
from planner.formulation.decision import Decision
from planner.liveness.structure import Structure
from planner.writing.fqn_entries import fold_names

_MUCH = 0.01
"""Share of the parameters' bytes from which on a note names a weight; smaller ones cost little."""


def whole_notes(structure: Structure, decision: Decision, mesh: MeshSpec, names: Sequence[str]) -> Iterator[str]:
    """Yield a note for each axis that splits ops by their weights, and leaves weights whole that it does not divide.

    Args:
        structure: the structure of the run.
        decision: its layouts.
        mesh: the mesh.
        names: FQNs of all parameters, in the module's order.
    """
    regions = structure.regions
    least = _MUCH * sum(regions.graph.values[value].nbytes for value in regions.graph.parameters)
    for axis, size in enumerate(mesh.shape):
        splits, whole = False, dict[str, tuple[int, int]]()
        for region in regions.regions:
            layouts = decision.strategies[regions.class_of[region.index]].forward
            for slot, layout in zip(region.slots, layouts, strict=True):
                if slot.parameter is None or layout is None or len(slot.value.shape) < 2:
                    continue
                odd = next((length for length in slot.value.shape if length % size and length > size), None)
                if sharded_dim(layout[axis]) is not None:
                    splits = True
                elif odd is not None and slot.value.nbytes >= least:
                    whole[slot.parameter] = odd, slot.value.nbytes
        if splits and whole:
            yield _note(fold_names(whole, names), mesh.names[axis], size)


def _note(whole: dict[str, tuple[int, int]], axis: str, size: int) -> str:
    lengths = sorted({length for length, _ in whole.values()})
    padded = ", ".join(f"{math.ceil(length / size) * size:,}" for length in lengths)
    nbytes = ", ".join(f"{name} ({nbytes / 1e6:,.0f} MB)" for name, (_, nbytes) in whole.items())
    return (
        f"every rank of {axis}, which splits other weights, computes with the whole of {nbytes}: {size} does not "
        f"divide {', '.join(f'{length:,}' for length in lengths)}. Padded to {padded} it could be split."
    )
