"""A note on weights that an axis leaves whole because it does not divide them, while it splits others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cost_model.layouts.layout import MeshSpec, sharded_dim
from planner.graph.op_graph import OpGraph
from planner.writing.fqn_entries import NamedEntries, fold_names

_MUCH = 0.01
"""Share of the parameters from which on a note names a weight."""


def whole_notes(entries: NamedEntries, graph: OpGraph, mesh: MeshSpec, names: Sequence[str]) -> Iterator[str]:
    """Yield a note for each axis on which ranks have pieces of some weights, and others whole for their sizes.

    Args:
        entries: layouts by FQN.
        graph: the traced model.
        mesh: the mesh.
        names: FQNs of all parameters, in the module's order.
    """
    values = {name: graph.values[value] for value, every in graph.parameters.items() for name in every}
    least = _MUCH * sum(graph.values[value].nbytes for value in graph.parameters)
    for axis, size in enumerate(mesh.shape):
        if any(sharded_dim(port.layout[axis]) is not None for port in entries.inputs.get("", {}).values()):
            continue  # its ranks have other samples
        split: set[str] = set()
        whole: dict[str, tuple[int, int]] = {}
        for name, stored in entries.stored.items():
            value = values[name]
            if len(value.shape) < 2:
                continue
            odd = next((length for length in value.shape if length % size and length > size), None)
            if sharded_dim(entries.compute.get(name, stored)[axis]) is not None:
                split.add(name)
            elif odd is not None and value.nbytes >= least:
                whole[name] = odd, value.nbytes
        if split and whole:
            yield _note(fold_names(whole, names), mesh.names[axis], size)


def _note(whole: dict[str, tuple[int, int]], axis: str, size: int) -> str:
    lengths = sorted({length for length, _ in whole.values()})
    padded = ", ".join(f"{math.ceil(length / size) * size:,}" for length in lengths)
    nbytes = ", ".join(f"{name} ({nbytes / 1e6:,.0f} MB)" for name, (_, nbytes) in whole.items())
    return (
        f"the ranks of {axis} repeat each other's work on {nbytes}: {size} does not divide "
        f"{', '.join(f'{length:,}' for length in lengths)}. Padded to {padded} it could be split."
    )
