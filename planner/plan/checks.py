"""Checks without a module: of a mesh against its cluster, and of a plan's entries (types, layouts on the mesh)."""

from __future__ import annotations

from collections.abc import Mapping

from cost_model import ClusterSpec
from cost_model.layouts.layout import Layout, MeshSpec, format_layout, sharded_dim
from planner.errors import MeshError, PlanKeyError, PlanLayoutError, PlanTypeError
from planner.plan.estimate import Pipeline
from planner.plan.mesh import PlanMesh
from planner.plan.ports import Port, is_layout
from planner.plan.token_order import ZigzagOrder


def check_mesh(mesh: MeshSpec, cluster: ClusterSpec) -> None:
    """Raise an error unless ``mesh`` is a mesh with as many devices as ``cluster``.

    Raises:
        MeshError: ``mesh`` is none, or the numbers of devices differ; the message states both.
    """
    if not isinstance(mesh, MeshSpec):
        raise MeshError(f"mesh is {mesh!r}.", what_to_do='Give text, such as "dp=2,tp=4", a MeshSpec or a DeviceMesh.')
    if mesh.size != cluster.size:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} devices and the cluster {cluster.name} has {cluster.size}.",
            what_to_do=f"Choose axis sizes whose product is {cluster.size}.",
        )


def wrong_type(name: str, key: str, value: object, advice: str) -> PlanTypeError:
    """Return the error for a ``value`` of a wrong type at ``key`` in the plan's field ``name``."""
    detail = f"{name} has {type(value).__name__} for {key!r}, which a plan cannot hold."
    return PlanTypeError(detail, field=name, key=key, what_to_do=advice)


def check_ports(name: str, key: str, spec: object) -> None:
    """Raise ``PlanTypeError`` unless ``spec`` is a ``PortSpec`` with a port, and ``reallgather`` only at inputs."""
    advice = "Give a layout, a list with a layout or None for each tensor, or a dict from argument name to layout."
    ports = [spec] if isinstance(spec, Port) else list(spec.values() if isinstance(spec, Mapping) else ())
    if isinstance(spec, tuple):
        ports = [port for port in spec if port is not None]
    if not ports:
        raise wrong_type(name, key, spec, advice)
    for port in ports:
        if not isinstance(port, Port) or not all(is_layout(layout) for layout in port.layouts()):
            raise wrong_type(name, key, port, advice)
        if port.reallgather and name != "input_plan":
            detail = (
                f"{name} has reallgather for {key!r}: only what a module is called with can be redistributed again."
            )
            raise PlanTypeError(detail, field=name, key=key, what_to_do="Say it at the inputs of those who read it.")


def check_names(name: str, key: str, names: object) -> None:
    """Raise ``PlanTypeError`` unless ``names`` is a non-empty tuple of distinct names."""
    advice = "Give a list of the names of parameters, as they are called inside the module."
    # A string is no list of names: iterating over it would give its letters.
    if not isinstance(names, tuple) or not names or not all(isinstance(item, str) and item for item in names):
        raise wrong_type(name, key, names, advice)
    if len(set(names)) < len(names):
        repeated = next(item for item in names if names.count(item) > 1)
        detail = f"{name} has {repeated!r} twice for {key!r}."
        raise PlanTypeError(detail, field=name, key=key, what_to_do="Name every parameter once.")


def check_zigzag_order(order: object, mesh: MeshSpec) -> None:
    """Raise an error unless ``order`` is a `ZigzagOrder` that is possible on ``mesh``.

    Raises:
        PlanTypeError: a value of a wrong type, or a dim below 0.
        PlanKeyError: the axis is not in the mesh or does not divide the sequence length, or ``outputs`` has the root.
    """
    advice = "Give axis and length, and for modules' inputs and outputs the dim of each tensor, from 0."
    if not isinstance(order, ZigzagOrder):
        raise wrong_type("zigzag", "", order, advice)
    for places in (order.inputs, order.outputs):
        for key, dims in places.items():
            if not isinstance(dims, Mapping) or not dims:
                raise wrong_type("zigzag", key, dims, advice)
            for dim in dims.values():
                if not isinstance(dim, int) or dim < 0:
                    raise wrong_type("zigzag", key, dim, advice)
    sizes = dict(mesh.axes)
    if order.axis not in sizes or order.length < 1 or order.length % sizes[order.axis]:
        raise PlanKeyError(
            f"zigzag is over {order.axis!r} for sequences of {order.length} tokens, on the mesh {mesh}.",
            field="zigzag",
            key=order.axis,
            what_to_do="Name an axis of the mesh that divides the sequences.",
        )
    if "" in order.outputs or "output" in order.outputs:
        raise PlanKeyError(
            "zigzag brings results of the root in order, which nothing inside it reads.",
            field="zigzag",
            key="",
            what_to_do="Name modules whose results others read.",
        )


def check_layout(name: str, key: str, layout: Layout, mesh: MeshSpec) -> None:
    """Raise ``PlanLayoutError`` where no tensor can have ``layout`` on ``mesh``."""
    text = f"({', '.join(format_layout(layout))})"
    if len(layout) != len(mesh.axes):
        raise PlanLayoutError(
            f"{name} gives {key!r} the layout {text}: {len(layout)} placement(s) for {len(mesh.axes)} axes ({mesh}).",
            field=name,
            key=key,
            what_to_do="Give one placement for each axis, outermost first.",
        )
    # Tensors at boundaries may have any number of dims, and their layouts may count from the last one.
    if name not in ("input_plan", "output_plan") and any((sharded_dim(placement) or 0) < 0 for placement in layout):
        detail = f"{name} gives {key!r} the layout {text}, which shards a negative dim."
        raise PlanLayoutError(detail, field=name, key=key, what_to_do="Count dims from 0.")
    if name in ("plan", "compute_plan") and any(placement.is_partial() for placement in layout):
        detail = f"{name} gives {key!r} the layout {text}, but a parameter cannot be partial."
        raise PlanLayoutError(detail, field=name, key=key, what_to_do="Shard or replicate it on that axis.")


def check_pipeline(pipeline: Pipeline, mesh: PlanMesh) -> None:
    """Raise a `MeshError` unless ``mesh`` has a rank for each stage, and the schedule is one of its chunks."""
    if (mesh.names[0], mesh.shape[0]) != ("pp", len(pipeline.stages)):
        raise MeshError(
            f"A pipeline of {len(pipeline.stages)} stages on the mesh {mesh}.",
            what_to_do="Give the mesh an outermost axis pp with one rank for each stage.",
        )
    if (pipeline.chunks > 1) != (pipeline.schedule == "interleaved"):
        raise MeshError(
            f"Stages of {pipeline.chunks} chunks in the schedule {pipeline.schedule}.",
            what_to_do="Give the schedule interleaved and chunks above 1, or neither.",
        )
