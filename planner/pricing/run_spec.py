"""What is priced: a job on a mesh, cut into micro-batches; or one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import AxisGroup, ClusterSpec, axis_group
from cost_model.configuration.pipeline_schedules import held_micro_batches, idle_passes
from cost_model.layouts.layout import MeshSpec
from planner.plan.job import Job
from planner.regions.block_grouping import UNIFORM_BLOCKS, Grouping

PIPELINE_AXIS = "pp"
"""The mesh axis of pipeline stages: the outermost one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Which stage of a pipeline a run is.

    Attributes:
        index: of the stage, from 0.
        stages: how many there are.
        cluster: that all stages are on.
        chunks: of the model that each stage has; more than one are interleaved.
        bounds_chunks: whether it is looked at, in one chunk, for what it says of all stages, interleaved ones too.
        end_alone: whether one of its chunks is what runs before all blocks, or after, alone.
    """

    index: int
    stages: int
    cluster: ClusterSpec
    chunks: int = 1
    bounds_chunks: bool = False
    end_alone: bool = False

    def group(self, mesh: MeshSpec) -> AxisGroup:
        """Return how the ranks that hand tensors on to each other lie on the nodes; ``mesh`` is of one stage."""
        whole = MeshSpec(axes=((PIPELINE_AXIS, self.stages), *mesh.axes))
        return axis_group(whole, PIPELINE_AXIS, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is priced: the job, on a mesh of a cluster, cut into micro-batches, with a mode of checkpointing.

    Attributes:
        cluster: of a stage, its share of the whole.
        ac: the mode, as in a job.
        grouping: what that comes to, and which equal blocks are alike.
        place: which stage of a pipeline this is; None: the whole model.
        batch_axes: mesh axes, by index, that split the batch alone: parameters are computed whole on them.
    """

    job: Job
    cluster: ClusterSpec
    mesh: MeshSpec
    micro_batches: int
    ac: str
    grouping: Grouping = UNIFORM_BLOCKS
    place: StagePlace | None = None
    batch_axes: tuple[int, ...] = ()

    @property
    def flash_attention(self) -> bool:
        """Whether attention runs in a fused kernel."""
        return self.cluster.device.flash_attention if self.job.flash_attention is None else self.job.flash_attention

    @property
    def passes(self) -> float:
        """How many micro-batches a step takes as long as: 1F1B's idle time, between equal stages, counts as some.

        Where stages are interleaved not a whole number.
        """
        place = self.place
        return self.micro_batches if place is None else self.micro_batches + idle_passes(place.stages, place.chunks)

    @property
    def passes_ahead(self) -> float:
        """In how many of the passes messages between stages run beside computing.

        Where chunks interleave a rank has another to run while a message is on its way (Megatron's
        ``overlap_p2p_comm``): it waits for messages while it is idle, before its first chunk or after its last. 1F1B
        without chunks waits for each.
        """
        place = self.place
        if place is None:
            return 0
        return self.passes if place.bounds_chunks else self.micro_batches if place.chunks > 1 else 0

    @property
    def in_flight(self) -> float:
        """Of how many micro-batches activations are kept at once: 1F1B's, see ``pipeline_schedules``."""
        place = self.place
        if place is None:
            return 1
        return held_micro_batches(
            place.stages, place.chunks, self.micro_batches, place.index, end_alone=place.end_alone
        )
