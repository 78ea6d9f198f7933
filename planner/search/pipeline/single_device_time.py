"""Seconds of compute of a model's parts on one device, which bound a pipeline's stages before any relaxation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import MeshSpec
from planner.regions.regions import block_of
from planner.run.compute_bound import least_recompute_s, op_seconds
from planner.run.run_planner import RunPlanner
from planner.search.pipeline.stage_planners import PipelineRun, listed_blocks
from planner.search.pipeline.step_time import StageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceTime:
    """Seconds of compute of the whole batch on one device.

    Attributes:
        block_s: seconds of one block, without recomputation.
        first_s: seconds of the ops before all blocks.
        last_s: seconds of the ops after all blocks.
        recompute_s: checkpointing mode -> seconds of recomputing one block.
    """

    block_s: float
    first_s: float
    last_s: float
    recompute_s: Mapping[str, float]

    @classmethod
    def of_model(cls, planner: RunPlanner, fewest: int, modes: Sequence[str]) -> SingleDeviceTime:
        """Return the seconds in the largest micro-batches. Smaller micro-batches are not faster.

        Args:
            planner: the planner of the whole model.
            fewest: the smallest number of micro-batches that may be chosen.
            modes: the checkpointing modes that may be chosen.
        """
        one, blocks = MeshSpec(axes=(("dp", 1),)), set(listed_blocks(planner))
        run = planner.run_of(one, fewest, "none")
        batch = planner.micro_batch(run)
        graph = planner.model.graph_at(batch)
        blocks_s = first_s = last_s = 0.0
        seconds = op_seconds(planner.model, planner.op_times, run, batch)
        for op in graph.ops:
            if block_of(graph.calls[op.call].fqn) in blocks:
                blocks_s += seconds.get(op.name, 0.0)
            elif blocks_s:
                last_s += seconds.get(op.name, 0.0)
            else:
                first_s += seconds.get(op.name, 0.0)
        recompute_s = {
            ac: least_recompute_s(planner.model, planner.op_times, planner.run_of(one, fewest, ac), batch) / len(blocks)
            for ac in modes
        }
        return cls(
            block_s=blocks_s * fewest / len(blocks),
            first_s=first_s * fewest,
            last_s=last_s * fewest,
            recompute_s=recompute_s,
        )

    def of_stage(self, kind: StageKind, ac: str) -> float:
        """Return the seconds of compute of a stage on one device, for the whole batch, recomputation included."""
        around = {"first": self.first_s, "last": self.last_s, "middle": 0.0}[kind.role]
        return around + kind.blocks * (self.block_s + self.recompute_s[ac])

    def bounds_s(self, pipeline: PipelineRun) -> list[float]:
        """Return a lower bound in seconds on the ``U`` of each stage (`step_time`): its compute, perfectly split."""
        share = pipeline.passes / pipeline.micro_batches / pipeline.mesh.size
        bounds = [0.0] * len(pipeline.blocks_per_stage)
        for kind in pipeline.kinds:
            for index in kind.indices:
                bounds[index] = self.of_stage(kind, pipeline.ac) * share
        return bounds
