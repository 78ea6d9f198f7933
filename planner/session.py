"""One model on one cluster, traced once and planned as often as wanted.

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
from planner.plan.estimate import SolverReport
from planner.plan.job import Checkpointing, checked_time_limit_s, job_of
from planner.plan.job_spec import JobOptions, JobSpec, spec_of
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.run_spec import Run
from planner.progress import TRACING, Progress
from planner.run import baselines, gc_pause
from planner.run.attention_kernel import check_kernel
from planner.run.baselines import Restriction
from planner.run.mesh_space import check_mesh, checked_axes, meshes_of, modes_of
from planner.run.model_analysis import ModelAnalysis
from planner.run.pins import Pins
from planner.run.run_planner import RunPlanner
from planner.run.run_results import Candidate
from planner.run.stage_clock import Clock
from planner.search.branch_and_bound import SearchResult, SearchSpec
from planner.search.infeasibility import infeasibility_report, least_memory_run
from planner.search.pipeline.co_search import search_meshes, search_meshes_and_pipelines, search_pipelines
from planner.search.pipeline.mesh_argument import check_no_pipeline_axis, given_stages, no_pipeline
from planner.search.pipeline.split_graph import obstacle
from planner.search.pipeline.stage_planners import PlannedPipeline, stage_clusters_of
from planner.search.task_pool import Pool, checked_jobs, start_workers
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.writing.notes import notes_on
from planner.writing.write import solver_report, write_pipeline_plan, write_plan

_ON_ONE_AXIS = ("data-parallel", "fully-sharded")


class PlanningSession:
    """A model that is traced once and planned as often as wanted: by several planners, on several meshes.

    Attributes:
        spec: what was asked for.
        job: the job as plans record it.
        cluster: what it is planned on.
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
            spec: the job; its planner and mesh are those of `plan`'s arguments. None: made of ``options``.
            example_inputs: as for `build_plan`.
            tp_plan: as for `build_plan`.
            progress: as for `build_plan`.
            options: the fields of `JobSpec`, in place of ``spec``.

        Raises:
            PlannerError: the job cannot be planned.
        """
        spec = spec_of(options) if spec is None else spec
        self.spec = spec
        self._time_limit_s = checked_time_limit_s(spec.time_limit_s)
        start_workers(checked_jobs(spec.jobs))
        self._progress = progress
        self._axes = checked_axes(spec.axes)
        self.cluster = spec.cluster if isinstance(spec.cluster, ClusterSpec) else ClusterSpec.parse(spec.cluster)
        inputs = resolve_inputs(model, example_inputs, batch=spec.batch, seq=spec.seq, phase=spec.phase)
        given_batch = model.samples if isinstance(model, TracedModule) else batch_size_of(inputs)
        flash = self.cluster.device.flash_attention
        self.job = job_of(spec, batch=spec.batch or given_batch, flash_attention=flash)
        self._batch = spec.batch or given_batch
        self._memory_bytes = self.job.memory_bytes or self.cluster.memory_bytes
        self._counts = micro_batch_counts(self._batch, self.job.micro_batches)
        self._clock = Clock()
        if isinstance(model, TracedModule):
            check_traced_for(model, self._batch, self._counts, self.job)
            self._module = model
        else:
            if progress is not None:
                progress(TRACING)
            alone = self._batch // self._counts[0] if len(self._counts) == 1 else None
            with gc_pause.paused(), self._clock.stage("trace_s"):
                self._module = trace_at_batch(
                    model, inputs, alone, self.job.dtype, spec.phase, fused_ops=spec.fused_ops
                )
        check_kernel(self.job, self.cluster.device, self._module.graph)
        self._tp_plan = self._module.tp_plan if tp_plan is None else tp_plan
        self._traced = ModelAnalysis.from_module(
            self._module,
            flash_attention=flash,
            seq=spec.seq,
            compiles=self.cluster.device.compiles,
            zigzag=self.job.zigzag,
        )
        self._planner = RunPlanner(self._traced, self.job, self.cluster, self._batch, self._clock)
        self._context = WorkerContext(self._planner)
        self._pool = Pool(self._context, spec.jobs)

    def plan(
        self, *, planner: str = "ilp", mesh: str | MeshSpec | None = None, memory_bytes: int | None = None
    ) -> ShardingPlan:
        """Return the plan of ``planner`` on ``mesh`` (None: the best of all with up to ``axes`` axes).

        Args:
            mesh: with ``pp`` as its outermost axis it says the number of pipeline stages, and the mesh of one.
            memory_bytes: cap on the peak per device; None: the job's.

        Raises:
            PlannerError: there is none; `InfeasibleError` where nothing fits the memory.
        """
        plan = self.plan_if_any(planner=planner, mesh=mesh, memory_bytes=memory_bytes)
        if plan is None and self._stages(mesh, planner) is not None:
            raise no_pipeline(str(mesh), memory_bytes or self._memory_bytes)
        if plan is None:
            raise self._infeasibility(self._meshes(mesh, planner), planner, memory_bytes or self._memory_bytes)
        return plan

    def plan_if_any(
        self, *, planner: str = "ilp", mesh: str | MeshSpec | None = None, memory_bytes: int | None = None
    ) -> ShardingPlan | None:
        """Return what `plan` does, and None where that would say why nothing fits, which takes its time."""
        name, seed = baselines.parse_planner(planner)
        with gc_pause.paused():
            stages = self._stages(mesh, planner)
            meshes = self._meshes(mesh, planner) if stages is None else [stages[1]]
            memory_bytes = memory_bytes or self._memory_bytes
            if seed is not None:
                candidate, report = self._random(meshes[-1], seed), SolverReport(name=planner, status="given")
            else:
                restrict = self._restrict(name, self._pins(meshes))
                constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=restrict)
                found, piped = self._searched(meshes, name, constraints, stages, mesh_is_given=mesh is not None)
                if piped is not None and piped.plan is not None:
                    return self._piped_plan(piped.plan, memory_bytes, solver_report(found, piped, planner))
                if found is None or found.plan is None:
                    if piped is not None and not piped.complete:
                        raise SolverError("time was up before any plan was found.", what_to_do="Allow a longer search.")
                    return None
                candidate, report = found.plan, solver_report(found, piped, planner)
            with self._clock.stage("write_s"):
                notes = self._notes(candidate.run)
                plan = write_plan(self._planner, self._module, candidate, memory_bytes, report, notes)
            return dataclasses.replace(plan, timings=dict(self._clock.spent))

    def _meshes(self, mesh: str | MeshSpec | None, planner: str) -> list[MeshSpec]:
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        if spec is None:
            return self._space(planner, self.cluster)[0]
        check_mesh(spec, self.cluster)
        check_no_pipeline_axis(spec)
        return [spec]

    def _stages(self, mesh: str | MeshSpec | None, planner: str) -> tuple[int, MeshSpec] | None:
        """Return the stages that a mesh asks for; None where it asks for none."""
        if mesh is None:
            return None
        spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
        samples = [self._batch // count for count in self._counts]
        numbers = stage_clusters_of(self._planner) if self._uncut is None else {}
        return given_stages(spec, planner, self._uncut, numbers, samples)

    def _pins(self, meshes: Sequence[MeshSpec]) -> Pins:
        """Return the job's pins, checked against the model and the meshes that are tried."""
        pins = Pins.parse(self.job.pins, self.job.data_axes, self._module.names.parameters, meshes)
        if pins.pins:
            structure = self._traced.structure(self._batch // self._counts[0])
            pins.check(structure.parameters, dict(structure.regions.graph.parameters))
        return pins

    def _notes(self, run: Run) -> list[str]:
        found = list(notes_on(run, self._module, self._traced, self._batch))
        if not self.spec.executable_only and self._uncut is not None:
            found.append(f"no pipeline was tried: {self._uncut}.")
        return found

    def _random(self, mesh: MeshSpec, seed: int) -> Candidate:
        restriction, mode = self._pins([mesh]).restrict(mesh, None), modes_of(self._traced, self.job.ac)[0]
        candidate = self._planner.random(self._planner.run_of(mesh, self._counts[0], mode), seed, restriction)
        if candidate is None:
            raise MeshError("no random assignment was found.", what_to_do="Choose another mesh, batch or seed.")
        return candidate

    def _searched(
        self,
        meshes: Sequence[MeshSpec],
        name: str,
        constraints: SearchConstraints,
        stages: tuple[int, MeshSpec] | None,
        *,
        mesh_is_given: bool,
    ) -> tuple[SearchResult[Candidate] | None, SearchResult[PlannedPipeline] | None]:
        """Return the outcomes of the searches without and with pipeline stages, of which the faster one has a plan.

        Args:
            meshes: to choose from.
            name: of the planner.
            constraints: that every plan has to keep.
            stages: the number of stages and the mesh of one, where the job gives them: nothing else is searched.
            mesh_is_given: whether the job gives its mesh.
        """
        spec = SearchSpec(
            context=self._context,
            micro_batch_counts=self._counts_for(name),
            modes=modes_of(self._traced, self.job.ac),
            constraints=constraints,
            pool=self._pool if name == "ilp" else self._pool.in_this_process(),
            deadline=None if self._time_limit_s is None else time.perf_counter() + self._time_limit_s,
            progress=self._progress,
        )
        heterogeneous = self.spec.heterogeneous_blocks and name == "ilp"
        if stages is not None:
            return None, search_pipelines(spec, axes=self._axes, only=stages)
        if name != "ilp" or mesh_is_given or self._uncut is not None:
            return search_meshes(spec, meshes, heterogeneous_blocks=heterogeneous), None
        return search_meshes_and_pipelines(spec, meshes, axes=self._axes, heterogeneous_blocks=heterogeneous)

    @functools.cached_property
    def _uncut(self) -> str | None:
        """Why no pipelines are tried; None where they are."""
        if not self.job.training:
            return "only training is cut into stages"
        if self.spec.executable_only:
            return "only plans that can be run are wanted"
        if Checkpointing.parse(self.job.ac or "none").first is not None:
            return "only the first blocks are to be checkpointed"
        return obstacle(self._traced.graph, self._traced.blocks)

    def _piped_plan(self, found: PlannedPipeline, memory_bytes: int, report: SolverReport) -> ShardingPlan:
        with self._clock.stage("write_s"):
            notes = self._notes(found.stages()[0].run)
            plan = write_pipeline_plan(self._planner, self._module, found, memory_bytes, report, notes)
        return dataclasses.replace(plan, timings=dict(self._clock.spent))

    def _restrict(self, name: str, pins: Pins) -> Callable[[MeshSpec], Restriction | None]:
        """Return what a planner and the pins leave to choose on a mesh."""

        def restrict(mesh: MeshSpec) -> Restriction | None:
            return pins.restrict(mesh, baselines.restriction_of(name, mesh, self._tp_plan, self._traced.graph))

        return restrict if name in baselines.NAMES else pins.on

    def _infeasibility(self, meshes: Sequence[MeshSpec], name: str, memory_bytes: int) -> PlannerError:
        """Return why no plan of a planner fits."""
        pins = self._pins(meshes)
        modes = modes_of(self._traced, self.job.ac)
        constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=self._restrict(name, pins))
        with gc_pause.paused():
            report = infeasibility_report(
                self._planner,
                meshes,
                self._counts_for(name),
                modes,
                constraints,
                lambda other: self._space(name, other),
            )
        if report.least_bytes is None and pins:
            return MeshError(
                f"no layout on these meshes keeps the pins: {pins}.",
                what_to_do="Choose another mesh, or pin what its axes divide and what the ops can run in.",
            )
        return report

    def least_memory_bytes(self, *, mesh: str | MeshSpec | None = None) -> int | None:
        """Return the least peak per device that any plan needs; None where the model has no layout on the meshes."""
        meshes = self._meshes(mesh, "ilp")
        modes = modes_of(self._traced, self.job.ac)
        with gc_pause.paused():
            restrict = self._restrict("ilp", self._pins(meshes))
            least = least_memory_run(self._planner, meshes, self._counts, modes, restrict)
        return None if least is None else math.ceil(least.nbytes)

    def _space(self, name: str, cluster: ClusterSpec) -> tuple[list[MeshSpec], list[int]]:
        """Return the meshes of a cluster and the numbers of micro-batches that a planner chooses from."""
        if name not in _ON_ONE_AXIS:
            found = meshes_of(cluster, self._axes)
            # Of three axes the outermost is there to split the batch.
            return [m for m in found if len(m.shape) < 3 or self._batch % m.shape[0] == 0], self._counts
        return meshes_of(cluster, axes=1), [c for c in self._counts if self._batch // c % cluster.size == 0]

    def _counts_for(self, name: str) -> list[int]:
        return self._evenly_split(name) if name in _ON_ONE_AXIS else self._counts

    def _evenly_split(self, name: str) -> list[int]:
        """Return the numbers of micro-batches whose samples divide over all devices, as ``name`` needs them to.

        Raises:
            MeshError: there is none.
        """
        size = self.cluster.size
        counts = self._space(name, self.cluster)[1]
        if not counts:
            fewest = self._batch // self._counts[0]
            what = f"a batch of {fewest}" if self._counts[0] == 1 else f"a micro-batch of {fewest}"
            raise MeshError(
                f"{what} does not divide over {size} devices, as {name} needs it to.",
                what_to_do=f"Choose a batch that is a multiple of {size}, fewer micro-batches, or another planner.",
            )
        return counts
