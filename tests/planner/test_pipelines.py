"""Pipelines: their prices, the search for them, and the plans that have one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from small_models import TINY_LLAMA

from api.models import load_model, quiet_libraries
from cost_model import ClusterSpec, reserve_bytes
from cost_model.layout import MeshSpec
from cost_model.parallelism import ParallelSpec
from cost_model.pipeline import idle_share, micro_batches_in_flight
from planner.assemble import decision_of
from planner.bench import Bench, Terms
from planner.chunks import interleaved as spread
from planner.clock import Clock
from planner.errors import InfeasibleError, MeshError, PlanError, PlanFormatError
from planner.estimate import estimate, itemise
from planner.ilp import least_memory_bound
from planner.op_order import OpOrder
from planner.opened_plan import estimate_plan
from planner.pipeline_search import PipelineSearch
from planner.plan import ShardingPlan
from planner.problem import peak_bytes, step_time_s, totals
from planner.random_assignment import random_assignment
from planner.report import ONCE_A_STEP
from planner.run import StagePlace
from planner.search import Search
from planner.session import PlanningSession
from planner.stage_looks import BlockMemory, BoundStage, RelaxStage, SolvePipeline, Work
from planner.stage_searches import PipelineRun, StageSearches, stage_clusters
from planner.stages import kinds_of, least_step_s

BATCH = 16
CONFIG: dict[str, Any] = {"hf_config": {**TINY_LLAMA, "num_hidden_layers": 5}}
SLOW: dict[str, Any] = {
    "nodes": 4,
    "devices_per_node": 1,
    "device": "toy",
    "inter_node": {"bandwidth_bytes_per_s": 1e7},
}
"""Nodes that have little to say to each other: gathering parameters takes longer than computing."""


def session_of(cluster: str | dict[str, Any], blocks: int = 5, **options: Any) -> PlanningSession:
    with quiet_libraries():
        source = load_model({"hf_config": {**CONFIG["hf_config"], "num_hidden_layers": blocks}}, seq=32)
    job = {"batch": BATCH, "seq": 32, "dtype": "fp32", **options}
    return PlanningSession(source.module, cluster=ClusterSpec.parse(cluster), **job)


def walk_of(session: PlanningSession, counts: list[int], modes: list[str]) -> PipelineSearch:
    return PipelineSearch(session._search, counts, modes, lambda mesh: None)


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    return session_of("1x4xtoy")


@pytest.fixture(scope="module")
def six_blocks() -> PlanningSession:
    return session_of("1x4xtoy", blocks=6)


@pytest.fixture(scope="module")
def interleaved() -> ShardingPlan:
    session = session_of("4x1xtoy", blocks=6, executable_only=False, ac="none", micro_batches=8)
    return session.plan(mesh="pp=2,dp=2")


@pytest.fixture(scope="module")
def pipelined() -> ShardingPlan:
    return session_of(SLOW, executable_only=False, ac="none", micro_batches=8).plan()


@pytest.mark.parametrize(("index", "ac"), [(0, "none"), (0, "full"), (1, "selective"), (2, "none")])
def test_stages_cost_alike_in_program_and_estimator(session: PlanningSession, index: int, ac: str) -> None:
    whole = Search(session._search.traced, session.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock())
    stages = StageSearches(whole, lambda mesh: None, {3: ClusterSpec.parse("1x2xtoy")})
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=(1, 3, 1), micro_batches=4, ac=ac)
    kind = next(kind for kind in kinds_of(pipeline.counts) if index in kind.indices)
    search = stages.of(kind, 3)
    run = stages.run(search, kind, pipeline)
    assert run.in_flight == 3 - index
    formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, None))
    assert formulation is not None
    for seed in range(3):
        assignment = random_assignment(formulation.problem, seed, lambda node, choice: True)
        assert assignment is not None
        total = totals(formulation.problem, assignment)
        price = itemise(formulator, structure, decision_of(formulation, assignment))
        for name in {*total, *price.charge}:
            assert price.charge.get(name, 0.0) == pytest.approx(total.get(name, 0.0), rel=1e-9), name
        sent = {(c.phase, c.count) for c in price.collectives if c.kind == "send_recv"}
        assert sent == {("forward", 6)} - ({("forward", 6)} if index == 2 else set()) | (
            {("backward", 6)} if index else set()
        )


@pytest.mark.parametrize(("index", "ac"), [(0, "none"), (0, "full"), (1, "selective"), (2, "none")])
def test_interleaved_stages_cost_alike_in_program_and_estimator(
    six_blocks: PlanningSession, index: int, ac: str
) -> None:
    """Every chunk sends and is sent to, and what is sent counts the micro-batches, not the passes."""
    whole = Search(six_blocks._search.traced, six_blocks.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock())
    stages = StageSearches(whole, lambda mesh: None, {3: ClusterSpec.parse("1x2xtoy")})
    counts, chunks = spread(6, 3) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=counts, micro_batches=6, ac=ac, chunks=chunks)
    kind = next(kind for kind in pipeline.kinds if index in kind.indices)
    search = stages.of(kind, 3)
    run = stages.run(search, kind, pipeline)
    parallel = ParallelSpec(
        micro_batch=1, micro_batches=6, seq=1, pipeline=3, schedule="interleaved", virtual_stages=chunks
    )
    assert chunks == 2
    assert run.passes == 6 + idle_share(parallel)
    assert run.in_flight == micro_batches_in_flight(parallel, index)
    formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, None))
    assert formulation is not None
    forward, backward = 2 - (index == 2), 2 - (index == 0)
    for seed in range(3):
        assignment = random_assignment(formulation.problem, seed, lambda node, choice: True)
        assert assignment is not None
        total, decision = totals(formulation.problem, assignment), decision_of(formulation, assignment)
        price, found = itemise(formulator, structure, decision), estimate(formulator, structure, decision)
        for name in {*total, *price.charge}:
            assert price.charge.get(name, 0.0) == pytest.approx(total.get(name, 0.0), rel=1e-9), name
        assert found.step_time_s == pytest.approx(step_time_s(total), rel=1e-9)
        sent = {(c.phase, c.count) for c in found.collectives if c.kind == "send_recv"}
        assert sent == {("forward", 6 * forward), ("backward", 6 * backward)}
        once_a_pass = [c for c in price.collectives if c.phase not in ONCE_A_STEP]
        assert sum(c.count for c in found.collectives if c.phase not in ONCE_A_STEP) == pytest.approx(
            sum(c.count for c in once_a_pass) * 6 / run.passes
        )
        assert all(isinstance(c.count, int) for c in found.collectives)


def test_chunks_wait_for_their_parameters_and_hold_one_gradient_handed_over(six_blocks: PlanningSession) -> None:
    stages = StageSearches(six_blocks._search, lambda mesh: None, {2: ClusterSpec.parse("1x2xtoy")})
    counts, chunks = spread(6, 2) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=counts, micro_batches=4, ac="none", chunks=chunks)
    assert chunks == 3
    for kind in pipeline.kinds:
        structure = stages.of(kind, 2).traced.structure(4)
        assert [sum(block.is_first + block.leading for block in structure.gathers)] == [chunks]
        order = OpOrder(structure.regions, structure.profile, structure.blocks, {})
        assert len(order.chunks) == chunks - 1
        graph = structure.regions.graph
        sent = {order.root(output.value) for output in graph.outputs if output.is_sent}
        received = {given.value for given in graph.inputs if given.path.startswith("pipeline.")}
        assert (len(sent), len(received)) == ((3, 2) if kind.role == "first" else (2, 3))
        for waiting in order.gradients.values():
            assert max(len(sent.intersection(waiting)), len(received.intersection(waiting))) <= 1


def test_chunks_in_flight_keep_what_their_forward_leaves(six_blocks: PlanningSession) -> None:
    """A rank earlier holds as many chunks more as the schedule says, of as many blocks."""
    stages = StageSearches(six_blocks._search, lambda mesh: None, {3: ClusterSpec.parse("1x1xtoy")})
    counts, chunks = spread(6, 3) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=1"), counts=counts, micro_batches=6, ac="none", chunks=chunks)
    kind = next(kind for kind in pipeline.kinds if kind.role == "middle")
    search = stages.of(kind, 3)
    peaks = []
    for index in (0, 1, 2):
        run = stages.run(search, dataclasses.replace(kind, indices=(index,)), pipeline)
        _, _, formulation = search.formulate(run, stages.restriction(search, run, None))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        peaks.append(peak_bytes(totals(formulation.problem, assignment)))
    # (p v + p - 1 - 2 r) / v micro-batches: 4, 3, 2.
    assert peaks[0] - peaks[1] == pytest.approx(peaks[1] - peaks[2])
    assert peaks[0] > peaks[1]


def test_every_micro_batch_in_flight_keeps_what_a_forward_leaves(session: PlanningSession) -> None:
    """On one device: what autograd saves, counted from the ops, is there once more for each."""
    stages = StageSearches(session._search, lambda mesh: None, {4: ClusterSpec.parse("1x1xtoy")})
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=1"), counts=(1, 2, 1, 1), micro_batches=4, ac="none")
    kind = next(kind for kind in kinds_of(pipeline.counts) if kind.indices == (1,))
    search = stages.of(kind, 4)
    peaks = []
    for index in (1, 3):
        place = StagePlace(index=index, stages=4, cluster=session.cluster)
        run = dataclasses.replace(stages.run(search, kind, pipeline), place=place)
        _, structure, formulation = search.formulate(run, stages.restriction(search, run, None))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        peaks.append(peak_bytes(totals(formulation.problem, assignment)))
    graph, profile = structure.regions.graph, structure.profile
    saved = {name for op in profile.ops.values() for name in op.saved if graph.values[name].kind != "parameter"}
    made = saved - {given.value for given in graph.inputs}
    held = sum(min(graph.values[name].nbytes, profile.storage_nbytes[name]) for name in made)
    held += sum(op.saved_extra_nbytes for op in profile.ops.values())
    handed = [given.value for given in graph.inputs] + [out.value for out in graph.outputs if out.is_sent]
    held += sum(graph.values[name].nbytes for name in handed)
    assert peaks[0] - peaks[1] == pytest.approx(2 * held)


def test_the_search_finds_the_split_that_brute_force_finds(session: PlanningSession) -> None:
    counts, stages = [4], 2
    walk = walk_of(session, counts, ["none"])
    found = walk.best().plan
    assert found is not None
    every = walk_of(session, counts, ["none"])._stages
    times = []
    for split in itertools.product(range(1, 5), repeat=stages):
        if sum(split) != 5:
            continue
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=split, micro_batches=4, ac="none")
        search = every.of(kinds_of(split)[0], stages)
        task = SolvePipeline(
            pipeline=pipeline, bounds=(0.0,) * stages, floors={}, at_most_s=math.inf, mip_gap=1e-3, left_s=None
        )
        looks = list(task._looks(every))
        assert [look.layout for look in looks] == every.layouts(search, pipeline.mesh, 4)
        for look in looks:
            bounds = [0.0] * stages
            planned = task._planned(every, look, bounds, math.inf, None)
            assert planned is not None
            # Each stage to a gap of its own, and the step within the one that was asked for.
            assert planned.step_time_s <= least_step_s(bounds, pipeline.micro_batches) * (1 + 1e-3) + 1e-12
            times.append(planned.step_time_s)
    assert found.pipeline.counts in ((2, 3), (3, 2))
    assert found.step_time_s == pytest.approx(min(times), rel=2e-3)


@pytest.mark.parametrize("cap", [10**12, 400_000])
def test_looks_at_stages_bound_what_comes_after_them(session: PlanningSession, cap: int) -> None:
    """A floor is no more than the relaxation of any run that it is for; what is counted is no more than what fits."""
    modes = ["none", "selective", "full"]
    bench = Bench(Search(session._search.traced, session.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock()))
    bench.take(Terms(memory_bytes=cap, restrict=lambda mesh: None))
    work, memory = Work.of_model(bench.search, 1, modes), BlockMemory.of(bench.stages, BATCH, modes, session.job)
    looked = 0
    for count, ac, split in itertools.product((2, 4), modes, ((1, 3, 1), (2, 2, 1))):
        pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=split, micro_batches=count, ac=ac)
        share = (count + 2) / count / pipeline.mesh.size
        kind = next(kind for kind in kinds_of(split) if kind.indices == (1,))
        again_s = {mode: again * share for mode, again in work.again_s.items()}
        fewest = dataclasses.replace(kind, blocks=2)
        floor = BoundStage(kind=fewest, pipeline=pipeline, again_s=again_s)(bench)
        bound_s = RelaxStage(kind=kind, pipeline=pipeline, floor=None, limit_s=math.inf)(bench)
        assert work.bounds(pipeline)[1] <= bound_s
        assert floor.bounds_s.get(ac, math.inf) <= bound_s * (1 + 1e-9)
        search = bench.stages.of(kind, 3)
        run = bench.stages.run(search, kind, pipeline)
        formulation = search.formulate(run, bench.stages.restriction(search, run, None))[2]
        assert formulation is not None
        least = least_memory_bound(formulation.problem)
        assert least is not None
        counted = memory.of_stage(kind.blocks, run, BATCH // count) / run.mesh.size + reserve_bytes(run.cluster.device)
        assert 0 < counted <= least
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


@pytest.mark.parametrize("ac", ["none", "full"])
def test_a_stage_in_one_piece_bounds_one_in_chunks(six_blocks: PlanningSession, ac: str) -> None:
    """Both its floors do, that of one piece by the share of the passes that are left."""
    bench = Bench(Search(six_blocks._search.traced, six_blocks.job, ClusterSpec.parse("2x2xtoy"), BATCH, Clock()))
    bench.take(Terms(memory_bytes=10**12, restrict=lambda mesh: None))
    work = Work.of_model(bench.search, 1, [ac])
    counts, chunks = spread(6, 2) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), counts=counts, micro_batches=4, ac=ac, chunks=chunks)
    whole = dataclasses.replace(pipeline, chunks=1)
    for kind, plain in zip(pipeline.kinds, whole.kinds, strict=True):
        bound_s = RelaxStage(kind=kind, pipeline=pipeline, floor=None, limit_s=math.inf)(bench)
        for stage, of in ((kind, pipeline), (plain, whole)):
            share = of.passes / of.micro_batches / of.mesh.size
            again_s = {mode: again * share for mode, again in work.again_s.items()}
            floor = BoundStage(kind=stage, pipeline=of, again_s=again_s)(bench)
            assert 0.0 < floor.bounds_s[ac] * pipeline.passes / of.passes <= bound_s * (1 + 1e-9)
        for index in kind.indices:
            assert work.bounds(pipeline)[index] <= bound_s


def test_of_a_search_without_a_cap_on_time_nothing_is_left_open(session: PlanningSession) -> None:
    piped = walk_of(session, [2, 4], ["none", "full"]).best()
    assert piped.plan is not None
    assert piped.complete
    assert piped.bound_s <= piped.plan.step_time_s <= piped.bound_s * (1 + 2e-3)
    assert walk_of(session, [2, 4], ["none", "full"]).best(piped.plan.step_time_s * 0.9).plan is None


def test_on_slow_nodes_a_pipeline_wins(pipelined: ShardingPlan) -> None:
    executable = session_of(SLOW, ac="none", micro_batches=8).plan()
    assert executable.pipeline is None
    assert executable.estimate is not None
    assert pipelined.pipeline is not None
    assert pipelined.estimate is not None
    assert pipelined.solver is not None
    assert pipelined.estimate.step_time_s < executable.estimate.step_time_s
    assert pipelined.solver.gap is not None
    assert 0 <= pipelined.solver.gap < 0.02
    chosen = [mesh.mesh for mesh in pipelined.solver.meshes if mesh.outcome == "chosen"]
    assert chosen == [str(pipelined.mesh)]


def test_a_mesh_can_say_how_many_stages_there_are(pipelined: ShardingPlan) -> None:
    planned = session_of(SLOW, executable_only=False, ac="none", micro_batches=8)
    given = planned.plan(mesh=str(pipelined.mesh))
    assert given.mesh == pipelined.mesh
    assert given.estimate is not None
    assert pipelined.estimate is not None
    assert given.solver is not None
    assert given.estimate.step_time_s == pytest.approx(pipelined.estimate.step_time_s, rel=2e-3)
    assert [mesh.mesh for mesh in given.solver.meshes] == [str(pipelined.mesh)]
    deeper = planned.plan(mesh="pp=4,dp=1")
    assert deeper.pipeline is not None
    assert len(deeper.pipeline.stages) == 4
    with pytest.raises(InfeasibleError, match="pp=4,dp=1"):
        planned.plan(mesh="pp=4,dp=1", memory_bytes=1000)


@pytest.mark.parametrize(
    ("mesh", "options", "advice"),
    [
        ("pp=2,dp=2", {"executable_only": True}, "no-executable-only"),
        ("dp=2,pp=2", {}, "outermost"),
        ("pp=4", {}, "outermost"),
        ("pp=1,dp=4", {}, "Choose 2, 4 stages"),
        ("pp=2,dp=2", {"planner": "fully-sharded"}, "Choose the planner ilp"),
    ],
)
def test_a_mesh_whose_stages_cannot_be_is_refused(mesh: str, options: dict[str, Any], advice: str) -> None:
    planner = options.pop("planner", "ilp")
    planned = session_of(SLOW, **({"executable_only": False, "ac": "none", "micro_batches": 8} | options))
    with pytest.raises(MeshError) as refused:
        planned.plan(mesh=mesh, planner=planner)
    assert advice in f"{refused.value} {refused.value.what_to_do}"


def test_stages_take_a_batch_that_divides() -> None:
    with pytest.raises(MeshError, match="divides the samples"):
        session_of(SLOW, executable_only=False, micro_batches=16).plan(mesh="pp=2,dp=2")


def test_a_pipelines_figures_add_up(pipelined: ShardingPlan) -> None:
    pipeline, estimate = pipelined.pipeline, pipelined.estimate
    assert pipeline is not None
    assert estimate is not None
    parts = (estimate.forward_s, estimate.backward_s, estimate.grad_reduce_s, estimate.optimizer_s, pipeline.idle_s)
    assert sum(parts) == pytest.approx(estimate.step_time_s)
    seconds, m = [stage.micro_batch_s for stage in pipeline.stages], pipelined.micro_batches
    assert (m - 1) * max(seconds) + sum(seconds) + estimate.optimizer_s == pytest.approx(estimate.step_time_s)
    assert estimate.peak_memory_bytes == max(stage.peak_memory_bytes for stage in pipeline.stages)
    assert sum(estimate.memory.values()) == estimate.peak_memory_bytes
    assert {row.count for row in estimate.collectives if row.kind == "send_recv"} == {m}


def test_an_interleaved_plan_says_which_chunks_a_rank_has(interleaved: ShardingPlan) -> None:
    pipeline, estimate = interleaved.pipeline, interleaved.estimate
    assert pipeline is not None
    assert estimate is not None
    assert (pipeline.schedule, pipeline.chunks) == ("interleaved", 3)
    blocks = [[f"model.layers.{number}" for number in numbers] for numbers in ((0, 2, 4), (1, 3, 5))]
    first, last = (list(stage.modules) for stage in pipeline.stages)
    assert first == ["model.embed_tokens", *blocks[0]]
    assert last == [*blocks[1], "model.norm", "lm_head"]
    parts = (estimate.forward_s, estimate.backward_s, estimate.grad_reduce_s, estimate.optimizer_s, pipeline.idle_s)
    assert sum(parts) == pytest.approx(estimate.step_time_s)
    seconds, m = [stage.micro_batch_s for stage in pipeline.stages], interleaved.micro_batches
    together_s = m * max(seconds) + min(seconds) / 3
    assert together_s + estimate.optimizer_s == pytest.approx(estimate.step_time_s)
    assert interleaved.solver is not None
    assert interleaved.solver.objective_s == pytest.approx(estimate.step_time_s)
    slowest = max(pipeline.stages, key=lambda stage: stage.micro_batch_s)
    forward = m * (3 if slowest == pipeline.stages[0] else 2)
    sent = {(row.phase, row.count) for row in estimate.collectives if row.kind == "send_recv"}
    assert sent == {("forward", forward), ("backward", 5 * m - forward)}
    assert ShardingPlan.from_dict(interleaved.to_dict()) == interleaved


def test_a_pipelines_plan_names_every_parameter_once(pipelined: ShardingPlan) -> None:
    assert pipelined.pipeline is not None
    names = [name for stage in pipelined.pipeline.stages for name in stage.modules]
    assert names[0] == "model.embed_tokens"
    assert names[-2:] == ["model.norm", "lm_head"]
    assert "model.layers.*.mlp.up_proj.weight" in pipelined.plan
    assert not [key for key in (*pipelined.input_plan, *pipelined.output_plan) if "pipeline" in key]
    assert {len(layout) for _, _, layout in pipelined.layouts()} == {len(pipelined.mesh.axes) - 1}


def test_a_pipelines_plan_survives_its_file(pipelined: ShardingPlan) -> None:
    assert ShardingPlan.from_dict(pipelined.to_dict()) == pipelined
    assert pipelined.pipeline is not None
    before_chunks = {name: value for name, value in pipelined.to_dict()["pipeline"].items() if name != "chunks"}
    assert ShardingPlan.from_dict(pipelined.to_dict() | {"pipeline": before_chunks}) == pipelined
    with pytest.raises(MeshError, match="3 chunks"):
        dataclasses.replace(pipelined, pipeline=dataclasses.replace(pipelined.pipeline, chunks=3)).validate()
    document = pipelined.to_dict() | {"mesh": {"names": ["dp"], "shape": [4], "device": "cpu"}}
    with pytest.raises(PlanFormatError):
        ShardingPlan.from_dict(document)


def test_a_pipelines_plan_is_refused_where_it_cannot_be_run(pipelined: ShardingPlan) -> None:
    from executor.checks import check_plan
    from executor.verify import verify

    with quiet_libraries():
        module = load_model(CONFIG, seq=32).module
    with pytest.raises(PlanError, match="executable"):
        estimate_plan(module, pipelined)
    with pytest.raises(PlanError, match="executable"):
        verify(module, pipelined, {})
    with pytest.raises(PlanError, match="executable"):
        check_plan(module, None, pipelined)  # type: ignore[arg-type]


def test_stages_share_the_nodes_of_the_cluster() -> None:
    cluster = ClusterSpec.parse(SLOW)
    assert math.prod(next(c.size for p, c in stage_clusters(cluster, 4) if p == stages) for stages in (2, 4)) == 2
