"""The pipelines of a job that are searched.

- Stages: a number that divides the nodes, or the devices of a node.
- Mesh of a stage: one axis, or a second one within a node, or any three where they are asked for.
- Batch: split evenly over the first axis. Where that leaves too few micro-batches and there is no third axis, the
  sequence of one sample is split instead, in pieces of 128 tokens or more.
- Blocks: three splits over the stages, and interleaved stages in as many chunks as possible.
- Boundary tensors: one layout on both sides, split so on the first axis, and by anything or nothing on the others.

Where two axes are asked for and the cluster has more devices than the batch has samples, interleaved stages have one
mesh of three axes as well: the innermost a whole node, the middle one two nodes, to split sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.run.mesh_space import meshes_of, node_pairs
from planner.run.run_planner import RunPlanner
from planner.search.pipeline.interleaving import interleaved
from planner.search.pipeline.partition import balanced
from planner.search.pipeline.single_device_time import SingleDeviceTime
from planner.search.pipeline.stage_planners import PipelineRun, listed_blocks

_BUSY = 2
"""Micro-batches for each stage: with fewer, a third of a step or more is idle time."""

_LIGHTER = 2.0
"""Blocks that the first stage has less in one of the splits: it keeps most activations."""

_LEAST_TOKENS = 128
"""Tokens of a sequence on a rank where a single sample is split: fewer do not fill one tile of a GEMM."""


@dataclass(frozen=True, slots=True)
class PipelineSpace:
    """The pipelines of a job.

    Attributes:
        planner: of the whole model on the whole cluster.
        times: seconds of the model's parts on one device.
        clusters: number of stages -> cluster of one stage.
        only: the one number of stages, and the mesh of one, that is searched; None: all.
        axes: that the mesh of a stage has at most.
        ends_alone: whether a chunk of an interleaved stage may be what runs before all blocks, or after them, alone.
    """

    planner: RunPlanner
    times: SingleDeviceTime
    clusters: Mapping[int, ClusterSpec]
    only: tuple[int, MeshSpec] | None
    axes: int
    ends_alone: bool

    def pipelines(self, micro_batch_counts: Sequence[int], modes: Sequence[str]) -> Iterator[PipelineRun]:
        """Yield every pipeline in one of these numbers of micro-batches and checkpointing modes."""
        for stages, mesh in self._meshes():
            spreads = [spread for spread in self.spreads(stages) if spread[1] > 1 or self.has_single_chunks(mesh)]
            for (split, chunks), count, ac in itertools.product(spreads, micro_batch_counts, modes):
                if self._may_split_batch(mesh, stages, count) and (chunks == 1 or count % stages == 0):
                    yield PipelineRun(mesh=mesh, blocks_per_stage=split, micro_batches=count, ac=ac, chunks=chunks)

    def splits_samples(self, mesh: MeshSpec, count: int) -> bool:
        """Tell whether the first axis of a stage's mesh splits the samples of a micro-batch, one of ``count``."""
        return self.planner.batch // count % mesh.shape[0] == 0

    def has_single_chunks(self, mesh: MeshSpec) -> bool:
        """Tell whether stages on ``mesh`` may have one chunk each: not on a mesh for interleaved stages alone."""
        return self.only is not None or len(mesh.shape) <= self.axes

    def splits(self, stages: int) -> list[tuple[int, ...]]:
        """Return the splits of the blocks over so many stages, one chunk on each."""
        first, last = self._ends
        around = ((first, last), (0.0, 0.0), (first + _LIGHTER, last))
        length = len(listed_blocks(self.planner))
        return list(dict.fromkeys(balanced(length, stages, *extra) for extra in around))

    def spreads(self, stages: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the splits of the blocks over so many stages, with the number of chunks on each stage."""
        spread = interleaved(len(listed_blocks(self.planner)), stages, *self._ends, ends_alone=self.ends_alone)
        return [*((split, 1) for split in self.splits(stages)), *(() if spread is None else (spread,))]

    def _may_split_batch(self, mesh: MeshSpec, stages: int, count: int) -> bool:
        """Tell whether a stage's first axis splits the samples of a micro-batch, or has to split a single one.

        It has to where splitting the samples leaves the stages too few micro-batches. The first of three axes is for
        samples alone: the second may split a sequence.
        """
        if self.splits_samples(mesh, count):
            return True
        batch, seq = self.planner.batch, self.planner.job.seq
        if batch != count or self.planner.batch_axes(mesh):
            return False
        is_too_short = self.only is None and seq is not None and seq < _LEAST_TOKENS * mesh.shape[0]
        return not is_too_short and batch < _BUSY * stages * mesh.shape[0]

    def _meshes(self) -> Iterator[tuple[int, MeshSpec]]:
        """Yield numbers of stages with the mesh of one stage."""
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
        """Yield the mesh of node pairs where devices outnumber samples: one node seldom splits sequences enough.

        Also with async tensor parallelism: its plans seldom wait for communication, so that splitting what blocks keep
        costs less than recomputing them. Not where its first axis does not divide the batch: all three axes would be
        free, and programs many times as large.
        """
        is_useful = self.planner.batch < self.planner.cluster.size or self.planner.job.async_tp
        pairs = node_pairs(cluster) if self.axes == 2 and is_useful else None
        if pairs is not None and self.planner.batch_axes(pairs):
            yield pairs

    @property
    def _ends(self) -> tuple[float, float]:
        """The time of what runs before and after all blocks, in blocks."""
        return self.times.first_s / self.times.block_s, self.times.last_s / self.times.block_s
