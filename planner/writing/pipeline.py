"""A planned pipeline as entries of a plan: layouts of all stages by FQN, the stages, and the cost of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cost_model.layouts.layout import MeshSpec, format_layout
from planner.graph.trace_module import ModuleNames, TracedModule
from planner.plan.estimate import Breakdown, Estimate, Pipeline, PipelineStage
from planner.plan.job import CheckpointingMode
from planner.regions.regions import block_of
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.search.pipeline.interleaving import placed_in_model
from planner.search.pipeline.stage_planners import (
    PipelineRun,
    PlannedPipeline,
    StagePlanners,
    is_boundary_path,
    listed_blocks,
    stage_counts,
)
from planner.search.pipeline.step_time import StageKind, pass_s
from planner.writing.breakdown import breakdown
from planner.writing.fqn_entries import NamedEntries, PlanEntries, fold_names, named_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEntries:
    """The entries of a plan for a pipeline.

    Attributes:
        mesh: the mesh of all stages together.
        modes: FQN pattern of blocks -> checkpointing mode.
        estimate: the estimate of a device of the slowest stage. Its step time is that of the pipeline. Its memory is
            that of the stage with the highest peak, and its optimizer seconds are the most of any stage.
    """

    mesh: MeshSpec
    entries: PlanEntries
    modes: Mapping[str, CheckpointingMode]
    pipeline: Pipeline
    estimate: Estimate


def pipeline_entries(pipeline_plan: PlannedPipeline, blocks: Sequence[str], module: ModuleNames) -> PipelineEntries:
    """Return ``pipeline_plan`` as entries of a plan.

    Args:
        blocks: FQNs of the whole model's blocks, in order.
        module: the names of the whole model.
    """
    entries, modes = NamedEntries(), dict[str, CheckpointingMode]()
    stage_modules: list[tuple[str, ...]] = [()] * len(pipeline_plan.pipeline.blocks_per_stage)
    for kind, candidate in pipeline_plan.kinds:
        stage_entries = named_entries(candidate.structure, candidate.decision)
        for ports in (stage_entries.inputs, stage_entries.outputs):
            ports[""] = {path: port for path, port in ports.get("", {}).items() if not is_boundary_path(path)}
            if not ports[""]:
                del ports[""]
        for index in kind.indices:
            rename = _renaming(kind, index, pipeline_plan.pipeline, blocks)
            own = stage_entries.renamed(rename)
            entries.update(own)
            modes |= {rename(block): mode for block, mode in candidate.run.grouping.modes}
            stage_modules[index] = _modules(own.stored, module)
    estimate, idle_s = _estimate(pipeline_plan)
    passes, chunks = pipeline_plan.pipeline.passes, pipeline_plan.pipeline.chunks
    stages = tuple(
        PipelineStage(
            modules=modules,
            micro_batch_s=pass_s(stage.estimate, passes),
            peak_memory_bytes=stage.estimate.peak_memory_bytes,
        )
        for modules, stage in zip(stage_modules, pipeline_plan.stages(), strict=True)
    )
    return PipelineEntries(
        mesh=pipeline_plan.pipeline.whole_mesh,
        entries=entries.folded(module),
        modes=fold_names(modes, module.modules),
        pipeline=Pipeline(
            schedule="1f1b" if chunks == 1 else "interleaved",
            layout=format_layout(pipeline_plan.boundary),
            idle_s=idle_s,
            stages=stages,
            chunks=chunks,
        ),
        estimate=estimate,
    )


def pipeline_breakdown(planner: RunPlanner, module: TracedModule, pipeline_plan: PlannedPipeline) -> Breakdown:
    """Return where the seconds of the slowest stage of a pipeline are spent, and the bytes of the fullest.

    Args:
        planner: the planner of the whole model.
        module: the whole model.
    """
    pipeline, stages = pipeline_plan.pipeline, pipeline_plan.stages()
    planners, blocks = StagePlanners(planner), listed_blocks(planner)

    def of_stage(stage: Candidate) -> Breakdown:
        index = next(number for number, other in enumerate(stages) if other is stage)
        kind = next(kind for kind, _ in pipeline_plan.kinds if index in kind.indices)
        formulator, structure = planners.planner(kind, len(stages)).formulator(stage.run)
        rename = _renaming(kind, index, pipeline, blocks)
        by_parts = breakdown(formulator, structure, stage.decision, module.names.modules, rename)
        return dataclasses.replace(by_parts, stage=index)

    slowest, fullest = _slowest(stages), _fullest(stages)
    by_parts = of_stage(slowest)
    bytes_by_parts = by_parts if fullest is slowest else of_stage(fullest)
    return dataclasses.replace(
        by_parts, held=bytes_by_parts.held, memory=bytes_by_parts.memory, memory_stage=bytes_by_parts.stage
    )


def _renaming(kind: StageKind, index: int, pipeline: PipelineRun, blocks: Sequence[str]) -> Callable[[str], str]:
    """Return a function from FQNs of the stage that was planned for ``kind`` to FQNs of stage ``index``."""
    counts, which = stage_counts(kind, len(blocks))
    planned = (number for part in which for number in range(sum(counts[:part]), sum(counts[: part + 1])))
    placed = placed_in_model(pipeline.blocks_per_stage, pipeline.chunks, index)
    own = {blocks[number]: blocks[own_number] for number, own_number in zip(planned, placed, strict=True)}

    def rename(name: str) -> str:
        block = block_of(name)
        return own[block] + name[len(block) :] if block in own else name

    return rename


def _modules(parameters: Mapping[str, object], module: ModuleNames) -> tuple[str, ...]:
    """Return FQN patterns of the blocks that have these parameters, and of modules that have them outside of blocks."""
    owners = {name: block_of(name) or name.rpartition(".")[0] for name in module.parameters if name in parameters}
    return tuple(dict.fromkeys(fold_names(dict.fromkeys(owners.values()), module.modules)))


def _estimate(pipeline_plan: PlannedPipeline) -> tuple[Estimate, float]:
    """Return the estimate of a step, and the seconds that a device of the slowest stage waits for other stages."""
    stages, micro_batches = pipeline_plan.stages(), pipeline_plan.pipeline.micro_batches
    slowest = _slowest(stages)
    share = micro_batches / slowest.run.passes
    own = slowest.estimate
    fullest = _fullest(stages).estimate
    optimizer_s = max(stage.estimate.optimizer_s for stage in stages)
    busy_s = share * (own.step_time_s - own.optimizer_s) + optimizer_s
    estimate = dataclasses.replace(
        own,
        step_time_s=pipeline_plan.step_time_s,
        forward_s=share * own.forward_s,
        backward_s=share * own.backward_s,
        grad_reduce_s=share * own.grad_reduce_s,
        optimizer_s=optimizer_s,
        compute_s=share * own.compute_s,
        exposed_communication_s=max(busy_s - share * own.compute_s - optimizer_s, 0.0),
        model_flops=_known_sum([stage.estimate.model_flops for stage in stages]),
        host_s=max((stage.estimate.host_s for stage in stages if stage.estimate.host_s is not None), default=None),
        peak_memory_bytes=fullest.peak_memory_bytes,
        memory=fullest.memory,
    )
    return estimate, pipeline_plan.step_time_s - busy_s


def _slowest(stages: Sequence[Candidate]) -> Candidate:
    """Return the stage that takes longest for a micro-batch."""
    return max(stages, key=lambda stage: pass_s(stage.estimate, stage.run.passes))


def _fullest(stages: Sequence[Candidate]) -> Candidate:
    """Return the stage with the highest peak of memory."""
    return max(stages, key=lambda stage: stage.estimate.peak_memory_bytes)


def _known_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum of ``values``; None where one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
