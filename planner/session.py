"""`PlanningSession`: a model that is traced once and planned any number of times on one cluster.

module --trace--> OpGraph --regions--> RegionGraph --strategies, prices--> Problem --ilp--> Assignment --> ShardingPlan
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from cost_model.layouts.layout import MeshSpec
from planner.errors import BaselineError, MeshError, PlannerError, SolverError
from planner.merged_axes import with_merged_axes
from planner.plan.estimate import BaselinePrice, SolverReport
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import ShardingPlan
from planner.progress import PRICING_BASELINES
from planner.run import baselines, gc_pause
from planner.run.no_layout import no_layout_error
from planner.run.pins import NO_PINS
from planner.run.run_results import Candidate
from planner.run.unsupported_ops import unsupported_ops
from planner.search.baseline_search import PricedBaseline, baseline_space, search_baselines, search_even_meshes
from planner.search.branch_and_bound import SearchResult
from planner.search.choice import Choice
from planner.search.infeasibility import find_infeasible, infeasibility_report, least_memory_run
from planner.search.least_memory import EXACT, LeastMemoryResult
from planner.search.mesh_space import modes_of
from planner.search.mixed_checkpointing import mix_checkpointing
from planner.search.pipeline.co_search import search_meshes, search_meshes_and_pipelines, search_pipelines
from planner.search.pipeline.mesh_argument import no_pipeline
from planner.search.pipeline.stage_planners import PlannedPipeline
from planner.search.worker_context import RunKey, SearchConstraints
from planner.strategies.dtensor_rules import quiet_dtensor
from planner.traced_job import TracedJob
from planner.writing.axis_names import fastest_by_role
from planner.writing.named_plan import named_plan
from planner.writing.simplest import Fastest, choice_report, simplest_plan
from planner.writing.techniques import used_techniques
from planner.writing.write import solver_report

_AFTERWARDS_S = 5.0
"""Seconds for the baselines, and for merging axes, where the search for the fastest plan has a time limit."""


class PlanningSession(TracedJob):
    """A model that is traced once, and planned by any planners, on any meshes and within any memory caps.

    Attributes:
        last_choice: the choice of the last `plan` with a tolerance, with the plans that it was made among; None: there
            was none.
    """

    last_choice: Choice[Fastest] | None = None

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
            planner: "ilp", a baseline's name, several of them joined by "+", or "random:SEED". Of several baselines the
                simplest within ``tolerance`` of the fastest. All blocks are then checkpointed alike, and all FSDP
                groups reshard after the forward, or, with "keep-gathered" among the names, all after the backward.
            mesh: the mesh. An outermost axis ``pp`` gives the number of pipeline stages, and the other axes are the
                mesh of a stage. None: all meshes with up to ``axes`` axes are tried.
            memory_bytes: cap on the peak per device; None: the job's cap.
            tolerance: relative step time that a simpler plan may cost more (`planner.search.choice`). The plan then has
                the prices of the baselines as well. None: the fastest plan, without baselines. Only for "ilp".

        Raises:
            PlannerError: there is no plan. `InfeasibleError`: no plan fits the memory.
        """
        started = time.perf_counter()
        memory_bytes = memory_bytes or self._memory_bytes
        names = baselines.names_in(planner)
        if len(names) > 1:
            found = self._simplest_of(names, mesh, memory_bytes, tolerance)
            if isinstance(found, ShardingPlan):
                return found
            planner = found  # none fits, and it says what is missing
        plan = self._plan_or_least_memory(planner, mesh, memory_bytes, tolerance=tolerance)
        if isinstance(plan, ShardingPlan):
            return plan
        if self._stages(mesh, planner) is not None:
            more = self.job.micro_batches is not None and self.job.micro_batches < self._batch
            raise no_pipeline(str(mesh), memory_bytes, more_micro_batches=more)
        raise self._infeasibility(self._meshes(mesh, planner), planner, memory_bytes, started, known=plan)

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
        names = baselines.names_in(planner)
        if len(names) > 1:
            best = self._simplest_of(names, mesh, memory_bytes or self._memory_bytes, tolerance, excluded)
            return best if isinstance(best, ShardingPlan) else None
        plan = self._plan_or_least_memory(
            planner,
            mesh,
            memory_bytes or self._memory_bytes,
            tolerance=tolerance,
            excluded=excluded,
            keep_names=keep_names,
        )
        return plan if isinstance(plan, ShardingPlan) else None

    def _simplest_of(
        self,
        names: Sequence[str],
        mesh: str | MeshSpec | None,
        memory_bytes: int,
        tolerance: float | None,
        excluded: frozenset[RunKey] = frozenset(),
    ) -> ShardingPlan | str:
        """Return the plan of the first of some baselines that is within ``tolerance`` of the fastest.

        Where none fits, return the name of the last that has a mesh, which splits the most.
        Baselines that the cluster or the batch has no mesh for are left out. The searches share the job's time limit.

        Raises:
            SolverError: no search found a plan, and time was up for one of them.
        """
        kept = (ReshardAfter.FORWARD, ReshardAfter.BACKWARD) if baselines.KEEP_GATHERED in names else ()
        searches: list[tuple[str, ReshardAfter]] = []
        for name in dict.fromkeys(names):
            if name in baselines.LAUNCHED:
                has_groups = name not in ("ddp", "tp")
                searches += [(name, after) for after in (has_groups and kept) or (ReshardAfter.FORWARD,)]
        plans: list[ShardingPlan] = []
        late, last = None, names[0]
        for name, after in searches:
            session = self._resharding(after, searches=len(searches))
            try:
                found = session._plan_or_least_memory(name, mesh, memory_bytes, excluded=excluded, mixes=False)
            except (MeshError, BaselineError):
                continue
            except SolverError as error:
                late = error
                continue
            last = name
            if isinstance(found, ShardingPlan):
                plans.append(found)
        if not plans and late is not None:
            raise late
        seconds = [plan.estimate.step_time_s if plan.estimate is not None else math.inf for plan in plans]
        most = min(seconds, default=0.0) * (1 + (tolerance or 0.0))
        return next((plan for plan, step_s in zip(plans, seconds, strict=True) if step_s <= most), last)

    def _plan_or_least_memory(
        self,
        planner: str,
        mesh: str | MeshSpec | None,
        memory_bytes: int,
        *,
        tolerance: float | None = None,
        excluded: frozenset[RunKey] = frozenset(),
        keep_names: bool = True,
        mixes: bool = True,
    ) -> ShardingPlan | LeastMemoryResult | None:
        """Return the plan; where no plan fits, what is known of the least memory, or None.

        Other arguments are those of `plan_if_any`.

        Args:
            mixes: whether a baseline may checkpoint some blocks less than others.
        """
        name, seed = baselines.parse_planner(planner)
        keep_names = (keep_names and mesh is not None) or bool(self.job.pins or self.job.data_axes)
        with gc_pause.paused(), quiet_dtensor():
            stages = self._stages(mesh, planner)
            meshes = self._meshes(mesh, planner) if stages is None else [stages[1]]
            if seed is not None:
                candidate, report = self._random(meshes[-1], seed), SolverReport(name=planner, status="given")
                return self._written(candidate, memory_bytes, report, keep_names=keep_names)
            restrict = self._restrict(name, self._pins(meshes))
            constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=restrict, excluded=excluded)
            known = self._find_infeasible(meshes, name, constraints, mesh_is_given=mesh is not None, stages=stages)
            if known is not None:
                return known
            whole, pipelined = self._run_searches(
                meshes, name, constraints, stages, mesh_is_given=mesh is not None, mixes=mixes
            )
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
        mixes: bool,
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
            mixes: as for `_plan_or_least_memory`.
        """
        counts = self._space.counts_for(name, self.cluster)
        spec = self._search_spec(name, counts, constraints, self._deadline(self.spec.time_limit_s))
        space = baseline_space(name, self.cluster) if name in baselines.LAUNCHED and not mesh_is_given else None
        if space is not None:
            return search_even_meshes(spec, space.counts(self._batch, self._counts), mixes=mixes), None
        heterogeneous = self.spec.heterogeneous_blocks and name == "ilp"
        if stages is not None:
            return None, search_pipelines(spec, axes=self.spec.axes, only=stages)
        if name != "ilp" or mesh_is_given or self._no_pipeline_reason is not None:
            result = search_meshes(spec, meshes, heterogeneous_blocks=heterogeneous)
            mixes = mixes and name in baselines.LAUNCHED
            return mix_checkpointing(spec, result, counts) if mixes else result, None
        return search_meshes_and_pipelines(spec, meshes, axes=self.spec.axes, heterogeneous_blocks=heterogeneous)

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
        counts, modes = self._space.counts_for(name, self.cluster), modes_of(self._analysis, self.job.ac)
        return find_infeasible(self._planner, meshes, counts, modes, constraints, has_pipelines=has_pipelines)

    def _infeasibility(
        self,
        meshes: Sequence[MeshSpec],
        name: str,
        memory_bytes: int,
        started: float,
        known: LeastMemoryResult | None,
    ) -> PlannerError:
        """Return the error for a planner without a plan: the least memory, or what has no layout."""
        pins, modes = self._pins(meshes), modes_of(self._analysis, self.job.ac)
        counts = self._space.counts_for(name, self.cluster)
        constraints = SearchConstraints(memory_bytes=memory_bytes, restrict=self._restrict(name, pins))
        with gc_pause.paused():
            report = infeasibility_report(
                self._planner,
                meshes,
                counts,
                modes,
                constraints,
                lambda other: self._space.on(name, other),
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
                baseline = name, baselines.restriction_of(name, meshes[-1], self._tp_plan, self._analysis.graph)
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
