"""What a plan says about itself: what a step costs, and how far from the best it can be at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cost_model.hardware.collective_kinds import CollectiveKind

Phase = Literal["param_gather", "forward", "backward", "recompute", "grad_reduce"]
"""Once a step run those in "param_gather" (parameters that are kept for the step) and "grad_reduce"."""
ONCE_A_STEP: tuple[Phase, ...] = ("param_gather", "grad_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """All calls of a step that agree in kind, axis, phase and size.

    Attributes:
        kind: the collective.
        axis: name of the mesh axis that it runs on.
        phase: the part of the step that it runs in.
        count: calls per step.
        bytes: of one call, as nccl-tests counts: the full buffer.
        time_s: of all ``count`` calls, exposed or not.
    """

    kind: CollectiveKind
    axis: str
    phase: Phase
    count: int
    bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds and bytes of one step on one device.

    Attributes:
        step_time_s: the whole step.
        forward_s: of it, the forward passes of all micro-batches, with the communication that is not hidden.
        backward_s: the backward passes likewise, recomputation included.
        grad_reduce_s: the reduction of gradients that the backward pass does not hide.
        optimizer_s: the optimizer's update.
        compute_s: computing alone, all phases.
        communication_s: communicating alone, hidden or not.
        exposed_communication_s: of that, what compute does not hide.
        peak_memory_bytes: the largest number of bytes live on a device.
        memory: the peak by role: parameters, gradients, optimizer_state, activations, ...
        collectives: every collective of a step.
    """

    step_time_s: float
    forward_s: float
    backward_s: float
    grad_reduce_s: float
    optimizer_s: float
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    peak_memory_bytes: int
    memory: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CollectiveEstimate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of a pipeline.

    Attributes:
        modules: FQN patterns of its blocks, and of the other modules whose parameters it has.
        micro_batch_s: seconds of its forward and backward of one micro-batch, sending included.
        peak_memory_bytes: the largest number of bytes live on one of its devices.
    """

    modules: tuple[str, ...]
    micro_batch_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages that a model is cut into; stage i has the i-th part of the mesh's outermost axis, ``pp``.

    Attributes:
        schedule: in which order a stage runs micro-batches forward and backward.
        chunks: of the model that each stage has: chunk j of stage i of p is the model's chunk i + j p. More than one
            where stages are interleaved.
        layout: of what a stage hands to the next, and of its gradient: one placement for each axis but ``pp``.
        idle_s: seconds of a step that a device of the slowest stage waits for other stages.
        stages: in order.
    """

    schedule: Literal["1f1b", "interleaved"]
    layout: tuple[str, ...]
    idle_s: float
    stages: tuple[PipelineStage, ...]
    chunks: int = 1


MeshOutcome = Literal["chosen", "slower", "does-not-fit", "no-layout", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReport:
    """What became of a mesh that the search had to choose from.

    Attributes:
        mesh: such as "dp=2,tp=8".
        outcome: "chosen"; "slower" (no plan on it that fits is faster by more than the gap, if any fits); "open" (that
            was not decided before the search ended); "does-not-fit" (seen without regard to time); "no-layout" (the
            planner has none on it).
        at_least_s: no plan on it that fits takes less; None where it was seen that none fits.
        step_time_s: of the fastest plan that was found on it; None where none was, since it was not needed.
    """

    mesh: str
    outcome: MeshOutcome
    at_least_s: float | None = None
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How the plan was found.

    Attributes:
        name: of the solver or planner.
        status: "optimal", "time-limit" (the incumbent when time was up), "given" (a random plan, not solved for).
        objective_s: the objective of the program: seconds of the step.
        bound_s: lower bound on the seconds of a step, over the whole search space.
        gap: (objective - bound) / objective; None where nothing was proven.
        time_s: spent solving.
        meshes: those that were searched, where there was more than one.
    """

    name: str
    status: str
    objective_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    time_s: float = 0.0
    meshes: tuple[MeshReport, ...] = ()
