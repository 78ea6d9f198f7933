"""Which pipelines of a job are searched.

A number of stages that divides the nodes, or the devices of a node; in a stage one axis, or a second one within a node,
or any three where they are asked for; the batch split evenly over the first axis, or, where that leaves too few
micro-batches and there is no third axis, the sequence of one sample, in pieces of 128 tokens or more; three ways to
spread the blocks, and interleaved stages of as many chunks as can be. What stages hand to each other has one layout on
both sides, split so on the first axis and on others by anything or nothing.

Where two axes are asked for and the cluster has more devices than the batch has samples, interleaved stages have one
mesh of three as well: the innermost a whole node, the one around it two of them, which is there to split sequences.
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
from planner.search.pipeline.stage_planners import PipelineRun, listed_blocks
from planner.search.pipeline.tasks import SingleDeviceTime

_BUSY = 2
"""Micro-batches for each stage: with fewer, a third of a step and more is spent waiting."""

_LIGHTER = 2.0
"""By how many blocks the first stage is given less in one of the ways to spread them: it keeps most activations."""

_LEAST_TOKENS = 128
"""Of a sequence on a rank, where a single sample is split: fewer do not fill one tile of a matrix product."""


@dataclass(frozen=True, slots=True)
class PipelineSpace:
    """The pipelines of a job.

    Attributes:
        search: of the whole model on the whole cluster.
        clusters: number of stages -> what one of them has.
        only: the one number of stages, and their mesh; None: all.
        axes: that the mesh of a stage has at most.
        ends_alone: whether a chunk of an interleaved stage may be what runs before all blocks, or after, alone.
    """

    search: RunPlanner
    work: SingleDeviceTime
    clusters: Mapping[int, ClusterSpec]
    only: tuple[int, MeshSpec] | None
    axes: int
    ends_alone: bool

    def pipelines(self, counts: Sequence[int], modes: Sequence[str]) -> Iterator[PipelineRun]:
        """Yield every pipeline in one of these numbers of micro-batches and modes of checkpointing."""
        for stages, mesh in self._meshes():
            spreads = [found for found in self.spreads(stages) if found[1] > 1 or self.has_single_chunks(mesh)]
            for (split, chunks), count, ac in itertools.product(spreads, counts, modes):
                if self._may_split(mesh, stages, count) and (chunks == 1 or count % stages == 0):
                    yield PipelineRun(mesh=mesh, counts=split, micro_batches=count, ac=ac, chunks=chunks)

    def splits_samples(self, mesh: MeshSpec, count: int) -> bool:
        """Tell whether a stage's first axis splits the samples of a micro-batch, one of ``count``."""
        return self.search.batch // count % mesh.shape[0] == 0

    def has_single_chunks(self, mesh: MeshSpec) -> bool:
        """Tell whether stages on ``mesh`` may have one chunk each: not where it is there for interleaved ones."""
        return self.only is not None or len(mesh.shape) <= self.axes

    def splits(self, stages: int) -> list[tuple[int, ...]]:
        """Return ways to spread the blocks over so many stages, one chunk on each."""
        first, last = self._ends
        around = ((first, last), (0.0, 0.0), (first + _LIGHTER, last))
        length = len(listed_blocks(self.search))
        return list(dict.fromkeys(balanced(length, stages, *extra) for extra in around))

    def spreads(self, stages: int) -> list[tuple[tuple[int, ...], int]]:
        """Return ways to spread the blocks over so many stages, and the chunks that each stage has them in."""
        found = interleaved(len(listed_blocks(self.search)), stages, *self._ends, ends_alone=self.ends_alone)
        return [*((split, 1) for split in self.splits(stages)), *(() if found is None else (found,))]

    def _may_split(self, mesh: MeshSpec, stages: int, count: int) -> bool:
        """Tell whether a stage's first axis splits the samples of a micro-batch, or has to split a single one.

        It has to where splitting the samples leaves a stage too few micro-batches to be busy with. The first of three
        axes is for samples alone: the second may split a sequence.
        """
        if self.splits_samples(mesh, count):
            return True
        batch, seq = self.search.batch, self.search.job.seq
        if batch != count or self.search.batch_axes(mesh):
            return False
        too_short = self.only is None and seq is not None and seq < _LEAST_TOKENS * mesh.shape[0]
        return not too_short and batch < _BUSY * stages * mesh.shape[0]

    def _meshes(self) -> Iterator[tuple[int, MeshSpec]]:
        """Yield numbers of stages with the mesh of each."""
        if self.only is not None:
            yield self.only
            return
        for stages, cluster in self.clusters.items():
            for mesh in (*meshes_of(cluster, self.axes), *self._beside(cluster)):
                # Of three axes the innermost stays within a node, and the one around it has no more ranks than a node.
                inner = max(mesh.shape[1:], default=1)
                if inner <= cluster.devices_per_node:
                    yield stages, mesh

    def _beside(self, cluster: ClusterSpec) -> Iterator[MeshSpec]:
        """Yield the mesh of pairs of nodes where devices outnumber samples: a node is seldom enough to split sequences.

        And where communication runs beside products: then a plan seldom waits for so much of it that running blocks
        again, in place of splitting what they keep, would pay. Not where its first axis does not divide the batch: all
        three would be free, and programs many times as large.
        """
        wanted = self.search.batch < self.search.cluster.size or self.search.job.async_tp
        pairs = node_pairs(cluster) if self.axes == 2 and wanted else None
        if pairs is not None and self.search.batch_axes(pairs):
            yield pairs

    @property
    def _ends(self) -> tuple[float, float]:
        """What comes before and after all blocks, in blocks."""
        return self.work.first_s / self.work.block_s, self.work.last_s / self.work.block_s
