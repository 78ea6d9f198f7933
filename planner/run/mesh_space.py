"""The meshes of a cluster, and the checkpointing modes of a model, that a search chooses from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError, MeshError
from planner.run.model_analysis import ModelAnalysis

_NAMES = ("tp", "fsdp")
"""Of the inner axes of a mesh, from the innermost on."""


def checked_axes(axes: int) -> int:
    """Return ``axes``, if the search has meshes of so many.

    Raises:
        JobError: it has not.
    """
    if axes not in (1, 2, 3):
        raise JobError(f"meshes of {axes} axes are not searched.", what_to_do="Choose 1, 2 or 3.", field="axes")
    return axes


def meshes_of(cluster: ClusterSpec, axes: int = 2) -> list[MeshSpec]:
    """Return every mesh of the cluster with up to ``axes`` (1 to 3) axes; the inner in or across nodes."""
    found: list[tuple[int, ...]] = [()]
    for count in range(1, axes):
        found += [(*sizes, size) for sizes in found if len(sizes) == count - 1 for size in _next_sizes(cluster, sizes)]
    return [_mesh(cluster, sizes) for sizes in found]


def node_pairs(cluster: ClusterSpec) -> MeshSpec | None:
    """Return the mesh with an axis inside a node and one of two nodes around it; None where there are no two pairs."""
    sizes = (cluster.devices_per_node, 2)
    pair = math.prod(sizes)
    return _mesh(cluster, sizes) if sizes[0] > 1 and cluster.size % pair == 0 and cluster.size > pair else None


def _mesh(cluster: ClusterSpec, sizes: Sequence[int]) -> MeshSpec:
    """Return the mesh with axes of ``sizes``, from the innermost on, and one around them for all other devices."""
    inner = list(zip(_NAMES, sizes, strict=False))
    return MeshSpec(axes=(("dp", cluster.size // math.prod(sizes)), *reversed(inner)))


def _next_sizes(cluster: ClusterSpec, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield the sizes that an axis around axes of ``sizes`` can have, and another around it."""
    inside, per_node = math.prod(sizes), cluster.devices_per_node
    for size in range(2, cluster.size // inside // 2 + 1):
        reach = inside * size
        if cluster.size % reach == 0 and (per_node % reach == 0 or reach % per_node == 0):
            yield size


def modes_of(traced: ModelAnalysis, ac: str | None) -> list[str]:
    """Return the modes of checkpointing that a job leaves to choose from.

    Raises:
        JobError: one is asked for, and there are no blocks.
    """
    if ac is not None and ac != "none" and not traced.blocks.lists:
        raise JobError(
            f"ac is {ac!r}, but this model has no repeated blocks to checkpoint.", what_to_do="Choose none.", field="ac"
        )
    return [ac] if ac is not None else (["none", "selective", "full"] if traced.blocks.lists else ["none"])


def check_mesh(mesh: MeshSpec, cluster: ClusterSpec) -> None:
    """Refuse a mesh that is not the whole cluster.

    Raises:
        MeshError: naming both sizes.
    """
    if mesh.size != cluster.size:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} devices and the cluster {cluster.name} has {cluster.size}.",
            what_to_do=f"Choose axis sizes whose product is {cluster.size}.",
        )
