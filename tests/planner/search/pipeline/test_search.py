"""The search for pipelines: what brute force finds, and bounds that hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from support.pipeline_sessions import BATCH, CONFIG, session_of

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec, reserve_bytes
from cost_model.layouts.layout import MeshSpec
from planner.ilp.relaxation import least_memory_bound
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.pipeline.bound_order import in_one_piece
from planner.search.pipeline.interleaving import interleaved as spread
from planner.search.pipeline.search import PipelineSearch
from planner.search.pipeline.space import PipelineSpace
from planner.search.pipeline.stage_planners import PipelineRun
from planner.search.pipeline.step_time import kinds_of, least_step_s
from planner.search.pipeline.tasks import BlockMemory, BoundStage, RelaxStage, SingleDeviceTime, SolvePipeline
from planner.search.worker_context import SearchConstraints, WorkerContext
from planner.session import PlanningSession


def walk_of(session: PlanningSession, counts: list[int], modes: list[str]) -> PipelineSearch:
    return PipelineSearch(session._search, counts, modes, lambda mesh: None)


def space_of(bench: WorkerContext) -> PipelineSpace:
    work = SingleDeviceTime.of_model(bench.search, 1, ["none"])
    return PipelineSpace(bench.search, work, bench.stages.clusters, None, 2, bench.stages.may_have_ends_alone())


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
    walk = walk_of(session, counts, ["none"])
    found = walk.best().plan
    assert found is not None
    every = walk_of(session, counts, ["none"])._stages
    times = []
    for split in itertools.product(range(1, 5), repeat=stages):
        if sum(split) != 5:
            continue
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=split, micro_batches=9, ac="none")
        search = every.of(kinds_of(split)[0], stages)
        task = SolvePipeline(
            pipeline=pipeline, bounds=(0.0,) * stages, floors={}, at_most_s=math.inf, mip_gap=1e-3, left_s=None
        )
        looks = list(task._looks(every))
        assert [look.layout for look in looks] == every.layouts(search, pipeline.mesh, 2)
        for look in looks:
            bounds = [0.0] * stages
            planned = task._planned(every, look, bounds, math.inf, None)
            assert planned is not None
            # Each stage to a gap of its own, and the step within the one that was asked for.
            assert planned.step_time_s <= least_step_s(bounds, pipeline.micro_batches) * (1 + 1e-3) + 1e-12
            times.append(planned.step_time_s)
    assert found.pipeline.counts in ((2, 3), (3, 2))
    assert found.step_time_s == pytest.approx(min(times), rel=2e-3)


@pytest.mark.parametrize("cap", [10**12, 2_400_000, 1_600_000])
def test_the_search_finds_what_solving_every_pipeline_finds(session: PlanningSession, cap: int) -> None:
    """Over numbers of micro-batches and modes of checkpointing: looks in fewer leave out nothing that is better."""
    counts, modes = [1, 2, 4, 8], ["none", "selective", "full"]
    search = RunPlanner(session._search.model, session.job, ClusterSpec.parse("1x4xtoy"), BATCH, Clock())
    search.memory_bytes = cap
    walk = PipelineSearch(search, counts, modes, lambda mesh: None, only=(2, MeshSpec.parse("dp=2")))
    found = walk.best().plan
    bench, times = walk._bench, {}
    for pipeline in walk._space.pipelines(counts, modes):
        task = SolvePipeline(
            pipeline=pipeline, bounds=(0.0, 0.0), floors={}, at_most_s=math.inf, mip_gap=1e-3, left_s=None
        )
        solved = task(bench)
        if solved.best is not None:
            times[pipeline] = solved.best.step_time_s
    assert found is not None
    assert found.step_time_s == pytest.approx(min(times.values()), rel=2e-3)
    assert len(times) > 5


def test_more_devices_than_samples_bring_interleaved_stages_on_pairs_of_nodes() -> None:
    """One mesh of three axes beside those of two: a node, two nodes around it, and the batch around these."""

    def three_axes(batch: int, axes: int = 2) -> set[tuple[str, bool]]:
        walk = walk_of(session_of("8x2xtoy", blocks=6, batch=batch), [2, 4, 8], ["none"])
        found = dataclasses.replace(walk._space, axes=axes).pipelines([2, 4, 8], ["none"])
        return {(str(p.whole_mesh), p.chunks > 1) for p in found if len(p.mesh.shape) == 3}

    assert three_axes(8) == {("pp=2,dp=2,fsdp=2,tp=2", True)}
    assert three_axes(9) == three_axes(1) == set()  # which the axis around the nodes does not divide
    assert three_axes(16) == three_axes(8, axes=1) == set()
    assert ("pp=2,dp=2,fsdp=2,tp=2", False) in three_axes(16, axes=3)


def test_the_walk_does_not_begin_on_pairs_of_nodes() -> None:
    """Theirs are the largest programs; a first plan is to come soon."""
    walk = walk_of(session_of("8x2xtoy", blocks=6, batch=8), [2, 4], ["none", "full"])
    items = list(walk._items())
    likely, others = walk._likely_first(items)
    assert likely
    assert {str(item.pipeline.mesh) for item in likely} == {"dp=2,tp=2", "dp=4,tp=2"}
    assert any(len(item.pipeline.mesh.shape) == 3 for item in others)


@pytest.mark.parametrize("cap", [10**12, 1_300_000])
def test_the_search_finds_what_solving_every_pipeline_on_pairs_of_nodes_finds(cap: int) -> None:
    """Though no look at a stage in one piece bounds them."""
    counts, modes = [2, 4], ["none", "full"]
    search = session_of("8x2xtoy", blocks=6, batch=8)._search
    search.memory_bytes = cap
    walk = PipelineSearch(search, counts, modes, lambda mesh: None)
    every = list(walk._space.pipelines(counts, modes))
    pairs = [pipeline for pipeline in every if len(pipeline.mesh.shape) == 3]
    times = {}
    for pipeline in pairs:
        bounds = (0.0,) * len(pipeline.counts)
        task = SolvePipeline(pipeline=pipeline, bounds=bounds, floors={}, at_most_s=math.inf, mip_gap=1e-3, left_s=None)
        solved = task(walk._bench)
        if solved.best is not None:
            times[pipeline] = solved.best.step_time_s
    walk._space = PairsAlone(
        walk._space.search, walk._space.work, walk._space.clusters, None, 2, walk._space.ends_alone
    )
    found = walk.best().plan
    assert found is not None
    assert len(times) > 1
    assert found.step_time_s == pytest.approx(min(times.values()), rel=2e-3)


class PairsAlone(PipelineSpace):
    """Of the pipelines those on pairs of nodes."""

    def pipelines(self, counts: Sequence[int], modes: Sequence[str]) -> Iterator[PipelineRun]:
        found = PipelineSpace.pipelines(self, counts, modes)
        return (pipeline for pipeline in found if len(pipeline.mesh.shape) == 3)


@pytest.mark.parametrize("cap", [10**12, 400_000])
def test_looks_at_stages_bound_what_comes_after_them(session: PlanningSession, cap: int) -> None:
    """A floor is no more than the relaxation of any run that it is for; what is counted is no more than what fits."""
    modes = ["none", "selective", "full"]
    bench = WorkerContext(RunPlanner(session._search.model, session.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock()))
    bench.take(SearchConstraints(memory_bytes=cap, restrict=lambda mesh: None))
    work, memory = (
        SingleDeviceTime.of_model(bench.search, 1, modes),
        BlockMemory.of(bench.stages, BATCH, modes, session.job),
    )
    looked = 0
    in_fewer: dict[str, float] = {}
    for count, ac, split in itertools.product((2, 4), modes, ((1, 3, 1), (2, 2, 1))):
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=split, micro_batches=count, ac=ac)
        share = (count + 2) / count / pipeline.mesh.size
        kind = next(kind for kind in kinds_of(split) if kind.indices == (1,))
        again_s = {mode: again * share for mode, again in work.again_s.items()}
        fewest = dataclasses.replace(kind, blocks=2)
        floor = BoundStage(kind=fewest, pipeline=pipeline, again_s=again_s, limit_s=_ANY_S)(bench)
        bound_s = RelaxStage(kind=kind, pipeline=pipeline, floor=None, limit_s=math.inf)(bench)
        assert work.bounds(pipeline)[1] <= bound_s
        assert floor.bounds_s.get(ac, math.inf) <= floor.bound_s(kind, ac) <= bound_s * (1 + 1e-9)
        assert RelaxStage(kind=fewest, pipeline=pipeline, floor=None, limit_s=math.inf)(bench) <= bound_s * (1 + 1e-9)
        assert floor.bound_s(dataclasses.replace(kind, blocks=1), ac) == 0.0
        # More micro-batches do no less, but for the idle time.
        least_s = in_fewer.setdefault(ac, floor.bounds_s.get(ac, 0.0))
        assert least_s * (1.0 if count == 2 else (6 / 4) / (4 / 2)) <= floor.bounds_s.get(ac, math.inf) * (1 + 1e-9)
        # Of one mode alone: the same bound, and choices that it shows to be slow are none that a better plan has.
        alone = BoundStage(kind=fewest, pipeline=pipeline, again_s={ac: again_s[ac]}, limit_s=_ANY_S)(bench)
        assert alone.bounds_s.get(ac, math.inf) == pytest.approx(floor.bounds_s.get(ac, math.inf))
        if math.isfinite(bound_s):
            limit_s = 1.01 * bound_s
            within_s = RelaxStage(kind=kind, pipeline=pipeline, floor=alone.floor, limit_s=limit_s)(bench)
            assert within_s == pytest.approx(bound_s)
        # Of the cap nothing is known of a later stage, which keeps less.
        later = dataclasses.replace(kind, indices=(2,))
        assert floor.bound_s(later, ac) == floor.bounds_s.get(ac, math.inf)
        search = bench.stages.of(kind, 3)
        run = bench.stages.run(search, kind, pipeline)
        formulation = search.formulate(run, bench.stages.restriction(search, run, None))[2]
        assert formulation is not None
        least = least_memory_bound(formulation.problem)
        assert least is not None
        counted = memory.of_stage(kind.blocks, run, BATCH // count) / run.mesh.size + reserve_bytes(run.cluster.device)
        assert 0.75 * least < counted <= least
        looked += math.isfinite(bound_s)
    assert looked if cap == 10**12 else looked < 12


def test_the_search_finds_the_chunks_that_brute_force_finds(six_blocks: PlanningSession) -> None:
    stages, counts = 2, [4]
    walk = walk_of(six_blocks, counts, ["none"])
    walk.only = stages, MeshSpec.parse("dp=2")
    found = walk.best().plan
    assert found is not None
    every = walk_of(six_blocks, counts, ["none"])._stages
    times = {}
    plain = [(split, 1) for split in itertools.product(range(1, 6), repeat=stages) if sum(split) == 6]
    for split, chunks in (*plain, ((3, 3), 3)):
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=split, micro_batches=4, ac="none", chunks=chunks)
        task = SolvePipeline(
            pipeline=pipeline, bounds=(0.0,) * stages, floors={}, at_most_s=math.inf, mip_gap=1e-3, left_s=None
        )
        for look in task._looks(every):
            planned = task._planned(every, look, [0.0] * stages, math.inf, None)
            assert planned is not None
            times[split, chunks] = min(planned.step_time_s, times.get((split, chunks), math.inf))
    best = min(times, key=lambda way: times[way])
    assert (found.pipeline.counts, found.pipeline.chunks) == best == ((3, 3), 3)
    assert found.step_time_s == pytest.approx(times[best], rel=2e-3)


@pytest.mark.parametrize(
    ("cluster", "cap"),
    [("2x2xtoy", 10**12), ("2x2xtoy", 1_800_000), ("2x2xtoy", 1_500_000), ("2x2xh100-sxm-80gb", 10**12)],
)
@pytest.mark.parametrize("ac", ["none", "full"])
def test_a_stage_in_one_piece_bounds_one_in_chunks(
    six_blocks: PlanningSession, ac: str, cluster: str, cap: int
) -> None:
    """Its floors and its relaxation do, those of one piece by the share of the passes that are left.

    Of these tiny blocks an H100 makes more seconds of messages than of anything else.
    """
    bench = WorkerContext(
        RunPlanner(six_blocks._search.model, six_blocks.job, ClusterSpec.parse(cluster), BATCH, Clock())
    )
    bench.take(SearchConstraints(memory_bytes=cap, restrict=lambda mesh: None))
    work = SingleDeviceTime.of_model(bench.search, 1, [ac])
    counts, chunks = spread(6, 2) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=counts, micro_batches=4, ac=ac, chunks=chunks)
    whole = in_one_piece(space_of(bench), pipeline)
    assert whole.chunks == 1
    assert whole.bounds_chunks
    for kind, plain in zip(pipeline.kinds, whole.kinds, strict=True):
        bound_s = RelaxStage(kind=kind, pipeline=pipeline, floor=None, limit_s=math.inf)(bench)
        for stage, of in ((kind, pipeline), (plain, whole)):
            share = of.passes / of.micro_batches / of.mesh.size
            again_s = {mode: again * share for mode, again in work.again_s.items()}
            floor = BoundStage(kind=stage, pipeline=of, again_s=again_s, limit_s=_ANY_S)(bench)
            assert 0.0 < floor.bound_s(kind, ac) * pipeline.passes / of.passes <= bound_s * (1 + 1e-9)
            capped_s = RelaxStage(kind=stage, pipeline=of, floor=floor.floor, limit_s=_ANY_S)(bench)
            assert min(capped_s, _ANY_S) * pipeline.passes / of.passes <= bound_s * (1 + 1e-9)
        for index in kind.indices:
            assert work.bounds(pipeline)[index] <= bound_s
        # In one piece, and waiting for messages, a stage takes no less either.
        waiting = dataclasses.replace(whole, bounds_chunks=False)
        assert capped_s <= RelaxStage(kind=plain, pipeline=waiting, floor=None, limit_s=math.inf)(bench) * (1 + 1e-9)


def test_of_a_search_without_a_cap_on_time_nothing_is_left_open(session: PlanningSession) -> None:
    piped = walk_of(session, [2, 4], ["none", "full"]).best()
    assert piped.plan is not None
    assert piped.complete
    assert piped.bound_s <= piped.plan.step_time_s <= piped.bound_s * (1 + 2e-3)
    assert walk_of(session, [2, 4], ["none", "full"]).best(piped.plan.step_time_s * 0.9).plan is None


@pytest.mark.parametrize(("seq", "widest"), [(256, 2), (4096, 4)])
def test_a_single_sample_is_split_into_pieces_that_fill_a_tile(seq: int, widest: int) -> None:
    """Of 256 tokens four ranks would have 64 each; on a mesh that is given they may."""
    with quiet_libraries():
        source = load_model({"hf_config": {**CONFIG["hf_config"], "max_position_embeddings": seq}}, seq=seq)
    job = {"batch": 2, "seq": seq, "dtype": "fp32", "micro_batches": 2, "executable_only": False}
    search = PlanningSession(source.module, cluster="1x8xtoy", **job)._search

    def sizes(only: tuple[int, MeshSpec] | None) -> set[int]:
        walk = PipelineSearch(search, [2], ["none"], lambda mesh: None, only=only)
        return {item.pipeline.mesh.shape[0] for item in walk._items()}

    assert max(sizes(None)) == widest
    assert sizes((2, MeshSpec.parse("dp=4"))) == {4}
