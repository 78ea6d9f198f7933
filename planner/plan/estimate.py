"""The estimate of a plan (seconds, bytes and collectives of a step), its pipeline, the solver's report, baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cost_model.hardware.collective_kinds import CollectiveKind

Phase = Literal["param_gather", "forward", "backward", "recompute", "grad_reduce"]
"""Phase that a collective runs in.

"param_gather" (parameters that stay unsharded for the whole step) and "grad_reduce" run once a step, the others in
every micro-batch.
"""
ONCE_A_STEP: tuple[Phase, ...] = ("param_gather", "grad_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """All calls of a collective in a step that have the same kind, axis, phase and size.

    Attributes:
        kind: kind of the collective.
        axis: name of the mesh axis that it runs on; names joined by commas where several axes act as one.
        phase: phase of the step that it runs in.
        count: calls per step.
        bytes: bytes of one call, counted as in nccl-tests: the full buffer.
        time_s: seconds of all ``count`` calls together, overlapped or exposed.
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
        step_time_s: seconds of the whole step.
        forward_s: seconds of the forward passes of all micro-batches, with their exposed communication.
        backward_s: seconds of the backward passes of all micro-batches, with recomputation and exposed communication.
        grad_reduce_s: seconds of exposed communication outside of both: the gradient reductions that do not overlap
            with the backward, and the first FSDP all-gathers, which overlap with nothing.
        optimizer_s: seconds of the optimizer's update.
        compute_s: seconds of kernels of the forward, recompute and backward phases, without communication.
        communication_s: seconds of all collectives, overlapped or exposed.
        exposed_communication_s: seconds of the step beyond compute and optimizer: communication that does not overlap,
            and the slowdown of kernels by communication that does.
        model_flops: FLOPs of the model in a step of the whole cluster, without recomputation, for the MFU; None: not
            counted.
        host_s: seconds in which one process dispatches all ops of a step, a lower bound on the step time of a run
            without CUDA graphs; None: not counted.
        peak_memory_bytes: peak of live bytes on a device.
        memory: role -> bytes at the peak (parameters, gradients, optimizer_state, activations, ...).
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
    model_flops: float | None = None
    host_s: float | None = None
    peak_memory_bytes: int
    memory: Mapping[str, int] = field(default_factory=dict)
    collectives: tuple[CollectiveEstimate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of a pipeline.

    Attributes:
        modules: FQN patterns of the stage's blocks, and of other modules with parameters of the stage.
        micro_batch_s: seconds of the stage's forward and backward of one micro-batch, sending included.
        peak_memory_bytes: peak of live bytes on a device of the stage.
    """

    modules: tuple[str, ...]
    micro_batch_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages that a model is cut into. Stage i runs on the ranks with index i on the mesh's outermost axis, ``pp``.

    Attributes:
        schedule: order in which a stage runs the forward and backward passes of micro-batches.
        chunks: number of chunks of the model on each stage. Of p stages, chunk j of stage i is chunk i + j p of the
            model. There is one chunk unless ``schedule`` is "interleaved".
        layout: layout of the tensor that a stage sends to the next, and of its gradient, as text: one placement for
            each axis except ``pp``.
        idle_s: seconds of a step in which a device of the slowest stage waits for other stages (the bubble).
        stages: the stages, in order.
    """

    schedule: Literal["1f1b", "interleaved"]
    layout: tuple[str, ...]
    idle_s: float
    stages: tuple[PipelineStage, ...]
    chunks: int = 1


MeshOutcome = Literal["chosen", "fastest", "slower", "does-not-fit", "no-layout", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReport:
    """The outcome of the search on one mesh.

    Attributes:
        mesh: the mesh as text, such as "dp=2,tp=8". The chosen mesh has the plan's names of axes, other meshes those of
            the search, which say the place of an axis (`planner.search.mesh_space`).
        outcome: "chosen": the plan is on this mesh. "fastest": the fastest plan that was found is on this mesh; the
            chosen plan is simpler. "slower": no plan on it that fits is faster than the fastest plan by more than the
            gap; there may be no plan that fits. "open": the search ended before it decided this.
            "does-not-fit": no plan on it fits the memory, whatever its step time. "no-layout": the model has no layout
            on it that the planner allows.
        at_least_s: lower bound in seconds on the step time of plans that fit; None: no plan fits.
        step_time_s: seconds of the fastest plan that was found on it; None: none was found. A lower bound above the
            incumbent spares the search for one.
    """

    mesh: str
    outcome: MeshOutcome
    at_least_s: float | None = None
    step_time_s: float | None = None


Perturbation = Literal["slow-communication", "exposed-communication", "slow-kernels"]
"""An assumption that a plan is priced under, in place of the cost model's own: communication 1.3 times as slow, a fifth
of what overlaps exposed, or kernels 10 % slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """The result of the search: objective, lower bound and gap of the plan, and the outcome of each mesh.

    Attributes:
        name: name of the planner.
        status: "optimal" (the fastest plan is within the relative gap of the job); "time-limit" (the search ended at
            the time limit); "given" (a random plan, not solved for).
        objective_s: objective of the integer program: seconds of the step.
        bound_s: lower bound on the seconds of a step, over the whole search space. Its plans checkpoint all blocks
            alike: a plan that does not may be below the bound.
        gap: (objective - bound) / objective; None: no bound was proven, or the plan is below it.
        time_s: seconds of solving the plan's integer programs.
        meshes: outcome of each mesh that was searched; empty where there was only one mesh.
        fastest_s: seconds of a step under the fastest plan that was found; None: it is this plan.
        fastest_mesh: mesh of the fastest plan, as text; None: it is this plan.
        loses_under: the assumption under which the fastest plan is slower than this one ("slow-communication",
            "exposed-communication", "slow-kernels"); None: this plan was chosen because it is simpler, or the fastest.
    """

    name: str
    status: str
    objective_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    time_s: float = 0.0
    meshes: tuple[MeshReport, ...] = ()
    fastest_s: float | None = None
    fastest_mesh: str | None = None
    loses_under: Perturbation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinePrice:
    """The price of a plan that people write by hand, at its best number of micro-batches and checkpointing.

    Attributes:
        name: "ddp", "fsdp", "hsdp" or "fsdp-tp"; in inference "ddp" (replicas) or "tp".
        mesh: its mesh as text, such as "dp=2,fsdp=8".
        step_time_s: seconds of a step; None: no such plan fits the memory.
        peak_memory_bytes: peak of live bytes on a device; where no plan fits, of the one with the least. None: the
            model has no such plan on this cluster.
        micro_batches: micro-batches per step; None where there is no such plan.
        ac: checkpointing mode; None where there is no such plan.
    """

    name: str
    mesh: str
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    micro_batches: int | None = None
    ac: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCost:
    """One part of the model in execution order: equal blocks that run one after another, or ops outside of blocks.

    Seconds are those of a step on one device: of all blocks of the section, and of all micro-batches.

    Attributes:
        module: FQN pattern of the blocks, or FQN of a module; "" is the root.
        calls: number of blocks.
        forward_s: seconds of kernels of the forward.
        backward_s: seconds of kernels of the backward, with recomputation.
        forward_wait_s, backward_wait_s: seconds by which communication delays these kernels: they wait for it, or run
            slower beside it. Where a link is busier than the kernels, a phase takes longer than both together.
        collectives: the collectives of a step.
    """

    module: str
    calls: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    collectives: tuple[CollectiveEstimate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """One op of one block of a section.

    Attributes:
        section: index of the section.
        op: name of the op, such as "linear".
        module: FQN pattern of the module whose forward has it.
        flops: FLOPs of one call of the forward, of the whole micro-batch; 0 where no matrix multiplication runs.
        nbytes: bytes that this call reads and writes, unsplit.
        forward_s, backward_s: seconds of a step, as in `SectionCost`.
        inputs: indices of the ops of the same block whose results it reads.
    """

    section: int
    op: str
    module: str
    flops: float = 0.0
    nbytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionCost:
    """One tensor that is redistributed in a section.

    Attributes:
        section: index of the section that reads it.
        producer, consumer: indices of the ops that make and first read it; None: a model input, or no op of the plan.
        before, after: layouts as text, one placement for each axis.
        time_s: seconds of the redistributions of a step, of tensor and gradient, overlapped or exposed.
    """

    section: int
    producer: int | None
    consumer: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Equal parameters of equal blocks.

    Attributes:
        name: FQN pattern.
        count: number of parameters.
        shape: unsharded shape of one.
        nbytes: stored bytes of all of them on one device, without gradients and optimizer states.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The live bytes on a device at one point of a micro-batch, beyond those of `Breakdown.held`.

    Attributes:
        phase: phase of the point; "update" is the optimizer's step.
        fraction: fraction of the phase's kernels that have run by then.
        module: FQN of the module that runs.
        live: role -> bytes.
    """

    phase: Literal["forward", "backward", "update"]
    fraction: float
    module: str
    live: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the seconds and bytes of an `Estimate` are spent.

    Attributes:
        sections: the parts of the model, in execution order.
        ops: the ops of one block of each section.
        redistributions: the tensors whose layout changes between ops.
        parameters: the parameters' shapes and stored bytes.
        held: role -> bytes that are allocated during the whole step.
        memory: live bytes over the phases of a micro-batch, in the order in which they run.
        stage: of a pipeline, index of the slowest stage, which all but the memory is of.
        memory_stage: of a pipeline, index of the fullest stage, which ``held`` and ``memory`` are of.
    """

    sections: tuple[SectionCost, ...] = ()
    ops: tuple[OpCost, ...] = ()
    redistributions: tuple[RedistributionCost, ...] = ()
    parameters: tuple[ParameterBytes, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    memory: tuple[MemoryPoint, ...] = ()
    stage: int | None = None
    memory_stage: int | None = None


VerificationOutcome = Literal["as-planned", "not-run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of running a plan on fake processes before it was given (`planner.verification`).

    Attributes:
        outcome: "as-planned": the collectives of a step that ran are those of the plan. "not-run": it was not run.
        kinds: kinds of collectives (by phase, axis and size) that ran as planned.
        reason: why the plan was not run; None where it was.
    """

    outcome: VerificationOutcome
    kinds: int = 0
    reason: str | None = None
