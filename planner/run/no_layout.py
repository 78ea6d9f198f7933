"""The reason why a job has no layout on any mesh though its ops can be run: the pin, baseline or size at fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Shard

from cost_model.layouts.layout import MeshSpec
from planner.errors import BaselineError, InfeasibleError, MeshError, PlannerError
from planner.regions.regions import Region
from planner.run.baselines import Restriction
from planner.run.pins import Pin, Pins
from planner.run.run_planner import RunPlanner

_OPS_SHOWN = 3
"""Ops of a region that a message lists at most."""


def no_layout_error(
    planner: RunPlanner,
    meshes: Sequence[MeshSpec],
    counts: Sequence[int],
    pins: Pins,
    restriction: tuple[str, Restriction] | None,
) -> PlannerError:
    """Return the error for a job without a layout on any of ``meshes``; it names what is at fault.

    Args:
        planner: the planner of the job's runs.
        meshes: the meshes that were tried.
        counts: numbers of micro-batches that were tried, ascending.
        pins: the job's pins.
        restriction: name and restriction of the baseline that is asked for, on the last mesh; None: there is none.
    """
    mesh = meshes[-1]
    for pin, names in pins.pins:
        reason = _uneven_pin(planner, mesh, pin, min(names)) or _refused_by(
            planner, mesh, counts[0], Pins(pins=((pin, names),), data_axes=()).on(mesh)
        )
        if reason is not None:
            return MeshError(f"the pin {pin.text} cannot be kept: {reason}.", what_to_do="Choose another pin or mesh.")
    for axis in pins.data_axes:
        reason = _refused_by(planner, mesh, counts[0], Pins(pins=(), data_axes=(axis,)).on(mesh))
        if reason is not None:
            advice = "Choose another mesh, or a batch that it divides."
            return MeshError(f"the axis {axis} cannot split data alone: {reason}.", what_to_do=advice)
    if restriction is not None:
        name, allowed = restriction
        reason = _refused_by(planner, mesh, counts[0], allowed) or "its layouts do not go together"
        return BaselineError(
            f"{name} is not possible on the mesh {mesh}: {reason}.",
            what_to_do="Choose the planner ilp, another mesh or another batch.",
        )
    if pins:
        return MeshError(
            f"no layout on these meshes keeps the pins together: {pins}.",
            what_to_do="Choose another mesh, or leave one of them out.",
        )
    return InfeasibleError(
        f"the ops of this model have no layouts that go together on the mesh {mesh}.",
        budget_bytes=planner.memory_bytes,
        least_bytes=None,
        what_to_do="Choose another mesh or batch.",
    )


def _uneven_pin(planner: RunPlanner, mesh: MeshSpec, pin: Pin, name: str) -> str | None:
    """Return that the pin's axis does not divide its parameter, with the sizes that would do; None where it does."""
    if pin.axis not in mesh.names or pin.forbidden or not isinstance(pin.placement, Shard):
        return None
    graph = planner.model.base.graph
    shape = next(graph.values[value].shape for value, names in graph.parameters.items() if name in names)
    size, dim = mesh.shape[mesh.names.index(pin.axis)], pin.placement.dim
    if dim >= len(shape):
        return f"{name} has {len(shape)} dims ({' x '.join(map(str, shape))}), and no dim {dim}"
    if shape[dim] % size == 0:
        return None
    legal = ", ".join(str(n) for n in range(1, planner.cluster.size + 1) if shape[dim] % n == 0)
    return f"dim {dim} of {name} has {shape[dim]} elements, which {pin.axis}={size} does not divide ({legal} would do)"


def _refused_by(planner: RunPlanner, mesh: MeshSpec, micro_batches: int, restriction: Restriction | None) -> str | None:
    """Return the first op or parameter to which a restriction leaves no choice; None where all have one."""
    if restriction is None:
        return None
    run = planner.run_of(mesh, micro_batches, "none")
    formulator, structure = planner.formulator(run, peak=False)
    allowed = []
    for index in range(len(structure.regions.classes)):
        region = structure.representative(index)
        choices = tuple(s for s in formulator.strategies(index) if restriction.accepts(region, s))
        if not choices:
            ops = list(dict.fromkeys(region_op.op.target_name for region_op in region.ops))
            text = ", ".join(ops[:_OPS_SHOWN]) + (", ..." if len(ops) > _OPS_SHOWN else "")
            where = structure.regions.classes[index].pattern or "the root module"
            sizes = "; ".join(dict.fromkeys(_sizes(region)))
            return f"{text or 'a tensor'} in {where} has no layout that it allows (its inputs: {sizes})"
        allowed.append(choices)
    for parameter in structure.parameters:
        if not formulator.storage_choices(parameter, allowed, restriction.accepts_stored):
            value = formulator.value_of(parameter)
            name = structure.regions.graph.parameters[parameter.values[0]][0]
            return f"{name} ({' x '.join(map(str, value.shape))}) has no stored layout that it allows"
    return None


def _sizes(region: Region) -> Iterator[str]:
    """Yield the shape of each tensor that enters a region."""
    for slot in region.slots:
        if slot.origin in ("entry", "parameter"):
            yield " x ".join(map(str, slot.value.shape)) or "a scalar"
