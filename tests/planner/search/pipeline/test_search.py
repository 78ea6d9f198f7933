"""The search for pipelines: what brute force finds, and bounds that hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from support.pipeline_sessions import BATCH, CONFIG, session_of
from support.searches import constraints_of, pipeline_search, spec_of, unrestricted

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec, reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.ilp.relaxation import least_memory_bound
from planner.run.mesh_bound import MeshBound
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.pipeline.block_memory import BlockMemory
from planner.search.pipeline.bound_order import in_one_chunk
from planner.search.pipeline.interleaving import interleaved as spread
from planner.search.pipeline.search import PipelineSearch
from planner.search.pipeline.single_device_time import SingleDeviceTime
from planner.search.pipeline.solve_pipeline import SolvePipeline, StageSolver
from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun, StagePlanners
from planner.search.pipeline.stage_tasks import BoundStage, RelaxStage
from planner.search.pipeline.step_time import StageKind, kinds_of, least_step_s
from planner.search.worker_context import WorkerContext
from planner.session import PlanningSession


def search_of(session: PlanningSession, counts: list[int], modes: list[str]) -> PipelineSearch:
    return pipeline_search(spec_of(session._planner, counts, modes))


def space_of(stages: StagePlanners) -> PipelineSpace:
    times = SingleDeviceTime.of_model(stages.whole, 1, ["none"])
    return PipelineSpace(stages.whole, times, stages.clusters, None, 2, stages.may_have_ends_alone)


def exact(pipeline: PipelineRun) -> SolvePipeline:
    """Return the task that solves a pipeline of which nothing is known."""
    return SolvePipeline(
        pipeline=pipeline,
        bounds=(0.0,) * len(pipeline.blocks_per_stage),
        mesh_bounds={},
        cutoff_s=math.inf,
        mip_gap=1e-3,
        left_s=None,
    )


def planner_on(session: PlanningSession, cluster: str) -> RunPlanner:
    return RunPlanner(session._planner.model, session.job, ClusterSpec.parse(cluster), BATCH, Clock())


_ANY_S = 1e6
"""A limit that any step keeps."""


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    return session_of("1x4xtoy")


@pytest.fixture(scope="module")
def six_blocks() -> PlanningSession:
    return session_of("1x4xtoy", blocks=6)


def test_the_search_finds_the_split_that_brute_force_finds() -> None:
    session = session_of("1x4xtoy", batch=18)
    counts, stages = [9], 2  # no multiple of the stages: chunks cannot interleave
    best = search_of(session, counts, ["none"]).best().plan
    assert best is not None
    every, constraints = StagePlanners(session._planner), constraints_of(session._planner.memory_bytes)
    times = []
    for split in itertools.product(range(1, 5), repeat=stages):
        if sum(split) != 5:
            continue
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), blocks_per_stage=split, micro_batches=9, ac="none")
        planner = every.planner(kinds_of(split)[0], stages)
        solver = StageSolver(exact(pipeline), every, constraints, None)
        boundaries = list(solver.relaxed_boundaries())
        assert [boundary.layout for boundary in boundaries] == every.layouts(planner, pipeline.mesh, 2)
        for boundary in boundaries:
            bounds = [0.0] * stages
            solved = solver.solve_stages(boundary, bounds, math.inf)
            assert solved is not None
            # Each stage to a gap of its own, and the step within the one that was asked for.
            assert solved.step_time_s <= least_step_s(bounds, pipeline.micro_batches) * (1 + 1e-3) + 1e-12
            times.append(solved.step_time_s)
    assert best.pipeline.blocks_per_stage in ((2, 3), (3, 2))
    assert best.step_time_s == pytest.approx(min(times), rel=2e-3)


@pytest.mark.parametrize("cap", [pytest.param(10**12, marks=pytest.mark.slow), 2_400_000, 1_600_000])
def test_the_search_finds_what_solving_every_pipeline_finds(session: PlanningSession, cap: int) -> None:
    """Over numbers of micro-batches and modes of checkpointing: bounds in fewer leave out nothing that is better."""
    counts, modes = [1, 2, 4, 8], ["none", "selective", "full"]
    spec = spec_of(planner_on(session, "1x4xtoy"), counts, modes, cap)
    search = pipeline_search(spec, only=(2, MeshSpec.parse("dp=2")))
    best, times = search.best().plan, {}
    for pipeline in search.space.pipelines(counts, modes):
        solved = exact(pipeline)(spec.context, spec.constraints)
        if solved.best is not None:
            times[pipeline] = solved.best.step_time_s
    assert best is not None
    assert best.step_time_s == pytest.approx(min(times.values()), rel=2e-3)
    assert len(times) > 5


def test_more_devices_than_samples_bring_interleaved_stages_on_pairs_of_nodes() -> None:
    """One mesh of three axes beside those of two: a node, two nodes around it, and the batch around these."""

    def three_axes(batch: int, axes: int = 2) -> set[tuple[str, bool]]:
        search = search_of(session_of("8x2xtoy", blocks=6, batch=batch), [2, 4, 8], ["none"])
        pipelines = dataclasses.replace(search.space, axes=axes).pipelines([2, 4, 8], ["none"])
        return {(str(p.whole_mesh), p.chunks > 1) for p in pipelines if len(p.mesh.shape) == 3}

    assert three_axes(8) == {("pp=2,dp=2,fsdp=2,tp=2", True)}
    assert three_axes(9) == three_axes(1) == set()  # which the axis around the nodes does not divide
    assert three_axes(16) == three_axes(8, axes=1) == set()
    assert ("pp=2,dp=2,fsdp=2,tp=2", False) in three_axes(16, axes=3)


def test_the_search_does_not_begin_on_pairs_of_nodes() -> None:
    """Theirs are the largest programs; a first plan is to come soon."""
    search = search_of(session_of("8x2xtoy", blocks=6, batch=8), [2, 4], ["none", "full"])
    likely, others = search.likely_first(list(search.roots()))
    assert likely
    assert {str(node.pipeline.mesh) for node in likely} == {"dp=2,tp=2", "dp=4,tp=2"}
    assert any(len(node.pipeline.mesh.shape) == 3 for node in others)


@pytest.mark.slow
@pytest.mark.parametrize("cap", [10**12, 1_300_000])
def test_the_search_finds_what_solving_every_pipeline_on_pairs_of_nodes_finds(cap: int) -> None:
    """Though no bound of a stage in one chunk bounds them."""
    counts, modes = [4], ["none", "full"]
    spec = spec_of(session_of("8x2xtoy", blocks=6, batch=8)._planner, counts, modes, cap)
    search = pipeline_search(spec)
    space, times = search.space, {}
    for pipeline in space.pipelines(counts, modes):
        if len(pipeline.mesh.shape) == 3:
            solved = exact(pipeline)(spec.context, spec.constraints)
            if solved.best is not None:
                times[pipeline] = solved.best.step_time_s
    search.space = PairsAlone(space.planner, space.times, space.clusters, None, 2, space.ends_alone)
    best = search.best().plan
    assert best is not None
    assert len(times) > 1
    assert best.step_time_s == pytest.approx(min(times.values()), rel=2e-3)


class PairsAlone(PipelineSpace):
    """Of the pipelines those on pairs of nodes."""

    def pipelines(self, counts: Sequence[int], modes: Sequence[str]) -> Iterator[PipelineRun]:
        found = PipelineSpace.pipelines(self, counts, modes)
        return (pipeline for pipeline in found if len(pipeline.mesh.shape) == 3)


@pytest.mark.parametrize("cap", [10**12, 400_000])
def test_bounds_of_stages_hold_for_what_comes_after_them(session: PlanningSession, cap: int) -> None:
    """A stage's bound is no more than the relaxation of any run that it is for; bytes are no more than what fits."""
    modes, constraints = ["none", "selective", "full"], constraints_of(cap)
    context = WorkerContext(planner_on(session, "3x2xtoy"))
    stages = context.once(StagePlanners)
    times = SingleDeviceTime.of_model(context.planner, 1, modes)
    memory = BlockMemory.of_model(stages, BATCH, modes, session.job)
    fitting = 0
    in_fewer: dict[str, float] = {}

    def relax(kind: StageKind, mesh_bound: MeshBound | None = None, cutoff_s: float = math.inf) -> float:
        task = RelaxStage(kind=kind, pipeline=pipeline, mesh_bound=mesh_bound, cutoff_s=cutoff_s)
        return task(context, constraints)

    for count, ac, split in itertools.product((2, 4), modes, ((1, 3, 1), (2, 2, 1))):
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), blocks_per_stage=split, micro_batches=count, ac=ac)
        share = (count + 2) / count / pipeline.mesh.size
        kind = next(kind for kind in kinds_of(split) if kind.indices == (1,))
        recompute_s = {mode: seconds * share for mode, seconds in times.recompute_s.items()}
        fewest = dataclasses.replace(kind, blocks=2)
        task = BoundStage(kind=fewest, pipeline=pipeline, recompute_s=recompute_s, cutoff_s=_ANY_S)
        bounded, bound_s = task(context, constraints), relax(kind)
        assert times.bounds_s(pipeline)[1] <= bound_s
        assert bounded.bounds_s.get(ac, math.inf) <= bounded.bound_s(kind, ac) <= bound_s * (1 + 1e-9)
        assert relax(fewest) <= bound_s * (1 + 1e-9)
        assert bounded.bound_s(dataclasses.replace(kind, blocks=1), ac) == 0.0
        # More micro-batches do no less, but for the idle time.
        least_s = in_fewer.setdefault(ac, bounded.bounds_s.get(ac, 0.0))
        assert least_s * (1.0 if count == 2 else (6 / 4) / (4 / 2)) <= bounded.bounds_s.get(ac, math.inf) * (1 + 1e-9)
        # Of one mode alone: the same bound, and choices that it shows to be slow are none that a better plan has.
        alone = dataclasses.replace(task, recompute_s={ac: recompute_s[ac]})(context, constraints)
        assert alone.bounds_s.get(ac, math.inf) == pytest.approx(bounded.bounds_s.get(ac, math.inf))
        if math.isfinite(bound_s):
            assert relax(kind, alone.mesh_bound, 1.01 * bound_s) == pytest.approx(bound_s)
        # The memory cap says nothing of a later stage, which keeps less.
        later = dataclasses.replace(kind, indices=(2,))
        assert bounded.bound_s(later, ac) == bounded.bounds_s.get(ac, math.inf)
        planner = stages.planner(kind, 3)
        run = stages.run(planner, kind, pipeline)
        formulation = planner.formulate(run, stages.restriction(planner, run, unrestricted, None)).formulation
        assert formulation is not None
        least = least_memory_bound(formulation.problem)
        assert least is not None
        counted = memory.of_stage(kind.blocks, run, BATCH // count) / run.mesh.size + reserve_bytes(run.cluster.device)
        assert 0.75 * least < counted <= least
        fitting += math.isfinite(bound_s)
    assert fitting if cap == 10**12 else fitting < 12


def test_the_search_finds_the_chunks_that_brute_force_finds(six_blocks: PlanningSession) -> None:
    stages, counts = 2, [4]
    spec = spec_of(six_blocks._planner, counts, ["none"])
    best = pipeline_search(spec, only=(stages, MeshSpec.parse("dp=2"))).best().plan
    assert best is not None
    times = {}
    plain = [(split, 1) for split in itertools.product(range(1, 6), repeat=stages) if sum(split) == 6]
    for split, chunks in (*plain, ((3, 3), 3)):
        pipeline = PipelineRun(
            mesh=MeshSpec.parse("dp=2"), blocks_per_stage=split, micro_batches=4, ac="none", chunks=chunks
        )
        solver = StageSolver(exact(pipeline), spec.context.once(StagePlanners), spec.constraints, None)
        for boundary in solver.relaxed_boundaries():
            solved = solver.solve_stages(boundary, [0.0] * stages, math.inf)
            assert solved is not None
            times[split, chunks] = min(solved.step_time_s, times.get((split, chunks), math.inf))
    fastest = min(times, key=lambda way: times[way])
    assert (best.pipeline.blocks_per_stage, best.pipeline.chunks) == fastest == ((3, 3), 3)
    assert best.step_time_s == pytest.approx(times[fastest], rel=2e-3)


@pytest.mark.parametrize(
    ("cluster", "cap"),
    [("2x2xtoy", 10**12), ("2x2xtoy", 1_800_000), ("2x2xtoy", 1_500_000), ("2x2xh100-sxm-80gb", 10**12)],
)
@pytest.mark.parametrize("ac", ["none", "full"])
def test_a_stage_in_one_chunk_bounds_one_in_several(
    six_blocks: PlanningSession, ac: str, cluster: str, cap: int
) -> None:
    """Its bounds and its relaxation do, those of one chunk by the share of the passes that are left.

    Of these tiny blocks an H100 makes more seconds of messages than of anything else.
    """
    context, constraints = WorkerContext(planner_on(six_blocks, cluster)), constraints_of(cap)
    times = SingleDeviceTime.of_model(context.planner, 1, [ac])
    counts, chunks = spread(6, 2) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), blocks_per_stage=counts, micro_batches=4, ac=ac, chunks=chunks)
    whole = in_one_chunk(space_of(context.once(StagePlanners)), pipeline)
    assert whole.chunks == 1
    assert whole.bounds_chunks

    def relax(
        kind: StageKind, run: PipelineRun, mesh_bound: MeshBound | None = None, cutoff_s: float = math.inf
    ) -> float:
        return RelaxStage(kind=kind, pipeline=run, mesh_bound=mesh_bound, cutoff_s=cutoff_s)(context, constraints)

    for kind, plain in zip(pipeline.kinds, whole.kinds, strict=True):
        bound_s = relax(kind, pipeline)
        for stage, run in ((kind, pipeline), (plain, whole)):
            share = run.passes / run.micro_batches / run.mesh.size
            recompute_s = {mode: seconds * share for mode, seconds in times.recompute_s.items()}
            task = BoundStage(kind=stage, pipeline=run, recompute_s=recompute_s, cutoff_s=_ANY_S)
            bounded = task(context, constraints)
            assert 0.0 < bounded.bound_s(kind, ac) * pipeline.passes / run.passes <= bound_s * (1 + 1e-9)
            capped_s = relax(stage, run, bounded.mesh_bound, _ANY_S)
            assert min(capped_s, _ANY_S) * pipeline.passes / run.passes <= bound_s * (1 + 1e-9)
        for index in kind.indices:
            assert times.bounds_s(pipeline)[index] <= bound_s
        # In one chunk, and waiting for messages, a stage takes no less either.
        waiting = dataclasses.replace(whole, bounds_chunks=False)
        assert capped_s <= relax(plain, waiting) * (1 + 1e-9)


