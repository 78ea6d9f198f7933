"""`PipelineSpace`: the pipelines of a job that are searched.

- Stages: each has whole nodes, or an equal part of a node.
- Mesh of a stage: one axis; or two axes, the inner one within a node; or three axes if the job asks for three.
- Batch: sharded evenly over the first axis. If this leaves too few micro-batches and there is no third axis, the
  sequence of a single sample is sharded instead, into pieces of 128 tokens or more.
- Blocks: three splits over the stages, and interleaved stages in as many chunks as possible.
- Boundary tensors: the same layout on both sides: sharded as the batch on the first axis, in any way or not at all on
  the other axes.

If the job asks for two axes, interleaved stages may have one mesh of three axes too, to shard sequences over more
ranks: the innermost axis is a whole node, the middle one two nodes. This mesh is searched if the cluster has more
devices than the batch has samples, or with async tensor parallelism.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.run.run_planner import RunPlanner
from planner.search.mesh_space import meshes_of, node_pairs
from planner.search.pipeline.interleaving import interleaved
from planner.search.pipeline.partition import balanced
from planner.search.pipeline.single_device_time import SingleDeviceTime
from planner.search.pipeline.stage_planners import PipelineRun, listed_blocks

_BUSY = 2
"""Micro-batches per stage: with fewer, idle time is a third of a step or more."""

_LIGHTER = 2.0
"""Blocks that one of the splits takes from the first stage, which holds the most activations."""

_LEAST_TOKENS = 128
"""Least tokens per rank where the sequence of a single sample is sharded: fewer do not fill one tile of a GEMM."""


@dataclass(frozen=True, slots=True)
class PipelineSpace:
    """The pipelines of a job.

    Attributes:
        planner: the planner of the whole model on the whole cluster.
        times: seconds of the model's parts on one device.
        clusters: number of stages -> cluster of one stage.
        only: the one number of stages and the mesh of a stage to search; None: all.
        axes: largest number of axes of a stage's mesh.
        ends_alone: whether a chunk of an interleaved stage may have no block, only the ops before or after all blocks.
    """

    planner: RunPlanner
    times: SingleDeviceTime
    clusters: Mapping[int, ClusterSpec]
    only: tuple[int, MeshSpec] | None
    axes: int
    ends_alone: bool

    def pipelines(self, micro_batch_counts: Sequence[int], modes: Sequence[str]) -> Iterator[PipelineRun]:
        """Yield every pipeline with one of these numbers of micro-batches and one of these checkpointing modes."""
        for stages, mesh in self._meshes():
            spreads = [spread for spread in self.spreads(stages) if spread[1] > 1 or self.has_single_chunks(mesh)]
            for (split, chunks), count, ac in itertools.product(spreads, micro_batch_counts, modes):
                if self._may_split_batch(mesh, stages, count) and (chunks == 1 or count % stages == 0):
                    yield PipelineRun(mesh=mesh, blocks_per_stage=split, micro_batches=count, ac=ac, chunks=chunks)

    def splits_samples(self, mesh: MeshSpec, count: int) -> bool:
        """Return whether the first axis of a stage's mesh divides the samples of one of ``count`` micro-batches."""
        return self.planner.batch // count % mesh.shape[0] == 0

    def has_single_chunks(self, mesh: MeshSpec) -> bool:
        """Return whether stages on ``mesh`` may have one chunk. If not, the mesh is for interleaved stages only."""
        return self.only is not None or len(mesh.shape) <= self.axes

    def splits(self, stages: int) -> list[tuple[int, ...]]:
        """Return the splits of the blocks (number of each stage) over ``stages`` stages of one chunk."""
        first, last = self._ends
        around = ((first, last), (0.0, 0.0), (first + _LIGHTER, last))
        length = len(listed_blocks(self.planner))
        return list(dict.fromkeys(balanced(length, stages, *extra) for extra in around))

    def spreads(self, stages: int) -> list[tuple[tuple[int, ...], int]]:
        """Return (number of blocks of each stage, chunks per stage) for every split of the blocks over the stages."""
        spread = interleaved(len(listed_blocks(self.planner)), stages, *self._ends, ends_alone=self.ends_alone)
        return [*((split, 1) for split in self.splits(stages)), *(() if spread is None else (spread,))]

    def _may_split_batch(self, mesh: MeshSpec, stages: int, count: int) -> bool:
        """Return whether a stage's first axis may shard a micro-batch: by samples, or a single sample by its sequence.

        A single sample is sharded only if sharding by samples would leave the stages too few micro-batches. The first
        of three axes shards samples only, because the second may shard sequences.
        """
        if self.splits_samples(mesh, count):
            return True
        batch, seq = self.planner.batch, self.planner.job.seq
        if batch != count or self.planner.batch_axes(mesh):
            return False
        is_too_short = self.only is None and seq is not None and seq < _LEAST_TOKENS * mesh.shape[0]
        return not is_too_short and batch < _BUSY * stages * mesh.shape[0]

    def _meshes(self) -> Iterator[tuple[int, MeshSpec]]:
        """Yield (number of stages, mesh of one stage)."""
        if self.only is not None:
            yield self.only
            return
        for stages, cluster in self.clusters.items():
            for mesh in (*meshes_of(cluster, self.axes), *self._meshes_of_node_pairs(cluster)):
                # Of three axes the innermost stays within a node, and the one around it has no more ranks than a node.
                inner = max(mesh.shape[1:], default=1)
                if inner <= cluster.devices_per_node:
                    yield stages, mesh

    def _meshes_of_node_pairs(self, cluster: ClusterSpec) -> Iterator[MeshSpec]:
        """Yield the mesh of `node_pairs` if devices outnumber samples, or with async tensor parallelism.

        If devices outnumber samples, a single node seldom shards sequences enough. With async tensor parallelism plans
        seldom wait for communication, so that sharding saved activations costs less than recomputing them. The mesh is
        left out if its first axis does not divide the batch: all three axes would have free choices, and the programs
        would be many times as large.
        """
        is_useful = self.planner.batch < self.planner.cluster.size or self.planner.job.async_tp
        pairs = node_pairs(cluster) if self.axes == 2 and is_useful else None
        if pairs is not None and self.planner.batch_axes(pairs):
            yield pairs

    @property
    def _ends(self) -> tuple[float, float]:
        """(time of the ops before all blocks, time of the ops after them), in units of one block's time."""
        return self.times.first_s / self.times.block_s, self.times.last_s / self.times.block_s
