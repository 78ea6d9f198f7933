"""The meshes and the numbers of micro-batches that each planner chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import MeshError
from planner.run.baselines import LAUNCHED
from planner.search.baseline_search import baseline_space
from planner.search.mesh_space import meshes_of

_ONE_AXIS_PLANNERS = ("data-parallel", "fully-sharded")
"""Planners whose meshes have one axis. The size of the axis has to divide the samples of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpace:
    """The search space of each planner for one job.

    Attributes:
        axes: largest number of mesh axes.
        batch: samples in the global batch.
        counts: numbers of micro-batches of the job, ascending.
    """

    axes: int
    batch: int
    counts: Sequence[int]

    def on(self, name: str, cluster: ClusterSpec) -> tuple[list[MeshSpec], list[int]]:
        """Return the meshes of a cluster and the numbers of micro-batches that a planner chooses from.

        Raises:
            MeshError: the planner is a baseline that the cluster has no mesh for.
        """
        if name in LAUNCHED:
            return self._of_baseline(name, cluster)
        if name in _ONE_AXIS_PLANNERS:
            return meshes_of(cluster, axes=1), [c for c in self.counts if self.batch // c % cluster.size == 0]
        meshes = meshes_of(cluster, self.axes)
        # The outermost of three axes splits the batch only.
        return [m for m in meshes if len(m.shape) < 3 or self.batch % m.shape[0] == 0], list(self.counts)

    def _of_baseline(self, name: str, cluster: ClusterSpec) -> tuple[list[MeshSpec], list[int]]:
        space = baseline_space(name, cluster)
        if space is None:
            raise MeshError(
                f"there is no {name} on {cluster.name}.",
                what_to_do="Choose another planner: fsdp needs two devices, hsdp two nodes of several devices, and "
                "tensor parallelism an even number of devices in a node.",
            )
        even = space.counts(self.batch, self.counts)
        meshes = [mesh for mesh, _ in even] or [mesh for mesh, _ in space.meshes]
        return meshes, sorted({count for _, counts in even for count in counts})

    def counts_for(self, name: str, cluster: ClusterSpec) -> list[int]:
        """Return the numbers of micro-batches that a planner chooses from on the whole cluster.

        Raises:
            MeshError: the planner needs micro-batches whose samples divide over all devices, and there are none.
        """
        counts = self.on(name, cluster)[1]
        if not counts:
            samples = self.batch // self.counts[0]
            batch = f"a batch of {samples}" if self.counts[0] == 1 else f"a micro-batch of {samples}"
            raise MeshError(
                f"{batch} does not divide over {cluster.size} devices, which {name} requires.",
                what_to_do=f"Choose a batch that is a multiple of {cluster.size}, fewer micro-batches, or another "
                "planner.",
            )
        return counts
