"""`PlanningSession`: a model that is traced once and planned any number of times on one cluster.

module --trace--> OpGraph --regions--> RegionGraph --strategies, prices--> Problem --ilp--> Assignment --> ShardingPlan
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError, MeshError, PlannerError, SolverError
from planner.graph.example_inputs import GivenInputs, batch_size_of
from planner.graph.trace_module import (
    TracedModule,
    check_traced_for,
    micro_batch_counts,
    resolve_inputs,
    trace_at_batch,
)
from planner.merged_axes import with_merged_axes
from planner.model_rewrites.fuse_projections import styles_with_fused
from planner.plan.checks import check_mesh
from planner.plan.estimate import BaselinePrice, SolverReport
from planner.plan.job import Checkpointing, job_of
from planner.plan.job_spec import JobOptions, JobSpec, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.progress import PRICING_BASELINES, TRACING, Progress
from planner.run import baselines, gc_pause
from planner.run.attention_kernel import check_kernel
from planner.run.baselines import Restriction
from planner.run.model_analysis import ModelAnalysis
from planner.run.pins import NO_PINS, Pins
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.run.stage_clock import Clock
from planner.search.baseline_search import PricedBaseline, baseline_space, search_baselines, search_even_meshes
from planner.search.branch_and_bound import SearchResult, SearchSpec
from planner.search.choice import Choice
from planner.search.infeasibility import infeasibility_report, least_memory_run
from planner.search.mesh_space import modes_of
from planner.search.pipeline.co_search import search_meshes, search_meshes_and_pipelines, search_pipelines
from planner.search.pipeline.mesh_argument import check_no_pipeline_axis, given_stages, no_pipeline
from planner.search.pipeline.split_graph import obstacle
from planner.search.pipeline.stage_planners import PlannedPipeline, stage_clusters_of
from planner.search.planner_space import PlannerSpace
from planner.search.task_pool import Pool, checked_jobs, start_workers
from planner.search.worker_context import RunKey, SearchConstraints, WorkerContext
from planner.writing.axis_names import fastest_by_role
from planner.writing.named_plan import named_plan
from planner.writing.notes import notes_on
from planner.writing.simplest import Fastest, choice_report, simplest_plan
from planner.writing.techniques import used_techniques
from planner.writing.write import solver_report

_AFTERWARDS_S = 5.0
"""Seconds for the baselines, and for merging axes, where the search for the fastest plan has a time limit."""


class PlanningSession:
    """A model that is traced once, and planned by any planners, on any meshes and within any memory caps.

    Attributes:
        spec: the job as the user states it.
        job: the job as plans record it.
        cluster: the devices and links that plans are for.
        module: the module; None: the session got its traced graph alone.
        inputs: arguments of one call with the global batch; empty without a module.
        progress: called with each event; None: events are dropped.
        last_choice: the choice of the last `plan` with a tolerance, with the plans that it was made among; None: there
            was none.
    """

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
            check_traced_for(model, self._batch, self._counts, self.job)
            self._module = model
        else:
            if progress is not None:
                progress(TRACING)
            micro_batch = self._batch // self._counts[0] if len(self._counts) == 1 else None
            with gc_pause.paused(), self._clock.stage("trace_s"):
                self._module = trace_at_batch(
                    model,
                    inputs,
                    micro_batch,
                    self.job.dtype,
                    spec.phase,
                    fused_ops=spec.fused_ops,
                    fused_projections=spec.fused_projections,
                )
        check_kernel(self.job, self.cluster.device, self._module.graph)
        if tp_plan is not None and spec.fused_projections:
            tp_plan = styles_with_fused(tp_plan)
        self._tp_plan = self._module.tp_plan if tp_plan is None else tp_plan
        self._analysis = ModelAnalysis.from_module(
            self._module,
            flash_attention=flash,
            seq=spec.seq,
            compiles=self.cluster.device.compiles,
            zigzag=self.job.zigzag,
        )
        self._planner = RunPlanner(self._analysis, self.job, self.cluster, self._batch, self._clock)
        self._context = WorkerContext(self._planner)
        self._pool = Pool(self._context, spec.jobs)
        self.last_choice: Choice[Fastest] | None = None
        self._space = PlannerSpace(axes=spec.axes, batch=self._batch, counts=self._counts)

    def plan(
        self,
        *,
        planner: str = "ilp",
        mesh: str | MeshSpec | None = None,
        memory_bytes: int | None = None,
        tolerance: float | None = None,
    ) -> ShardingPlan:
        """Return the fastest plan that a planner allows, or a simpler one that costs about the same.

        Args:
            planner: "ilp", a baseline's name or "random:SEED".
            mesh: the mesh. An outermost axis ``pp`` gives the number of pipeline stages, and the other axes are the
                mesh of a stage. None: all meshes with up to ``axes`` axes are tried.
            memory_bytes: cap on the peak per device; None: the job's cap.
            tolerance: relative step time that a simpler plan may cost more (`planner.search.choice`). The plan then has
                the prices of the baselines as well. None: the fastest plan, without baselines. Only for "ilp".

        Raises:
            PlannerError: there is no plan. `InfeasibleError`: no plan fits the memory.
        """
        plan = self.plan_if_any(planner=planner, mesh=mesh, memory_bytes=memory_bytes, tolerance=tolerance)
        if plan is None and self._stages(mesh, planner) is not None:
            raise no_pipeline(str(mesh), memory_bytes or self._memory_bytes)
        if plan is None:
            raise self._infeasibility(self._meshes(mesh, planner), planner, memory_bytes or self._memory_bytes)
        return plan

    def plan_if_any(
        self,
        *,
        planner: str = "ilp",
        mesh: str | MeshSpec | None = None,
        memory_bytes: int | None = None,
        tolerance: float | None = None,
        excluded: frozenset[RunKey] = frozenset(),
        keep_names: bool = True,
    ) -> ShardingPlan | None:
        """Return the result of `plan`, or None where no plan fits.

        The infeasibility report, which takes time, is not computed.

        Args:
            planner: as for `plan`.
            mesh: as for `plan`.
            memory_bytes: as for `plan`.
            tolerance: as for `plan`.
            excluded: runs that are left out.
            keep_names: whether the axes of a given ``mesh`` keep their names; otherwise they are named by role, as
                those of a mesh that the search chose. With pins or data axes all axes keep their names.
        """
        name, seed = baselines.parse_planner(planner)
        keep_names = (keep_names and mesh is not None) or bool(self.job.pins or self.job.data_axes)
        with gc_pause.paused():
            stages = self._stages(mesh, planner)
            meshes = self._meshes(mesh, planner) if stages is None else [stages[1]]
            memory_bytes = memory_bytes or self._memory_bytes
            if seed is not None:
                candidate, report = self._random(meshes[-1], seed), SolverReport(name=planner, status="given")
                return self._written(candidate, memory_bytes, report, keep_names=keep_names)
            restrict = self._restrict(name, self._pins(meshes))
            constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=restrict, excluded=excluded)
            whole, pipelined = self._run_searches(meshes, name, constraints, stages, mesh_is_given=mesh is not None)
            plans = [result.plan for result in (pipelined, whole) if result is not None]
            fastest: Fastest | None = next((plan for plan in plans if plan is not None), None)
            if fastest is None:
                if pipelined is not None and not pipelined.complete:
                    raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
                return None
            report = solver_report(whole, pipelined, planner)
            if name != "ilp" or tolerance is None:
                return self._written(fastest, memory_bytes, report, keep_names=keep_names)
            given = meshes[0] if mesh is not None else None
            return self._chosen(fastest, constraints, report, tolerance, given, keep_names=keep_names)

    def _chosen(
        self,
        fastest: Fastest,
        constraints: SearchConstraints,
        report: SolverReport,
        tolerance: float,
        mesh: MeshSpec | None,
        *,
        keep_names: bool,
    ) -> ShardingPlan:
        """Return the simplest plan within ``tolerance`` of the fastest, with the prices of the baselines.

        Args:
            mesh: the user's mesh; None: the search chose it.
        """
        priced = self._priced(constraints)
        is_free = not (self.job.pins or self.job.data_axes)  # baselines keep no pins
        contenders, cap = (priced, constraints.memory_bytes) if is_free else ((), None)
        self.last_choice = simplest_plan(self._planner, fastest, contenders, tolerance, mesh, cap)
        report = choice_report(report, fastest, self.last_choice)
        plan = self.last_choice.contender.plan
        if plan is fastest and isinstance(plan, Candidate) and mesh is None and is_free:
            plan, report = with_merged_axes(
                self._planner,
                self._module,
                plan,
                constraints,
                report,
                tolerance=tolerance,
                deadline=self._deadline(_AFTERWARDS_S),
            )
        elif plan is not fastest and isinstance(fastest, Candidate) and not keep_names:
            report = fastest_by_role(self._planner, self._module, report, fastest)
        written = self._written(plan, constraints.memory_bytes, report, keep_names=keep_names)
        return dataclasses.replace(written, baselines=tuple(baseline.price for baseline in priced))

    def priced_baselines(self, *, memory_bytes: int | None = None) -> tuple[BaselinePrice, ...]:
        """Return the prices of the plans that people launch (DDP, FSDP, HSDP, FSDP with TP), each at its best.

        In inference these are replicas and tensor parallelism. A baseline that does not fit has its least memory.

        Args:
            memory_bytes: cap on the peak per device; None: the job's cap.
        """
        constraints = SearchConstraints(memory_bytes=memory_bytes or self._memory_bytes, restrict=lambda mesh: None)
        with gc_pause.paused():
            return tuple(baseline.price for baseline in self._priced(constraints))

    def _priced(self, constraints: SearchConstraints) -> tuple[PricedBaseline, ...]:
        """Return the baselines under ``constraints``, whose restriction does not apply to them."""
        if self.progress is not None:
            self.progress(PRICING_BASELINES)
        spec = self._search_spec("baselines", self._counts, constraints, self._deadline(_AFTERWARDS_S))
        return search_baselines(spec, self.cluster, lambda name: self._restrict(name, NO_PINS))

    def _written(self, plan: Fastest, memory_bytes: int, report: SolverReport, *, keep_names: bool) -> ShardingPlan:
        """Return the `ShardingPlan` of a plan of the search."""
        with self._clock.stage("write_s"):
            written = named_plan(
                self._planner,
                self._module,
                plan,
                memory_bytes=memory_bytes,
                report=report,
                notes_on=self._notes,
                keep_names=keep_names,
            )
        first = plan.stages()[0] if isinstance(plan, PlannedPipeline) else plan
        techniques = used_techniques(self.spec.listed_techniques, written, self._module.graph, first)
        return dataclasses.replace(written, techniques=techniques, timings=dict(self._clock.spent))

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
        return given_stages(spec, planner, self._no_pipeline_reason, clusters, samples)

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

    def _random(self, mesh: MeshSpec, seed: int) -> Candidate:
        """Return a random assignment on a mesh.

        Raises:
            MeshError: no feasible assignment was found.
        """
        restriction, mode = self._pins([mesh]).restrict(mesh, None), modes_of(self._analysis, self.job.ac)[0]
        candidate = self._planner.random(self._planner.run_of(mesh, self._counts[0], mode), seed, restriction)
        if candidate is None:
            raise MeshError("no random assignment was found.", what_to_do="Choose another mesh, batch or seed.")
        return candidate

    def _run_searches(
        self,
        meshes: Sequence[MeshSpec],
        name: str,
        constraints: SearchConstraints,
        stages: tuple[int, MeshSpec] | None,
        *,
        mesh_is_given: bool,
    ) -> tuple[SearchResult[Candidate] | None, SearchResult[PlannedPipeline] | None]:
        """Return the results of the search without pipeline stages and of the search with them; None: not searched.

        At most the search with the faster plan returns a plan.

        Args:
            meshes: the meshes to choose from.
            name: name of the planner.
            constraints: memory cap, and restriction of the strategies.
            stages: number of stages and mesh of one stage, if the user's mesh has an axis ``pp``. Only pipelines are
                searched then. None: the mesh has none, or no mesh was given.
            mesh_is_given: whether the user gave the mesh. No pipeline is then searched, unless ``stages`` is given.
        """
        counts = self._space.counts_for(name, self.cluster)
        spec = self._search_spec(name, counts, constraints, self._deadline(self.spec.time_limit_s))
        space = baseline_space(name, self.cluster) if name in baselines.LAUNCHED and not mesh_is_given else None
        if space is not None:
            return search_even_meshes(spec, space.counts(self._batch, self._counts)), None
        heterogeneous = self.spec.heterogeneous_blocks and name == "ilp"
        if stages is not None:
            return None, search_pipelines(spec, axes=self.spec.axes, only=stages)
        if name != "ilp" or mesh_is_given or self._no_pipeline_reason is not None:
            return search_meshes(spec, meshes, heterogeneous_blocks=heterogeneous), None
        return search_meshes_and_pipelines(spec, meshes, axes=self.spec.axes, heterogeneous_blocks=heterogeneous)

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

        def restrict(mesh: MeshSpec) -> Restriction | None:
            return pins.restrict(mesh, baselines.restriction_of(name, mesh, self._tp_plan, self._analysis.graph))

        return restrict if name in baselines.NAMES else pins.on

    def _infeasibility(self, meshes: Sequence[MeshSpec], name: str, memory_bytes: int) -> PlannerError:
        """Return the error for a planner without a plan: the least memory needed, or the pins that no layout keeps."""
        pins, counts, modes = (
            self._pins(meshes),
            self._space.counts_for(name, self.cluster),
            modes_of(self._analysis, self.job.ac),
        )
        constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=self._restrict(name, pins))
        with gc_pause.paused():
            report = infeasibility_report(
                self._planner, meshes, counts, modes, constraints, lambda other: self._space.on(name, other)
            )
        if report.least_bytes is None and pins:
            return MeshError(
                f"no layout on these meshes keeps the pins: {pins}.",
                what_to_do="Choose another mesh, or pins that its axes divide and that the ops can run in.",
            )
        return report

    def least_memory_bytes(self, *, mesh: str | MeshSpec | None = None) -> int | None:
        """Return the least peak memory per device of any plan, in bytes; None where the meshes allow no layout."""
        meshes = self._meshes(mesh, "ilp")
        modes = modes_of(self._analysis, self.job.ac)
        with gc_pause.paused():
            restrict = self._restrict("ilp", self._pins(meshes))
            least = least_memory_run(self._planner, meshes, self._counts, modes, restrict)
        return None if least is None else math.ceil(least.nbytes)
