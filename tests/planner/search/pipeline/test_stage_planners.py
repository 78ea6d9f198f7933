"""Stages of pipelines: their prices, what they hold, and the devices that they get."""

from __future__ import annotations

import dataclasses
import math

import pytest
from support.pipeline_sessions import BATCH, SLOW, session_of
from support.searches import unrestricted

from cost_model import ClusterSpec
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import idle_share, micro_batches_in_flight
from cost_model.layouts.layout import MeshSpec
from planner.formulation.decision import decision_from_assignment
from planner.formulation.estimate import estimate, itemise
from planner.ilp.problem import totals
from planner.ilp.quantities import Kind
from planner.ilp.random_assignment import random_assignment
from planner.ilp.step_cost import peak_bytes, step_time_s
from planner.liveness.op_order import OpOrder
from planner.plan.estimate import ONCE_A_STEP
from planner.pricing.run_spec import StagePlace
from planner.run.run_planner import RunPlanner
from planner.run.stage_clock import Clock
from planner.search.pipeline.interleaving import interleaved as spread
from planner.search.pipeline.stage_planners import PipelineRun, StagePlanners, stage_clusters
from planner.search.pipeline.step_time import kinds_of
from planner.session import PlanningSession


@pytest.fixture(scope="module")
def session() -> PlanningSession:
    return session_of("1x4xtoy")


@pytest.fixture(scope="module")
def six_blocks() -> PlanningSession:
    return session_of("1x4xtoy", blocks=6)


@pytest.mark.parametrize(("index", "ac"), [(0, "none"), (0, "full"), (1, "selective"), (2, "none")])
def test_stages_cost_alike_in_program_and_estimator(session: PlanningSession, index: int, ac: str) -> None:
    whole = RunPlanner(session._planner.model, session.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock())
    stages = StagePlanners(whole, {3: ClusterSpec.parse("1x2xtoy")})
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), blocks_per_stage=(1, 3, 1), micro_batches=4, ac=ac)
    kind = next(kind for kind in kinds_of(pipeline.blocks_per_stage) if index in kind.indices)
    search = stages.planner(kind, 3)
    run = stages.run(search, kind, pipeline)
    assert run.in_flight == 3 - index
    formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
    assert formulation is not None
    for seed in range(3):
        assignment = random_assignment(formulation.problem, seed, lambda node, choice: True)
        assert assignment is not None
        total = totals(formulation.problem, assignment)
        price = itemise(formulator, structure, decision_from_assignment(formulation, assignment))
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
    whole = RunPlanner(six_blocks._planner.model, six_blocks.job, ClusterSpec.parse("3x2xtoy"), BATCH, Clock())
    stages = StagePlanners(whole, {3: ClusterSpec.parse("1x2xtoy")})
    counts, chunks = spread(6, 3) or ((), 1)
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=2"), blocks_per_stage=counts, micro_batches=6, ac=ac, chunks=chunks)
    kind = next(kind for kind in pipeline.kinds if index in kind.indices)
    search = stages.planner(kind, 3)
    run = stages.run(search, kind, pipeline)
    parallel = ParallelSpec(
        micro_batch=1, micro_batches=6, seq=1, pipeline=3, schedule="interleaved", virtual_stages=chunks
    )
    assert chunks == 2
    assert run.passes == 6 + idle_share(parallel)
    assert run.in_flight == micro_batches_in_flight(parallel, index)
    formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
    assert formulation is not None
    forward, backward = 2 - (index == 2), 2 - (index == 0)
    for seed in range(3):
        assignment = random_assignment(formulation.problem, seed, lambda node, choice: True)
        assert assignment is not None
        total, decision = totals(formulation.problem, assignment), decision_from_assignment(formulation, assignment)
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


