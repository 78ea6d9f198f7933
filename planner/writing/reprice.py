"""Pricing of an existing plan: its model is traced, its entries are read as a decision, and the decision is priced."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from cost_model import ClusterSpec
from planner.errors import JobError, PlanMismatchError
from planner.formulation.decision import Decision, decision_from_plan
from planner.formulation.estimate import estimate
from planner.formulation.formulate import Formulator
from planner.formulation.host_time import with_host_time_of_local_modules
from planner.graph.example_inputs import GivenInputs, batch_size_of
from planner.graph.trace_module import ModuleNames, resolve_inputs, trace_at_batch, with_fused_projections
from planner.graph.uneven_lengths import with_rounded_lengths
from planner.liveness.structure import Structure
from planner.plan.checks import check_mesh
from planner.plan.fingerprint import model_fingerprint
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.regions.block_grouping import Grouping
from planner.run.attention_kernel import check_kernel
from planner.run.model_analysis import ModelAnalysis
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.writing.block_grouping import plan_groupings
from planner.writing.breakdown import breakdown
from planner.writing.fqn_entries import decision_entries
from planner.writing.loss import NO_LOSS_NOTE, returns_no_loss
from planner.writing.notes import fused_ops_note, with_reallgather_note, without_fused_ops_note
from planner.writing.techniques import without_gains
from planner.writing.token_order import check_token_order, zigzag_order


def estimate_plan(
    model: nn.Module, plan: ShardingPlan, *, example_inputs: GivenInputs = None, cluster: ClusterSpec | None = None
) -> ShardingPlan:
    """Return ``plan`` with a new estimate, from its entries alone, on its own cluster or another of the same size.

    Raises:
        PlanMismatchError: the plan is for another model, or the model cannot run in its layouts.
        MeshError: the plan's mesh is not the whole cluster.
        JobError: see `open_for_pricing`.
    """
    context = open_for_pricing(model, plan, example_inputs=example_inputs, cluster=cluster)
    plan_contents = context.plan_contents
    with context.clock.stage("costs_s"):
        priced = estimate(plan_contents.formulator, plan_contents.structure, plan_contents.decision)
        modules, device = ModuleNames.from_module(model).modules, plan_contents.run.cluster.device
        priced = with_host_time_of_local_modules(priced, plan_contents.structure, plan, modules, device)
        by_parts = breakdown(plan_contents.formulator, plan_contents.structure, plan_contents.decision, modules)
    timings = dict(context.clock.spent)
    notes = dict.fromkeys(without_fused_ops_note(plan.notes))
    if plan.job.training and context.returns_no_loss:
        notes[NO_LOSS_NOTE] = None
    if plan.job.fused_ops:
        notes[fused_ops_note(context.search.model.graph)] = None
    where = plan_contents.run.cluster.to_dict()
    plan_notes = with_reallgather_note(notes, plan.input_plan, plan.job)
    techniques = plan.techniques if where == plan.cluster else without_gains(plan.techniques)
    return dataclasses.replace(
        plan,
        estimate=priced,
        breakdown=by_parts,
        cluster=where,
        timings=timings,
        notes=plan_notes,
        techniques=techniques,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The run and the decision that a plan states, with the formulator and the structure of the run."""

    run: Run
    formulator: Formulator
    structure: Structure
    decision: Decision


def read_plan(search: RunPlanner, plan: ShardingPlan, names: ModuleNames) -> ReadPlan:
    """Return the run and the decision that ``plan`` states.

    The blocks have the coarsest grouping from which the same plan would be written. For a plan that shardplan wrote, it
    is the grouping of its search.

    Args:
        search: the planner of runs for the model, the plan's job and the cluster.
        names: FQNs of the model's parameters and modules.

    Raises:
        PlanMismatchError: the model cannot run in the plan's layouts.
        PlanKeyError: a key matches nothing, or two keys disagree.
    """
    document = json.loads(plan.to_json())
    *coarser, finest = plan_groupings(plan, search.model.blocks, names)
    for grouping in coarser:
        try:
            plan_contents = _read(search, plan, names, grouping)
        except PlanMismatchError:
            continue
        rewritten = dataclasses.replace(
            plan, **decision_entries(plan_contents.structure, plan_contents.decision, names).by_field()
        )
        if json.loads(rewritten.to_json()) == document:
            return plan_contents
    return _read(search, plan, names, finest)


