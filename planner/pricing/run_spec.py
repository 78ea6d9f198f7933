"""`Run`: what is priced: a job on one mesh with a number of micro-batches and checkpointing, or one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import AxisGroup, ClusterSpec, axis_group
from cost_model.configuration.pipeline_schedules import held_micro_batches, idle_passes
from cost_model.layouts.layout import MeshSpec
from planner.plan.job import Job
from planner.plan.reshard import ReshardAfter
from planner.regions.block_grouping import UNIFORM_BLOCKS, Grouping

PIPELINE_AXIS = "pp"
"""Name of the mesh axis of pipeline stages, which is the outermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """The place of one stage in a pipeline.

    Attributes:
        index: the stage, counted from 0.
        stages: number of stages.
        cluster: the cluster of the whole pipeline.
        chunks: chunks of the model that each stage has; several chunks are interleaved.
        bounds_chunks: whether the price, computed with one chunk, has to be a lower bound for interleaved stages too.
        end_alone: whether one chunk of the stage has no block: it only has modules before the first or after the last
            block.
    """

    index: int
    stages: int
    cluster: ClusterSpec
    chunks: int = 1
    bounds_chunks: bool = False
    end_alone: bool = False

    def group(self, mesh: MeshSpec) -> AxisGroup:
        """Return the group of ranks that send to each other across stages; ``mesh`` is the mesh of one stage."""
        whole = MeshSpec(axes=((PIPELINE_AXIS, self.stages), *mesh.axes))
        return axis_group(whole, PIPELINE_AXIS, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job on one mesh, with a number of micro-batches and checkpointing; or one pipeline stage of it.

    Attributes:
        cluster: the cluster; for a pipeline stage, the part of the cluster that the stage runs on.
        ac: activation checkpointing, in the form of a job's ``ac`` ("selective:4", for example).
        grouping: the blocks that ``ac`` checkpoints, and the equal blocks that share their decisions.
        place: place of the pipeline stage; None: the run is the whole model.
        batch_axes: indices of mesh axes that split only the batch: compute layouts of parameters are replicated on
            these axes.
        reshard_after: when all FSDP groups reshard; None: each as is best.
    """

    job: Job
    cluster: ClusterSpec
    mesh: MeshSpec
    micro_batches: int
    ac: str
    grouping: Grouping = UNIFORM_BLOCKS
    place: StagePlace | None = None
    batch_axes: tuple[int, ...] = ()
    reshard_after: ReshardAfter | None = None

    @property
    def flash_attention(self) -> bool:
        """Whether attention runs in a fused kernel."""
        return self.cluster.device.flash_attention if self.job.flash_attention is None else self.job.flash_attention

    @property
    def passes(self) -> float:
        """Micro-batches per step, plus the idle time (bubble) of a pipeline, in units of one micro-batch's time.

        The bubble of 1F1B is a whole number of micro-batches. The bubble of interleaved stages may be fractional.
        """
        place = self.place
        return self.micro_batches if place is None else self.micro_batches + idle_passes(place.stages, place.chunks)

    @property
    def overlapped_message_passes(self) -> float:
        """The part of `passes` in which messages between stages overlap with compute.

        With interleaved chunks, a rank runs another chunk while a message is in transit (``overlap_p2p_comm`` in
        Megatron), and waits for messages only in its idle time. With one chunk (1F1B), a rank waits for every message.
        A lower bound for both (``bounds_chunks``) overlaps all messages.
        """
        place = self.place
        if place is None:
            return 0
        return self.passes if place.bounds_chunks else self.micro_batches if place.chunks > 1 else 0

    @property
    def in_flight(self) -> float:
        """Largest number of micro-batches with live saved activations under 1F1B (see ``pipeline_schedules``)."""
        place = self.place
        if place is None:
            return 1
        return held_micro_batches(
            place.stages, place.chunks, self.micro_batches, place.index, end_alone=place.end_alone
        )
