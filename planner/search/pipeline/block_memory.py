"""Lower bounds on the memory of pipeline stages: bytes of the tensors of their blocks, whatever the layouts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.plan.job import Job
from planner.pricing.run_spec import Run
from planner.run.memory_bound import least_alive_bytes, least_gradient_bytes, least_saved_bytes, least_state_bytes
from planner.search.pipeline.interleaving import Role
from planner.search.pipeline.stage_planners import StagePlanners, listed_blocks
from planner.search.pipeline.step_time import StageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Lower bounds on the bytes of one block, summed over all devices of its stage.

    Attributes:
        batch: samples in the micro-batch that activations are counted for.
        state_bytes: parameters and optimizer states.
        gradient_bytes: gradients that accumulate over micro-batches.
        saved_bytes: checkpointing mode -> activations that the forward of a micro-batch saves for backward.
        alive_bytes: checkpointing mode -> all activations alive at the peak of one backward.
    """

    batch: int
    state_bytes: float
    gradient_bytes: float
    saved_bytes: Mapping[str, float]
    alive_bytes: Mapping[str, float]

    @classmethod
    def of_model(cls, stages: StagePlanners, batch: int, modes: Sequence[str], job: Job) -> BlockMemory:
        """Return the bounds of a block of a model, counted in a stage that has one block."""
        role: Role = "middle" if len(listed_blocks(stages.whole)) > 2 else "first"
        model = stages.model(StageKind(role=role, blocks=1, indices=(0,)))
        blocks = set(listed_blocks(stages.whole))
        saved, alive, state_bytes, gradient_bytes = {}, {}, 0.0, 0.0
        for ac in modes:
            structure = model.structure(batch, model.grouping(ac))
            saved[ac], alive[ac] = least_saved_bytes(structure, blocks), least_alive_bytes(structure)
            state_bytes, gradient_bytes = (
                least_state_bytes(structure.regions, job),
                least_gradient_bytes(structure, job),
            )
        return cls(
            batch=batch, state_bytes=state_bytes, gradient_bytes=gradient_bytes, saved_bytes=saved, alive_bytes=alive
        )

    def of_stage(self, blocks: int, run: Run, batch: int) -> float:
        """Return a lower bound in bytes on a stage, summed over all its devices.

        A tensor's bytes are proportional to the batch or do not depend on it. So a fraction of the batch has at least
        that fraction of the bytes.

        Args:
            blocks: number of blocks of the stage.
            run: the run of the stage.
            batch: samples in a micro-batch of the stage.
        """
        saved, alive = self.saved_bytes[run.ac], self.alive_bytes[run.ac]
        activations = run.in_flight * blocks * saved + max(alive - saved, 0.0)
        resting = self.state_bytes + (self.gradient_bytes if run.micro_batches > 1 else 0.0)
        return blocks * resting + (activations * batch / self.batch if run.job.training else 0.0)
