"""What is priced: a job on a mesh, cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layout import MeshSpec
from planner.grouping import ALIKE, Grouping
from planner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is priced: the job, on a mesh of a cluster, cut into micro-batches, with a mode of checkpointing.

    Attributes:
        ac: the mode, as in a job.
        grouping: what that comes to, and which equal blocks are alike.
    """

    job: Job
    cluster: ClusterSpec
    mesh: MeshSpec
    micro_batches: int
    ac: str
    grouping: Grouping = ALIKE

    @property
    def flash_attention(self) -> bool:
        """Whether attention runs in a fused kernel."""
        return self.cluster.device.flash_attention if self.job.flash_attention is None else self.job.flash_attention
