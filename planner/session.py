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
from planner.errors import MeshError, PlannerError, SolverError
from planner.graph.example_inputs import GivenInputs, batch_size_of
from planner.graph.trace_module import (
    TracedModule,
    check_traced_for,
    micro_batch_counts,
    resolve_inputs,
    trace_at_batch,
)
from planner.plan.checks import check_mesh
from planner.plan.estimate import SolverReport
from planner.plan.job import Checkpointing, job_of
from planner.plan.job_spec import JobOptions, JobSpec, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.progress import TRACING, Progress
from planner.run import baselines, gc_pause
from planner.run.attention_kernel import check_kernel
from planner.run.baselines import Restriction
from planner.run.model_analysis import ModelAnalysis
from planner.run.no_layout import no_layout_error
from planner.run.pins import Pins
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.run.stage_clock import Clock
from planner.run.unsupported_ops import unsupported_ops
from planner.search.branch_and_bound import SearchResult, SearchSpec
from planner.search.infeasibility import find_infeasible, infeasibility_report, least_memory_run
from planner.search.least_memory import EXACT, LeastMemoryResult
from planner.search.mesh_space import meshes_of, modes_of
from planner.search.pipeline.co_search import search_meshes, search_meshes_and_pipelines, search_pipelines
from planner.search.pipeline.mesh_argument import check_no_pipeline_axis, given_stages, no_pipeline
from planner.search.pipeline.split_graph import obstacle
from planner.search.pipeline.stage_planners import PlannedPipeline, stage_clusters_of
from planner.search.task_pool import Pool, checked_jobs, start_workers
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.writing.notes import notes_on
from planner.writing.write import solver_report, write_pipeline_plan, write_plan

_ONE_AXIS_PLANNERS = ("data-parallel", "fully-sharded")
"""Planners whose meshes have one axis. The size of the axis has to divide the samples of a micro-batch."""


