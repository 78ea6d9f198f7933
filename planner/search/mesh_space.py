"""The meshes of a cluster, and the checkpointing modes of a model, that a search chooses from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError
from planner.run.model_analysis import ModelAnalysis

_NAMES = ("tp", "fsdp")
"""Names of the inner axes of a mesh, from the innermost on."""


def meshes_of(cluster: ClusterSpec, axes: int = 2) -> list[MeshSpec]:
    """Return every mesh of the cluster with up to ``axes`` axes (1 to 3).

    The ranks of an inner axis and of all axes inside it divide a node evenly, or fill whole nodes.
    """
    inner: list[tuple[int, ...]] = [()]
    for count in range(1, axes):
        inner += [(*sizes, size) for sizes in inner if len(sizes) == count - 1 for size in _next_sizes(cluster, sizes)]
    return [_mesh(cluster, sizes) for sizes in inner]


def node_pairs(cluster: ClusterSpec) -> MeshSpec | None:
    """Return the mesh whose innermost axis is one node and whose middle axis is two nodes.

    None unless the cluster is made of two or more such pairs of nodes, with several devices on each node.
    """
    sizes = (cluster.devices_per_node, 2)
    pair = math.prod(sizes)
    return _mesh(cluster, sizes) if sizes[0] > 1 and cluster.size % pair == 0 and cluster.size > pair else None


def mesh_of_shape(shape: Sequence[int]) -> MeshSpec:
    """Return the mesh of one to three axes of these sizes, outermost first, as the search names them.

    The names say where an axis is, not what it does: that is known of a plan only.
    """
    inner = list(zip(_NAMES, reversed(shape[1:]), strict=False))
    return MeshSpec(axes=(("dp", shape[0]), *reversed(inner)))


def _mesh(cluster: ClusterSpec, sizes: Sequence[int]) -> MeshSpec:
    """Return the mesh with inner axes of ``sizes``, innermost first, and an outermost axis for the remaining factor."""
    return mesh_of_shape((cluster.size // math.prod(sizes), *reversed(sizes)))


def _next_sizes(cluster: ClusterSpec, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield the sizes that the next axis outside of ``sizes`` can have, where one more axis is outside of both."""
    inside, per_node = math.prod(sizes), cluster.devices_per_node
    for size in range(2, cluster.size // inside // 2 + 1):
        reach = inside * size
        if cluster.size % reach == 0 and (per_node % reach == 0 or reach % per_node == 0):
            yield size


def modes_of(model: ModelAnalysis, ac: str | None) -> list[str]:
    """Return the checkpointing modes to choose from, from the one that saves most to the one that saves least.

    Args:
        model: the model to plan.
        ac: the mode that the job fixes; None: the search chooses it.

    Raises:
        JobError: the job asks for checkpointing, and the model has no repeated blocks.
    """
    if ac is not None and ac != "none" and not model.blocks.lists:
        raise JobError(
            f"ac is {ac!r}, but this model has no repeated blocks to checkpoint.", what_to_do="Choose none.", field="ac"
        )
    return [ac] if ac is not None else (["none", "selective", "full"] if model.blocks.lists else ["none"])
