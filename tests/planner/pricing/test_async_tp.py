"""Async tensor parallelism: the overlapped part of a redistribution against hand-worked numbers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support import families
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError, PlanError
from planner.ilp.quantities import BACKWARD, FORWARD
from planner.plan.sharding_plan import Estimate, ShardingPlan
from planner.pricing.overlap import AdjacentGemms, GemmWork, Overlap
from planner.pricing.port_layouts import PortLayouts
from planner.pricing.price import Price
from planner.pricing.redistribution_costs import RedistributedTensor, RedistributionPricer
from planner.session import PlanningSession
from planner.writing.notes import ASYNC_TP_NOTE
from planner.writing.reprice import estimate_plan

R, P, S1 = Replicate(), Partial(), Shard(1)
SPLIT, WHOLE, SUMS = (R, S1), (R, R), (R, P)
CALLS = 3
LINK = "inside-node"


def price_of(source: tuple, target: tuple, gemms: AdjacentGemms | None, mesh: str = "dp=2,tp=4") -> tuple[Price, float]:
    """Return the price of redistributing a tensor between two ports, and the seconds of its first collective."""
    pricer = RedistributionPricer(MeshSpec.parse(mesh), ClusterSpec.parse("2x4xh100-sxm-80gb"))
    tensor = RedistributedTensor((8, 1024, 4096), 2, CALLS, True, gemms)
    numbers = [pricer.ports.number(PortLayouts(*port)) for port in (source, target)]
    price = pricer.both_ways(tensor, *numbers)
    assert price is not None
    return price, price.collectives[0].time_s


@pytest.mark.parametrize("part", [0.25, 0.5, 2.0])
def test_an_all_gather_overlaps_with_its_consumers_and_the_reduce_scatter_but_for_a_piece(part: float) -> None:
    # Korthikanti et al.'s g: all-gather forward, reduce-scatter backward, 64 MiB each.
    _, gather_s = price_of((SPLIT, SPLIT), (WHOLE, SUMS), None)
    price, _ = price_of(
        (SPLIT, SPLIT), (WHOLE, SUMS), AdjacentGemms(GemmWork(part * gather_s, 3.0), GemmWork(5.0, 7.0))
    )
    reduce_s = next(c.time_s for c in price.collectives if c.kind == "reduce_scatter")
    taken = Overlap.of(ClusterSpec.parse("1xh100-sxm-80gb").device).taken_share
    overlapped_s = min(part, 1.0) * gather_s
    assert price.charge == pytest.approx({
        FORWARD.blocking[LINK]: CALLS * (gather_s - overlapped_s),
        FORWARD.prefetch[LINK]: CALLS * overlapped_s,
        FORWARD.slowdown: CALLS * overlapped_s * taken,
        BACKWARD.blocking[LINK]: CALLS * reduce_s / 4,
        BACKWARD.prefetch[LINK]: CALLS * reduce_s * 3 / 4,
        BACKWARD.slowdown: CALLS * reduce_s * 3 / 4 * taken,
    })  # fmt: skip


def test_a_reallgather_overlaps_with_the_gemm_of_the_inputs_gradient() -> None:
    _, gather_s = price_of((SPLIT, SPLIT), (WHOLE, SUMS, True), None)
    price, _ = price_of(
        (SPLIT, SPLIT), (WHOLE, SUMS, True), AdjacentGemms(GemmWork(gather_s / 2, 3.0), GemmWork(5.0, 7.0))
    )
    reduce_s = next(c.time_s for c in price.collectives if c.kind == "reduce_scatter")
    assert [(c.kind, c.phase) for c in price.collectives] == [
        ("all_gather", "backward"), ("all_gather", "forward"), ("reduce_scatter", "backward")
    ]  # fmt: skip
    assert price.charge[FORWARD.blocking[LINK]] == pytest.approx(CALLS * gather_s / 2)
    assert price.charge[BACKWARD.blocking[LINK]] == pytest.approx(CALLS * (gather_s / 2 + reduce_s / 4))
    pricer = RedistributionPricer(MeshSpec.parse("dp=2,tp=4"), ClusterSpec.parse("2x4xh100-sxm-80gb"))
    number = pricer.ports.number
    for source in ((WHOLE, SUMS), (SUMS, WHOLE), ((S1, R), (S1, R))):
        producer = number(PortLayouts(*source))
        consumer = number(PortLayouts(SPLIT if source[0] == (S1, R) else WHOLE, SUMS, True))
        assert pricer.both_ways(RedistributedTensor((8, 1024, 4096), 2, CALLS, True), producer, consumer) is None


def test_a_reduction_and_its_gradients_all_gather_overlap_with_the_producer() -> None:
    gemms = AdjacentGemms(GemmWork(5.0, 7.0), GemmWork(1e-6, 2e-6))
    price, reduce_s = price_of((SUMS, WHOLE), (SPLIT, SPLIT), gemms)
    gather_s = next(c.time_s for c in price.collectives if c.kind == "all_gather")
    assert price.charge[FORWARD.blocking[LINK]] == pytest.approx(CALLS * (reduce_s - 1e-6))
    assert price.charge[BACKWARD.blocking[LINK]] == pytest.approx(CALLS * (gather_s - 2e-6))
    price, reduce_s = price_of((SUMS, WHOLE), (WHOLE, WHOLE), AdjacentGemms(GemmWork(0.0, 0.0), GemmWork(1.0, 1.0)))
    assert [c.kind for c in price.collectives] == ["all_reduce"]
    assert price.charge[FORWARD.blocking[LINK]] == pytest.approx(CALLS * reduce_s / 4)


@pytest.mark.parametrize(
    ("source", "target", "mesh"),
    [
        # Between nodes; on an axis that is not the innermost; as two collectives; an all-to-all.
        (SPLIT, WHOLE, "dp=1,tp=8"),
        ((S1, R), WHOLE, "tp=4,dp=2"),
        ((S1, Shard(0)), WHOLE, "dp=2,tp=4"),
        (SPLIT, (R, Shard(0)), "dp=2,tp=4"),
    ],
)
def test_no_other_redistribution_overlaps(source: tuple, target: tuple, mesh: str) -> None:
    plenty = AdjacentGemms(GemmWork(1.0, 1.0), GemmWork(1.0, 1.0))
    ports = (source, source), (target, target)
    assert price_of(*ports, plenty, mesh)[0].charge == price_of(*ports, None, mesh)[0].charge


def session_of(family: str, async_tp: bool, **options: Any) -> tuple[nn.Module, Any, PlanningSession]:
    """Return a module, its inputs and a session on four toy devices, whose links are as slow as their GEMMs."""
    module, inputs = families.make(family, 8)
    cluster = ClusterSpec.parse({
        "nodes": 1, "devices_per_node": 4, "device": "toy", "intra_node": {"bandwidth_bytes_per_s": 1e8}
    })  # fmt: skip
    tp_plan = {"fc1": "colwise", "fc2": "rowwise"} if family == "mlp" else None
    job: dict[str, Any] = {"dtype": "fp32", "micro_batches": 1, "ac": "none", "tp_plan": tp_plan, **options}
    return (
        module,
        inputs,
        PlanningSession(
            module,
            cluster=cluster,
            example_inputs=inputs,
            async_tp=async_tp,
            executable_only=not async_tp,
            **job,
        ),
    )


def estimate_of(plan: ShardingPlan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def test_the_step_of_two_layers_by_hand() -> None:
    """fc1 is column-wise, fc2 row-wise on 4 ranks: the reduce-scatter of fc2's result overlaps with fc2's GEMM.

    The all-gather of its gradient overlaps with the two GEMMs of fc2's backward. The logits are all-gathered for the
    loss, which is no GEMM.
    """
    plain, overlapped = (session_of("mlp", on)[2].plan(planner="tensor-parallel", mesh="tp=4") for on in (False, True))
    assert overlapped.plan == plain.plan
    seconds = {(row.kind, row.phase): row.time_s for row in estimate_of(plain).collectives}
    gemm_s = 2 * 8 * 256 * 64 / 4 / 1e9
    for phase, overlapped_s in (
        ("forward_s", min(seconds["reduce_scatter", "forward"] * 3 / 4, gemm_s)),
        ("backward_s", min(seconds["all_gather", "backward"], 2 * gemm_s)),
    ):
        saved_s = getattr(estimate_of(plain), phase) - getattr(estimate_of(overlapped), phase)
        assert saved_s == pytest.approx(overlapped_s, rel=1e-9)
    assert estimate_of(overlapped).collectives == estimate_of(plain).collectives


@pytest.mark.parametrize(
    ("micro_batches", "ac"),
    [
        (2, "full"),
        pytest.param(1, "none", marks=pytest.mark.slow),
        pytest.param(1, "selective", marks=pytest.mark.slow),
    ],
)
def test_a_plan_has_the_same_price_from_its_file_and_is_no_slower_than_with_blocking_communication(
    micro_batches: int, ac: str
) -> None:
    options = {"micro_batches": micro_batches, "ac": ac}
    module, inputs, session = session_of("llama", True, **options)
    without = session_of("llama", False, **options)[2]
    faster = 0
    for mesh in ("tp=4", "dp=2,tp=2"):
        for planner in ("ilp", "tensor-parallel", "random:0"):
            plan = session.plan(planner=planner, mesh=mesh)
            estimate = estimate_of(plan)
            assert plan.solver is not None
            if plan.solver.objective_s is not None:
                assert plan.solver.objective_s == pytest.approx(estimate.step_time_s, rel=1e-9)
            read = ShardingPlan.from_dict(json.loads(plan.to_json()) | {"estimate": None, "solver": None})
            assert read.job.async_tp
            assert estimate_of(estimate_plan(module, read, example_inputs=inputs)) == estimate
            blocking_plan = dataclasses.replace(read, job=dataclasses.replace(read.job, async_tp=False))
            blocking = estimate_of(estimate_plan(module, blocking_plan, example_inputs=inputs))
            assert estimate.step_time_s <= blocking.step_time_s * (1 + 1e-12)
            assert estimate.collectives == blocking.collectives
            assert estimate.memory == blocking.memory
            faster += estimate.step_time_s < blocking.step_time_s * 0.999
            if planner == "ilp":
                best = estimate_of(without.plan(planner=planner, mesh=mesh)).step_time_s
                assert estimate.step_time_s <= best * (1 + session.job.mip_gap)
    assert faster > 1


def test_the_bound_of_a_search_holds_for_each_mesh_and_micro_batch_count() -> None:
    best = session_of("mlp", True, micro_batches=None)[2].plan()
    assert best.solver is not None
    assert best.solver.bound_s is not None
    for count in (1, 2):
        for mesh in ("tp=4", "dp=2,tp=2"):
            plan = session_of("mlp", True, micro_batches=count)[2].plan(mesh=mesh)
            assert estimate_of(plan).step_time_s >= best.solver.bound_s * (1 - 1e-9)


def test_the_plan_states_the_assumption_and_cannot_be_run() -> None:
    module, inputs, session = session_of("mlp", True)
    plan = session.plan(planner="tensor-parallel", mesh="tp=4")
    assert ASYNC_TP_NOTE in plan.notes
    with pytest.raises(PlanError, match="async_tp"):
        plan.check_runs()
    with pytest.raises(JobError, match="--no-executable-only"):
        PlanningSession(module, cluster="4xtoy", example_inputs=inputs, async_tp=True)


def test_an_all_gather_overlaps_with_the_gemms_of_all_its_consumers() -> None:
    """The three GEMMs of queries, keys and values read one tensor; that of the keys alone is short."""
    module, inputs = families.make("llama", 8)
    options: dict[str, Any] = {"micro_batches": 1, "ac": "none", "dtype": "bf16", "executable_only": False}
    session = PlanningSession(module, cluster="1x4xh100-sxm-80gb", example_inputs=inputs, async_tp=True, **options)
    run = session._planner.run_of(MeshSpec.parse("dp=2,tp=2"), 1, "none")
    formulator, structure = session._planner.formulator(run)
    read_by: dict[tuple[str, ...], float] = {}
    for multiplicity in structure.redistributions:
        consumers = [structure.edges[edge].consumer for edge in multiplicity.edges]
        names = sorted({structure.regions.classes[index].pattern.rpartition(".")[2] for index in consumers})
        gemms = formulator.adjacent_gemms(multiplicity)
        assert gemms is not None
        read_by[tuple(names)] = gemms.consumers.forward
    flops = {
        graph.calls[op.call].fqn.rpartition(".")[2]: structure.profile.ops[op.name].flops
        for graph in [structure.regions.graph]
        for op in graph.ops
        if op.target_name == "aten.linear.default"
    }
    expected = sum(flops[name] for name in ("q_proj", "k_proj", "v_proj"))
    assert flops["k_proj"] < flops["q_proj"]
    assert read_by["k_proj", "q_proj", "v_proj"] / read_by["o_proj",] == pytest.approx(expected / flops["o_proj"])