@pytest.mark.parametrize("device", ["h100-sxm-80gb", "cpu"])
def test_a_rank_with_several_chunks_waits_for_messages_while_it_is_idle(
    six_blocks: PlanningSession, device: str
) -> None:
    """Micro-batches' messages run beside computing where a device can do both; 1F1B without chunks waits for each."""
    cluster = ClusterSpec.parse(f"3x2x{device}")
    whole = RunPlanner(six_blocks._planner.model, six_blocks.job, cluster, BATCH, Clock())
    stages = StagePlanners(whole, {3: dataclasses.replace(cluster, nodes=1)})
    counts, chunks = spread(6, 3) or ((), 1)
    pipeline = PipelineRun(
        mesh=MeshSpec.parse("dp=2"), blocks_per_stage=counts, micro_batches=6, ac="none", chunks=chunks
    )
    plain = dataclasses.replace(pipeline, chunks=1)

    def messages_s(of: PipelineRun) -> tuple[float, float, float]:
        """Return the seconds of a middle stage's messages, those that it waits for, and what they add to a step."""
        kind = next(kind for kind in of.kinds if kind.role == "middle")
        search = stages.planner(kind, 3)
        run = stages.run(search, kind, of)
        formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        decision = decision_from_assignment(formulation, assignment)
        price = itemise(formulator, structure, decision)
        sent = [c for c in price.collectives if c.kind == "send_recv"]
        assert {c.axis for c in sent} == {"pp"}
        waited = sum(s for q, s in price.charge.items() if q.kind is Kind.BLOCKING and q.link == "between-nodes")
        slowed = sum(s for q, s in price.charge.items() if q.kind is Kind.SLOWDOWN)
        return sum(c.count * c.time_s for c in sent), waited, slowed

    total_s, waited_s, slowed_s = messages_s(pipeline)
    assert total_s > 0
    if not cluster.device.overlaps:
        assert waited_s == pytest.approx(total_s)
    else:
        idle = pipeline.passes - pipeline.micro_batches
        assert waited_s == pytest.approx(total_s * idle / pipeline.passes)
        assert slowed_s > 0
    plain_s, waited_s, _ = messages_s(plain)
    assert waited_s == pytest.approx(plain_s)
    total_s, waited_s, _ = messages_s(dataclasses.replace(plain, bounds_chunks=True))
    assert total_s == pytest.approx(plain_s)
    assert waited_s == pytest.approx(0.0 if cluster.device.overlaps else total_s)


def test_chunks_wait_for_their_parameters_and_hold_one_boundary_gradient(six_blocks: PlanningSession) -> None:
    stages = StagePlanners(six_blocks._planner, {2: ClusterSpec.parse("1x2xtoy")})
    counts, chunks = spread(6, 2) or ((), 1)
    pipeline = PipelineRun(
        mesh=MeshSpec.parse("dp=2"), blocks_per_stage=counts, micro_batches=4, ac="none", chunks=chunks
    )
    assert chunks == 3
    for kind in pipeline.kinds:
        structure = stages.planner(kind, 2).model.structure(4)
        assert [sum(block.is_first + block.chunk_heads for block in structure.fsdp_groups)] == [chunks]
        order = OpOrder(structure.regions, structure.profile, structure.blocks, {})
        assert len(order.chunks) == chunks - 1
        graph = structure.regions.graph
        sent = {order.root(output.value) for output in graph.outputs if output.is_sent}
        received = {given.value for given in graph.inputs if given.path.startswith("pipeline.")}
        assert (len(sent), len(received)) == ((3, 2) if kind.role == "first" else (2, 3))
        for waiting in order.gradients.values():
            assert max(len(sent.intersection(waiting)), len(received.intersection(waiting))) <= 1