def _read(search: RunPlanner, plan: ShardingPlan, names: ModuleNames, grouping: Grouping) -> ReadPlan:
    batch_axes = search.batch_axes(plan.mesh.spec)
    if batch_axes:
        try:
            return _read_on(search, plan, names, grouping, batch_axes)
        except PlanMismatchError:
            pass  # a plan that was written by hand may split more than the batch on these axes
    return _read_on(search, plan, names, grouping, ())


def _read_on(
    search: RunPlanner, plan: ShardingPlan, names: ModuleNames, grouping: Grouping, batch_axes: tuple[int, ...]
) -> ReadPlan:
    run = Run(
        job=plan.job,
        cluster=search.cluster,
        mesh=plan.mesh.spec,
        micro_batches=plan.micro_batches,
        ac=plan.job.ac or "none",
        grouping=grouping,
        batch_axes=batch_axes,
    )
    formulator, structure = search.formulator(run)
    with search.clock.stage("costs_s"):
        decision = decision_from_plan(structure, formulator, plan, names)
    reordering = search.model.reordering
    check_token_order(plan, zigzag_order(reordering, structure, decision, run, names), reordering)
    return ReadPlan(run=run, formulator=formulator, structure=structure, decision=decision)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricingContext:
    """Everything that prices a plan and variants of it.

    Attributes:
        search: the planner of runs, with the traced model.
        plan_contents: the run and the decision that the plan states.
        clock: the seconds spent in each stage.
        returns_no_loss: whether the model's forward returns no loss.
    """

    search: RunPlanner
    plan_contents: ReadPlan
    clock: Clock
    returns_no_loss: bool


def open_for_pricing(
    model: nn.Module, plan: ShardingPlan, *, example_inputs: GivenInputs = None, cluster: ClusterSpec | None = None
) -> PricingContext:
    """Return what prices ``plan`` for ``model``, on its own cluster or another of the same size.

    Raises:
        PlanMismatchError: the plan is for another model, or the model cannot run in its layouts.
        MeshError: the plan's mesh is not the whole cluster.
        JobError: there is no cluster, or the plan's attention kernel does not run on the cluster or with the model.
        ModelError: the plan has fused projections, and the model has none that can be fused.
    """
    plan.check_priced()
    if plan.job.fused_projections:
        model = with_fused_projections(model)
    fingerprint = plan.fingerprint.get("model")
    if fingerprint is not None and fingerprint != model_fingerprint(model):
        raise PlanMismatchError(
            "the plan was made for another model.",
            subject="model",
            expected=fingerprint,
            found=model_fingerprint(model),
            what_to_do="Plan this model, or name the one that the plan is for.",
        )
    if cluster is None and not plan.cluster:
        raise JobError("the plan names no cluster to price it on.", what_to_do="Give one: --cluster 2x8xh100-sxm-80gb.")
    cluster = cluster or ClusterSpec.from_dict(plan.cluster)
    check_mesh(plan.mesh.spec, cluster)
    inputs = resolve_inputs(model, example_inputs, batch=plan.job.batch, seq=plan.job.seq, phase=plan.job.phase)
    batch = plan.job.batch or batch_size_of(inputs)
    clock = Clock()
    flash = cluster.device.flash_attention if plan.job.flash_attention is None else plan.job.flash_attention
    with clock.stage("trace_s"):
        micro_batch = batch // plan.micro_batches
        module = trace_at_batch(
            model,
            inputs,
            micro_batch,
            plan.job.dtype,
            plan.job.phase,
            fused_ops=plan.job.fused_ops,
            opaque_modules=plan.opaque_modules,
            seq=plan.job.seq,
        )
    check_kernel(plan.job, cluster.device, module.graph)
    # A plan written by hand may re-all-gather an input although its job does not ask for it.
    job = dataclasses.replace(plan.job, reallgather=plan.job.reallgather or plan.reallgathers)
    plan = dataclasses.replace(plan, job=job)
    model_traced = ModelAnalysis.from_module(
        with_rounded_lengths(module, cluster),
        flash_attention=flash,
        seq=plan.job.seq,
        compiles=cluster.device.compiles,
        zigzag=plan.zigzag is not None or plan.job.zigzag,
    )
    search = RunPlanner(model_traced, plan.job, cluster, batch, clock)
    plan_contents = read_plan(search, plan, ModuleNames.from_module(model))
    return PricingContext(
        search=search, plan_contents=plan_contents, clock=clock, returns_no_loss=returns_no_loss(model_traced)
    )