def test_a_search_without_a_deadline_leaves_nothing_open(session: PlanningSession) -> None:
    result = search_of(session, [2, 4], ["none", "full"]).best()
    assert result.plan is not None
    assert result.complete
    assert result.bound_s <= result.plan.step_time_s <= result.bound_s * (1 + 2e-3)
    spec = spec_of(session._planner, [2, 4], ["none", "full"])
    assert pipeline_search(spec, cutoff_s=result.plan.step_time_s * 0.9).best().plan is None


@pytest.mark.parametrize(("seq", "widest"), [(256, 2), (4096, 4)])
def test_a_single_sample_is_split_into_pieces_that_fill_a_tile(seq: int, widest: int) -> None:
    """Of 256 tokens four ranks would have 64 each; on a mesh that is given they may."""
    with quiet_libraries():
        source = load_model({"hf_config": {**CONFIG["hf_config"], "max_position_embeddings": seq}}, seq=seq)
    job = {"batch": 2, "seq": seq, "dtype": "fp32", "micro_batches": 2, "executable_only": False}
    spec = spec_of(PlanningSession(source.module, cluster="1x8xtoy", **job)._planner, [2], ["none"])

    def sizes(only: tuple[int, MeshSpec] | None) -> set[int]:
        return {node.pipeline.mesh.shape[0] for node in pipeline_search(spec, only=only).roots()}

    assert max(sizes(None)) == widest
    assert sizes((2, MeshSpec.parse("dp=4"))) == {4}