def test_a_chunk_without_a_block_waits_for_none_and_holds_none(six_blocks: PlanningSession) -> None:
    cluster = ClusterSpec.parse("4x2xtoy")
    whole = RunPlanner(six_blocks._planner.model, six_blocks.job, cluster, BATCH, Clock())
    stages = StagePlanners(whole, {4: dataclasses.replace(cluster, nodes=1)})
    counts, chunks = spread(6, 4) or ((), 1)
    assert (counts, chunks) == ((1, 2, 2, 1), 2)
    pipeline = PipelineRun(
        mesh=MeshSpec.parse("dp=2"), blocks_per_stage=counts, micro_batches=4, ac="none", chunks=chunks
    )
    for kind in pipeline.kinds:
        search = stages.planner(kind, 4)
        ends = 0 if kind.role == "middle" else 1
        assert [sum(b.is_first + b.chunk_heads for b in search.model.structure(2).fsdp_groups)] == [chunks - ends]
        run = stages.run(search, kind, pipeline)
        assert run.in_flight == 4  # all of them: the schedule would hold as many or more
        assert run.place is not None
        assert run.place.end_alone is bool(ends)
        formulator, structure, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
        assert formulation is not None
        for seed in range(5):
            assignment = random_assignment(formulation.problem, seed, lambda node, choice: True)
            assert assignment is not None
            price = itemise(formulator, structure, decision_from_assignment(formulation, assignment))
            assert min(s for q, s in price.charge.items() if q.phase is not None) >= 0.0


def test_chunks_in_flight_keep_what_their_forward_leaves(six_blocks: PlanningSession) -> None:
    """A rank earlier holds as many chunks more as the schedule says, of as many blocks."""
    stages = StagePlanners(six_blocks._planner, {3: ClusterSpec.parse("1x1xtoy")})
    counts, chunks = spread(6, 3) or ((), 1)
    pipeline = PipelineRun(
        mesh=MeshSpec.parse("dp=1"), blocks_per_stage=counts, micro_batches=6, ac="none", chunks=chunks
    )
    kind = next(kind for kind in pipeline.kinds if kind.role == "middle")
    search = stages.planner(kind, 3)
    peaks = []
    for index in (0, 1, 2):
        run = stages.run(search, dataclasses.replace(kind, indices=(index,)), pipeline)
        _, _, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        peaks.append(peak_bytes(totals(formulation.problem, assignment)))
    # (p v + p - 1 - 2 r) / v micro-batches: 4, 3, 2.
    assert peaks[0] - peaks[1] == pytest.approx(peaks[1] - peaks[2])
    assert peaks[0] > peaks[1]


def test_every_micro_batch_in_flight_keeps_what_a_forward_leaves(session: PlanningSession) -> None:
    """On one device: what autograd saves, counted from the ops, is there once more for each."""
    stages = StagePlanners(session._planner, {4: ClusterSpec.parse("1x1xtoy")})
    pipeline = PipelineRun(mesh=MeshSpec.parse("dp=1"), blocks_per_stage=(1, 2, 1, 1), micro_batches=4, ac="none")
    kind = next(kind for kind in kinds_of(pipeline.blocks_per_stage) if kind.indices == (1,))
    search = stages.planner(kind, 4)
    peaks = []
    for index in (1, 3):
        place = StagePlace(index=index, stages=4, cluster=session.cluster)
        run = dataclasses.replace(stages.run(search, kind, pipeline), place=place)
        _, structure, formulation = search.formulate(run, stages.restriction(search, run, unrestricted, None))
        assert formulation is not None
        assignment = random_assignment(formulation.problem, 0, lambda node, choice: True)
        assert assignment is not None
        peaks.append(peak_bytes(totals(formulation.problem, assignment)))
    graph, profile = structure.regions.graph, structure.profile
    saved = {name for op in profile.ops.values() for name in op.saved if graph.values[name].kind != "parameter"}
    made = saved - {given.value for given in graph.inputs}
    held = sum(min(graph.values[name].nbytes, profile.storage_nbytes[name]) for name in made)
    held += sum(op.saved_extra_nbytes for op in profile.ops.values())
    boundary = [given.value for given in graph.inputs] + [out.value for out in graph.outputs if out.is_sent]
    held += sum(graph.values[name].nbytes for name in boundary)
    assert peaks[0] - peaks[1] == pytest.approx(2 * held)


def test_stages_share_the_nodes_of_the_cluster() -> None:
    cluster = ClusterSpec.parse(SLOW)
    assert math.prod(next(c.size for p, c in stage_clusters(cluster, 4) if p == stages) for stages in (2, 4)) == 2
