"""`TracedJob`: a model that is traced for a job on a cluster, and what planners may choose from."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, Unpack

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError, ModelError
from planner.formulation.host_time import with_host_time_of_local_modules
from planner.graph.example_inputs import GivenInputs, batch_size_of
from planner.graph.trace_module import (
    TracedModule,
    check_traced_for,
    micro_batch_counts,
    resolve_inputs,
    trace_at_batch,
)
from planner.graph.uneven_lengths import with_rounded_lengths
from planner.model_rewrites.fuse_projections import styles_with_fused
from planner.plan.checks import check_mesh
from planner.plan.job import Checkpointing, job_of
from planner.plan.job_spec import JobOptions, JobSpec, spec_of
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.progress import TRACING, Progress
from planner.run import baselines, gc_pause
from planner.run.attention_kernel import check_kernel
from planner.run.baselines import Restriction
from planner.run.model_analysis import ModelAnalysis
from planner.run.pins import Pins
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.run.unsupported_ops import unsupported_ops
from planner.search.branch_and_bound import SearchSpec
from planner.search.mesh_space import modes_of
from planner.search.pipeline.mesh_argument import check_no_pipeline_axis, given_stages
from planner.search.pipeline.split_graph import obstacle
from planner.search.pipeline.stage_planners import stage_clusters_of
from planner.search.planner_space import PlannerSpace
from planner.search.task_pool import Pool, checked_jobs, start_workers
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.strategies.local_ops import opaque_splits
from planner.writing.notes import notes_on


class TracedJob:
    """A model that is traced once for a job, with the meshes, pins and numbers of micro-batches to choose from.

    Attributes:
        spec: the job as the user states it.
        job: the job as plans record it.
        cluster: the devices and links that plans are for.
        module: the module; None: the job got its traced graph alone.
        inputs: arguments of one call with the global batch; empty without a module.
        progress: called with each event; None: events are dropped.
    """

    @gc_pause.paused()
    def __init__(
        self,
        model: nn.Module | TracedModule,
        *,
        spec: JobSpec | None = None,
        example_inputs: GivenInputs = None,
        tp_plan: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        **options: Unpack[JobOptions],
    ) -> None:
        """Trace ``model`` for a job.

        Args:
            model: as for `build_plan`.
            spec: the job. Its planner and mesh are ignored: `plan` takes them as arguments. None: ``options`` give it.
            example_inputs: as for `build_plan`.
            tp_plan: as for `build_plan`.
            progress: as for `build_plan`.
            options: the fields of `JobSpec`, in place of ``spec``.

        Raises:
            TypeError: both ``spec`` and ``options`` are given.
            PlannerError: the job cannot be planned.
        """
        if spec is not None and options:
            raise TypeError(f"spec and {', '.join(options)} are given: give either spec or the fields of a spec.")
        self.spec = spec = spec_of(options) if spec is None else spec
        self.module = None if isinstance(model, TracedModule) else model
        if spec.is_auto:
            advice = "Name techniques; build_plan takes auto, and its plan says which it chose."
            raise JobError("a session has one list of techniques, not auto.", what_to_do=advice, field="techniques")
        start_workers(checked_jobs(spec.jobs))
        self.progress = progress
        self.cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
        self.inputs = inputs = resolve_inputs(model, example_inputs, batch=spec.batch, seq=spec.seq, phase=spec.phase)
        self._batch = spec.batch or (model.samples if isinstance(model, TracedModule) else batch_size_of(inputs))
        flash = self.cluster.device.flash_attention
        self.job = job_of(spec, batch=self._batch, flash_attention=flash)
        self._memory_bytes = self.job.cap_bytes(self.cluster.memory_bytes)
        self._counts = micro_batch_counts(self._batch, self.job.micro_batches)
        self._clock = Clock()
        if isinstance(model, TracedModule):
            if spec.opaque_modules and not opaque_splits(model.graph):
                advice = "Name them for trace_module, or give the module in place of the TracedModule."
                raise JobError("the graph has no opaque modules.", what_to_do=advice, field="opaque_modules")
            check_traced_for(model, self._batch, self._counts, self.job)
            self._module = model
        else:
            if progress is not None:
                progress(TRACING)
            self._module = self._traced(model, spec.opaque_modules)
        check_kernel(self.job, self.cluster.device, self._module.graph)
        if tp_plan is not None and spec.fused_projections:
            tp_plan = styles_with_fused(tp_plan)
        self._tp_plan = self._module.tp_plan if tp_plan is None else tp_plan
        self._planner = self._run_planner(flash)
        self._make_unsupported_opaque(flash)
        self._analysis = self._planner.model
        self._context = WorkerContext(self._planner)
        self._pool = Pool(self._context, spec.jobs)
        self._space = PlannerSpace(axes=spec.axes, batch=self._batch, counts=self._counts)

    def _make_unsupported_opaque(self, flash_attention: bool) -> None:
        """Make modules opaque that have ops which DTensor does not run, not even on whole tensors.

        With one of them opaque, another may be found: in equal regions, or behind it.
        """
        opaque = dict.fromkeys(self.spec.opaque_modules, "")
        while (found := unsupported_ops(self._planner.model.base, self._planner.table)) is not None:
            patterns = {
                module: f"DTensor does not run {op}" for op, module, _ in reversed(found.ops) if module not in opaque
            }
            if self.module is None or not patterns:
                return
            opaque |= patterns
            try:
                module = self._traced(self.module, opaque)
            except ModelError:
                return
            self._module = module
            self._planner = self._run_planner(flash_attention)

    def with_local_modules(self, plan: ShardingPlan, local_modules: Mapping[str, str]) -> ShardingPlan:
        """Return ``plan`` with modules that run on local tensors, and the host's time with them."""
        plan = dataclasses.replace(plan, local_modules=local_modules)
        if plan.estimate is None or not local_modules:
            return plan
        structure = self._analysis.structure(self._batch // plan.micro_batches)
        modules, device = self._module.names.modules, self.cluster.device
        estimate = with_host_time_of_local_modules(plan.estimate, structure, plan, modules, device)
        return dataclasses.replace(plan, estimate=estimate)

    def _traced(self, model: nn.Module, opaque_modules: Sequence[str] | Mapping[str, str]) -> TracedModule:
        """Return ``model`` traced for the job, whose numbers of micro-batches are then those that the graph serves."""
        largest = self._batch // self._counts[0]
        with self._clock.stage("trace_s"):
            traced = trace_at_batch(
                model,
                self.inputs,
                largest if len(self._counts) == 1 else None,
                self.job.dtype,
                self.spec.phase,
                largest=largest,
                fused_ops=self.spec.fused_ops,
                fused_projections=self.spec.fused_projections,
                opaque_modules=opaque_modules,
                seq=self.spec.seq,
            )
        if not traced.any_batch:
            self._counts = self._counts[:1]
        return traced

    def _run_planner(self, flash_attention: bool) -> RunPlanner:
        analysis = ModelAnalysis.from_module(
            with_rounded_lengths(self._module, self.cluster),
            flash_attention=flash_attention,
            seq=self.spec.seq,
            compiles=self.cluster.device.compiles,
            zigzag=self.job.zigzag,
        )
        return RunPlanner(analysis, self.job, self.cluster, self._batch, self._clock)

    def _resharding(self, after: ReshardAfter, *, searches: int) -> Self:
        """Return this job with plans all of whose FSDP groups reshard at the same time.

        Args:
            after: that time.
            searches: number of searches that share the job's time limit, of which this job's is one.
        """
        job = copy.copy(self)
        if self.spec.time_limit_s is not None:
            job.spec = dataclasses.replace(self.spec, time_limit_s=self.spec.time_limit_s / searches)
        job._planner = copy.copy(self._planner)
        job._planner.reshard_after = after
        job._context = WorkerContext(job._planner)
        job._pool = Pool(job._context, 1)
        return job

    def _meshes(self, mesh: str | MeshSpec | None, planner: str) -> list[MeshSpec]:
        """Return the given mesh alone; where ``mesh`` is None, all meshes that the planner chooses from.

        Raises:
            MeshError: the mesh has another number of devices than the cluster, or an axis ``pp``.
        """
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        if spec is None:
            return self._space.on(planner, self.cluster)[0]
        check_mesh(spec, self.cluster)
        check_no_pipeline_axis(spec)
        return [spec]

    def _stages(self, mesh: str | MeshSpec | None, planner: str) -> tuple[int, MeshSpec] | None:
        """Return the number of pipeline stages of a mesh, and the mesh of one stage; None: it has no axis ``pp``."""
        if mesh is None:
            return None
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        samples = [self._batch // count for count in self._counts]
        clusters = stage_clusters_of(self._planner) if self._no_pipeline_reason is None else {}
        return given_stages(
            spec, planner, self._no_pipeline_reason, clusters, samples, executable_only=self.spec.executable_only
        )

    def _pins(self, meshes: Sequence[MeshSpec]) -> Pins:
        """Return the job's pins, checked against the model and the meshes.

        Raises:
            PlannerError: a pin names a parameter or axis that does not exist, or a layout that its tensor cannot have.
        """
        pins = Pins.parse(self.job.pins, self.job.data_axes, self._module.names.parameters, meshes)
        if pins.pins:
            structure = self._analysis.structure(self._batch // self._counts[0])
            pins.check(structure.parameters, dict(structure.regions.graph.parameters))
        return pins

    def _notes(self, run: Run) -> list[str]:
        notes = list(notes_on(run, self._module, self._analysis, self._batch))
        if not self.spec.executable_only and self._no_pipeline_reason is not None:
            notes.append(f"no pipeline was tried: {self._no_pipeline_reason}.")
        return notes

    def _deadline(self, seconds: float | None) -> float | None:
        """Return the time of `time.perf_counter` in ``seconds``; None: the search has no time limit."""
        return None if self.spec.time_limit_s is None or seconds is None else time.perf_counter() + seconds

    def _search_spec(
        self, name: str, counts: Sequence[int], constraints: SearchConstraints, deadline: float | None
    ) -> SearchSpec:
        """Return the spec of a planner's search over the numbers of micro-batches ``counts``."""
        return SearchSpec(
            context=self._context,
            micro_batch_counts=counts,
            modes=modes_of(self._analysis, self.job.ac),
            constraints=constraints,
            pool=self._pool if name == "ilp" else self._pool.in_this_process(),
            deadline=deadline,
            progress=self.progress,
        )

    @functools.cached_property
    def _no_pipeline_reason(self) -> str | None:
        """Why no pipeline is searched; None where pipelines are searched."""
        if not self.job.training:
            return "pipeline stages are for training"
        if self.spec.executable_only:
            return "only executable plans are asked for"
        if Checkpointing.parse(self.job.ac or "none").first is not None:
            return "only the first blocks are checkpointed"
        return obstacle(self._analysis.graph, self._analysis.blocks)

    def _restrict(self, name: str, pins: Pins) -> Callable[[MeshSpec], Restriction | None]:
        """Return the function mesh -> restriction of choices by the planner and the pins; None: no restriction."""
        known: dict[MeshSpec, Restriction | None] = {}  # one object for a mesh, so that its programs can be reused

        def restrict(mesh: MeshSpec) -> Restriction | None:
            if mesh not in known:
                restriction = baselines.restriction_of(name, mesh, self._tp_plan, self._analysis.graph)
                known[mesh] = pins.restrict(mesh, restriction)
            return known[mesh]

        return restrict if name in baselines.NAMES else pins.on