class PlanningSession:
    """A model that is traced once, and planned by any planners, on any meshes and within any memory caps.

    Attributes:
        spec: the job as the user states it.
        job: the job as plans record it.
        cluster: the devices and links that plans are for.
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
        start_workers(checked_jobs(spec.jobs))
        self._progress = progress
        self.cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
        inputs = resolve_inputs(model, example_inputs, batch=spec.batch, seq=spec.seq, phase=spec.phase)
        self._batch = spec.batch or (model.samples if isinstance(model, TracedModule) else batch_size_of(inputs))
        flash = self.cluster.device.flash_attention
        self.job = job_of(spec, batch=self._batch, flash_attention=flash)
        self._memory_bytes = self.job.memory_bytes or self.cluster.memory_bytes
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
                    model, inputs, micro_batch, self.job.dtype, spec.phase, fused_ops=spec.fused_ops
                )
        check_kernel(self.job, self.cluster.device, self._module.graph)
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

    def plan(
        self, *, planner: str = "ilp", mesh: str | MeshSpec | None = None, memory_bytes: int | None = None
    ) -> ShardingPlan:
        """Return the fastest plan that a planner allows.

        Args:
            planner: "ilp", a baseline's name or "random:SEED".
            mesh: the mesh. An outermost axis ``pp`` gives the number of pipeline stages, and the other axes are the
                mesh of a stage. None: all meshes with up to ``axes`` axes are tried.
            memory_bytes: cap on the peak per device; None: the job's cap.

        Raises:
            PlannerError: there is no plan. `InfeasibleError`: no plan fits the memory.
        """
        started = time.perf_counter()
        plan, known = self._plan_or_least_memory(planner, mesh, memory_bytes or self._memory_bytes)
        if plan is None and self._stages(mesh, planner) is not None:
            more = self.job.micro_batches is not None and self.job.micro_batches < self._batch
            raise no_pipeline(str(mesh), memory_bytes or self._memory_bytes, more_micro_batches=more)
        if plan is None:
            meshes = self._meshes(mesh, planner)
            raise self._infeasibility(meshes, planner, memory_bytes or self._memory_bytes, started, known)
        return plan

    def plan_if_any(
        self, *, planner: str = "ilp", mesh: str | MeshSpec | None = None, memory_bytes: int | None = None
    ) -> ShardingPlan | None:
        """Return the result of `plan`, or None where no plan fits.

        The infeasibility report, which takes time, is not computed.
        """
        return self._plan_or_least_memory(planner, mesh, memory_bytes or self._memory_bytes)[0]

    def _plan_or_least_memory(
        self, planner: str, mesh: str | MeshSpec | None, memory_bytes: int
    ) -> tuple[ShardingPlan | None, LeastMemoryResult | None]:
        """Return the plan; or None, and what is known of the least memory, where no plan fits."""
        name, seed = baselines.parse_planner(planner)
        with gc_pause.paused():
            stages = self._stages(mesh, planner)
            meshes = self._meshes(mesh, planner) if stages is None else [stages[1]]
            if seed is not None:
                candidate, report = self._random(meshes[-1], seed), SolverReport(name=planner, status="given")
            else:
                restrict = self._restrict(name, self._pins(meshes))
                constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=restrict)
                known = self._find_infeasible(meshes, name, constraints, mesh_is_given=mesh is not None, stages=stages)
                if known is not None:
                    return None, known
                whole, pipelined = self._run_searches(meshes, name, constraints, stages, mesh_is_given=mesh is not None)
                if pipelined is not None and pipelined.plan is not None:
                    report = solver_report(whole, pipelined, planner)
                    return self._pipeline_plan(pipelined.plan, memory_bytes, report), None
                if whole is None or whole.plan is None:
                    if pipelined is not None and not pipelined.complete:
                        raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
                    return None, None
                candidate, report = whole.plan, solver_report(whole, pipelined, planner)
            with self._clock.stage("write_s"):
                notes = self._notes(candidate.run)
                plan = write_plan(self._planner, self._module, candidate, memory_bytes, report, notes)
            return dataclasses.replace(plan, timings=dict(self._clock.spent)), None

    def _find_infeasible(
        self,
        meshes: Sequence[MeshSpec],
        name: str,
        constraints: SearchConstraints,
        *,
        mesh_is_given: bool,
        stages: tuple[int, MeshSpec] | None,
    ) -> LeastMemoryResult | None:
        """Return what is known of the least memory where it is quickly proved that no plan fits; otherwise None."""
        if stages is not None:
            return None
        has_pipelines = name == "ilp" and not mesh_is_given and self._no_pipeline_reason is None
        counts, modes = self._counts_for(name), modes_of(self._analysis, self.job.ac)
        return find_infeasible(self._planner, meshes, counts, modes, constraints, has_pipelines=has_pipelines)

    def _meshes(self, mesh: str | MeshSpec | None, planner: str) -> list[MeshSpec]:
        """Return the given mesh alone; where ``mesh`` is None, all meshes that the planner chooses from.

        Raises:
            MeshError: the mesh has another number of devices than the cluster, or an axis ``pp``.
        """
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        if spec is None:
            return self._space(planner, self.cluster)[0]
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
        spec = SearchSpec(
            context=self._context,
            micro_batch_counts=self._counts_for(name),
            modes=modes_of(self._analysis, self.job.ac),
            constraints=constraints,
            pool=self._pool if name == "ilp" else self._pool.in_this_process(),
            deadline=None if self.spec.time_limit_s is None else time.perf_counter() + self.spec.time_limit_s,
            progress=self._progress,
        )
        heterogeneous = self.spec.heterogeneous_blocks and name == "ilp"
        if stages is not None:
            return None, search_pipelines(spec, axes=self.spec.axes, only=stages)
        if name != "ilp" or mesh_is_given or self._no_pipeline_reason is not None:
            return search_meshes(spec, meshes, heterogeneous_blocks=heterogeneous), None
        return search_meshes_and_pipelines(spec, meshes, axes=self.spec.axes, heterogeneous_blocks=heterogeneous)

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

    def _pipeline_plan(self, pipeline: PlannedPipeline, memory_bytes: int, report: SolverReport) -> ShardingPlan:
        with self._clock.stage("write_s"):
            notes = self._notes(pipeline.stages()[0].run)
            plan = write_pipeline_plan(self._planner, self._module, pipeline, memory_bytes, report, notes)
        return dataclasses.replace(plan, timings=dict(self._clock.spent))

    def _restrict(self, name: str, pins: Pins) -> Callable[[MeshSpec], Restriction | None]:
        """Return the function mesh -> restriction of choices by the planner and the pins; None: no restriction."""

        def restrict(mesh: MeshSpec) -> Restriction | None:
            return pins.restrict(mesh, baselines.restriction_of(name, mesh, self._tp_plan, self._analysis.graph))

        return restrict if name in baselines.NAMES else pins.on

    def _infeasibility(
        self,
        meshes: Sequence[MeshSpec],
        name: str,
        memory_bytes: int,
        started: float,
        known: LeastMemoryResult | None,
    ) -> PlannerError:
        """Return the error for a planner without a plan: the least memory, or what has no layout."""
        pins, counts, modes = self._pins(meshes), self._counts_for(name), modes_of(self._analysis, self.job.ac)
        constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=self._restrict(name, pins))
        with gc_pause.paused():
            report = infeasibility_report(
                self._planner,
                meshes,
                counts,
                modes,
                constraints,
                lambda other: self._space(name, other),
                started=started,
                known=known,
            )
            if report is None or report.least_bytes is None:
                unsupported = unsupported_ops(self._analysis.base, self._planner.table)
                if unsupported is not None:
                    return unsupported
            if report is not None:
                return report
            baseline = None
            if name in baselines.NAMES:
                allowed = baselines.restriction_of(name, meshes[-1], self._tp_plan, self._analysis.graph)
                baseline = name, allowed
            return no_layout_error(self._planner, meshes, counts, pins, baseline)

    def least_memory_bytes(self, *, mesh: str | MeshSpec | None = None) -> int | None:
        """Return the least peak memory per device of any plan, in bytes; None where the meshes allow no layout."""
        meshes = self._meshes(mesh, "ilp")
        modes = modes_of(self._analysis, self.job.ac)
        with gc_pause.paused():
            restrict = self._restrict("ilp", self._pins(meshes))
            constraints = SearchConstraints(memory_bytes=self._memory_bytes, restrict=restrict)
            least = least_memory_run(self._planner, meshes, self._counts, modes, constraints, gap=EXACT).least
        return None if least is None else math.ceil(least.nbytes)

    def _space(self, name: str, cluster: ClusterSpec) -> tuple[list[MeshSpec], list[int]]:
        """Return the meshes of a cluster and the numbers of micro-batches that a planner chooses from."""
        if name not in _ONE_AXIS_PLANNERS:
            meshes = meshes_of(cluster, self.spec.axes)
            # The outermost of three axes splits the batch only.
            return [m for m in meshes if len(m.shape) < 3 or self._batch % m.shape[0] == 0], self._counts
        return meshes_of(cluster, axes=1), [c for c in self._counts if self._batch // c % cluster.size == 0]

    def _counts_for(self, name: str) -> list[int]:
        """Return the numbers of micro-batches that a planner chooses from on the whole cluster.

        Raises:
            MeshError: the planner needs micro-batches whose samples divide over all devices, and there are none.
        """
        counts = self._space(name, self.cluster)[1]
        if not counts:
            size, samples = self.cluster.size, self._batch // self._counts[0]
            batch = f"a batch of {samples}" if self._counts[0] == 1 else f"a micro-batch of {samples}"
            raise MeshError(
                f"{batch} does not divide over {size} devices, which {name} requires.",
                what_to_do=f"Choose a batch that is a multiple of {size}, fewer micro-batches, or another planner.",
            )
        return counts
