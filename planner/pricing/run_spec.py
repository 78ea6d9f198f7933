"""`Run`: what prices are for: a job on one mesh, with given micro-batches and checkpointing; or one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import AxisGroup, ClusterSpec, axis_group
from cost_model.configuration.pipeline_schedules import held_micro_batches, idle_passes
from cost_model.layouts.layout import MeshSpec
from planner.plan.job import Job
from planner.regions.block_grouping import UNIFORM_BLOCKS, Grouping

PIPELINE_AXIS = "pp"
"""Name of the mesh axis of pipeline stages, which is the outermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """The place of one stage in a pipeline.

    Attributes:
        index: the stage, counted from 0.
        stages: number of stages.
        cluster: the cluster that all stages are on.
        chunks: chunks of the model that each stage has; several chunks are interleaved.
        bounds_chunks: whether the stage, priced with one chunk, is to give a lower bound for interleaved stages too.
        end_alone: whether one of its chunks consists only of what runs before the first or after the last block.
    """

    index: int
    stages: int
    cluster: ClusterSpec
    chunks: int = 1
    bounds_chunks: bool = False
    end_alone: bool = False

    def group(self, mesh: MeshSpec) -> AxisGroup:
        """Return the group of ranks that send to each other across stages; ``mesh`` is that of one stage."""
        whole = MeshSpec(axes=((PIPELINE_AXIS, self.stages), *mesh.axes))
        return axis_group(whole, PIPELINE_AXIS, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What prices are for.

    Attributes:
        cluster: the cluster; of a pipeline stage, the part that it runs on.
        ac: activation checkpointing, as a job states it.
        grouping: the blocks that ``ac`` checkpoints, and which equal blocks share their decisions.
        place: the place of a pipeline stage; None: the run is the whole model.
        batch_axes: indices of mesh axes that split only the batch: parameters are replicated over them in compute.
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
        """The number of micro-batches that take as long as a step.

        In a pipeline with the 1F1B schedule the idle time (the bubble) counts as further micro-batches. Their number is
        whole unless stages are interleaved.
        """
        place = self.place
        return self.micro_batches if place is None else self.micro_batches + idle_passes(place.stages, place.chunks)

    @property
    def overlapped_message_passes(self) -> float:
        """The number of `passes` whose messages between stages overlap with compute.

        With interleaved chunks a rank runs another chunk while a message is on its way (``overlap_p2p_comm`` in
        Megatron), and waits for messages only in its idle time. With one chunk (1F1B) it waits for every message.
        """
        place = self.place
        if place is None:
            return 0
        return self.passes if place.bounds_chunks else self.micro_batches if place.chunks > 1 else 0

    @property
    def in_flight(self) -> float:
        """The number of micro-batches whose activations are saved at once, by 1F1B (see ``pipeline_schedules``)."""
        place = self.place
        if place is None:
            return 1
        return held_micro_batches(
            place.stages, place.chunks, self.micro_batches, place.index, end_alone=place.end_alone
        )
