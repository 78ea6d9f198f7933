"""What is priced: a job on a mesh, cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layout import MeshSpec
from planner.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is priced: the job, on a mesh of a cluster, cut into micro-batches, with one mode of checkpointing."""

    job: Job
    cluster: ClusterSpec
    mesh: MeshSpec
    micro_batches: int
    ac: str

    @property
    def flash_attention(self) -> bool:
        """Whether attention runs in a fused kernel."""
        return self.cluster.device.flash_attention if self.job.flash_attention is None else self.job.flash_attention
