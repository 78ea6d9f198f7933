"""FSDP groups: the parameters that they can hold, their collectives and bytes, and their fields in the plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support import families
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import Layout, MeshSpec
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.storage_options import StorageOption, fsdp_use_layouts
from planner.session import PlanningSession

R, P = Replicate(), Partial()


def fully_sharded(family: str, mesh: str, **options: object) -> tuple[nn.Module, ShardingPlan]:
    module, inputs = families.make(family, 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", **options)  # type: ignore[arg-type]
    return module, session.plan(planner="fully-sharded", mesh=mesh)


def rows(plan: ShardingPlan, kind: str, phase: str) -> dict[int, int]:
    """Return bytes -> calls of one kind in one phase."""
    assert plan.estimate is not None
    return {row.bytes: row.count for row in plan.estimate.collectives if (row.kind, row.phase) == (kind, phase)}


def block_nbytes(module: nn.Module, plan: ShardingPlan, pattern: str) -> tuple[int, int]:
    """Return the float32 bytes of one block's FSDP group, and the number of blocks that ``pattern`` matches."""
    parameters = dict(module.named_parameters())
    count = len({name.split(".")[2] for name in parameters if name.startswith(pattern.removesuffix("*"))})
    names = plan.fully_shard[pattern]
    return sum(parameters[f"{pattern.replace('*', '0')}.{name}"].numel() for name in names) * 4, count


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_group_has_one_all_gather_and_one_reduce_scatter(micro_batches: int) -> None:
    module, plan = fully_sharded("llama", "dp=4", micro_batches=micro_batches)
    ((pattern, names),) = plan.fully_shard.items()
    assert pattern == "model.layers.*"
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} <= set(names)
    nbytes, blocks = block_nbytes(module, plan, pattern)
    each = (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
    once = (("all_gather", "param_gather"), ("reduce_scatter", "grad_reduce"))
    # With several micro-batches, parameters stay unsharded for the step.
    for kind, phase in each if micro_batches == 1 else once:
        assert rows(plan, kind, phase)[nbytes] == blocks, (kind, phase)
    for name in names:
        assert plan.gradient_plan[f"{pattern}.{name}"] == plan.plan[f"{pattern}.{name}"]


def test_parameters_outside_of_blocks_are_gathered_one_by_one() -> None:
    module, plan = fully_sharded("llama", "dp=4", micro_batches=1)
    embedding = dict(module.named_parameters())["model.embed_tokens.weight"]
    assert embedding.numel() * 4 in rows(plan, "all_gather", "forward")
    _, flat = fully_sharded("mlp", "dp=4", micro_batches=1)
    assert not flat.fully_shard


def test_a_checkpointed_block_gathers_once_in_the_backward() -> None:
    module, plan = fully_sharded("llama", "dp=4", micro_batches=1, ac="full")
    nbytes, blocks = block_nbytes(module, plan, "model.layers.*")
    assert rows(plan, "all_gather", "backward")[nbytes] == blocks
    assert nbytes not in rows(plan, "all_gather", "recompute")


@pytest.mark.parametrize(
    ("stored", "accumulated", "compute", "gradient", "axes", "accepted"),
    [
        ((Shard(0), R), (Shard(0), R), (R, R), (P, R), (0,), True),
        ((Shard(0), R), (Shard(0), P), (R, R), (P, P), (0,), True),
        ((R, Shard(1)), (P, Shard(1)), (R, R), (P, P), (1,), True),
        ((Shard(1), Shard(0)), (Shard(1), Shard(0)), (R, Shard(0)), (P, Shard(0)), (0,), True),
        # The gradient is replicated on the axis: a reduce-scatter would sum equal copies.
        ((Shard(0), R), (Shard(0), R), (R, R), (R, R), (0,), False),
        # The gradient is partial on the other axis, but its accumulated layout is not.
        ((Shard(0), R), (Shard(0), R), (R, R), (P, P), (0,), False),
        # Two axes flattened into one.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, R), (P, P), (0, 1), True),
        # The axes shard different dims, or only one of them is gathered over.
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (R, R), (P, P), (0, 1), False),
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (R, R), (P, P), (0,), False),
        # The gradient is partial on only one of the two.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, R), (P, R), (0, 1), False),
        # An inner axis shards the same dim.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, Shard(0)), (P, Shard(0)), (0,), False),
        # The compute layout is the stored one.
        ((Shard(0), R), (Shard(0), R), (Shard(0), R), (Shard(0), R), (0,), False),
    ],
)
def test_the_one_use_that_fully_shard_allows(
    stored: Layout, accumulated: Layout, compute: Layout, gradient: Layout, axes: tuple[int, ...], accepted: bool
) -> None:
    option = StorageOption(stored=stored, accumulated=accumulated, fsdp_axes=axes)
    assert (fsdp_use_layouts(option) == (compute, gradient)) is accepted


def test_all_groups_gather_over_the_same_axes() -> None:
    """`fully_shard` shards over one axis, or several flattened into one; random plans would mix them if they could."""
    module, inputs = families.make("llama", 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1)
    seen = set()
    for seed in range(8):
        plan = session.plan(planner=f"random:{seed}", mesh="dp=2,tp=2")
        axes_of_plan = set()
        for pattern, names in plan.fully_shard.items():
            for name in names:
                key = f"{pattern}.{name}"
                stored, compute = plan.plan[key], plan.compute_plan[key]
                axes_of_plan.add(tuple(axis for axis, (a, b) in enumerate(zip(stored, compute, strict=True)) if a != b))
        assert len(axes_of_plan) <= 1
        seen |= axes_of_plan
    assert {(0,), (0, 1)} <= seen, "no random plan gathers over one axis, or none over two: the test shows nothing"


def test_a_16_bit_reduction_halves_bytes_sent_and_bytes_of_unreduced_gradients() -> None:
    """By hand, for data parallelism in two micro-batches: all gradients are unsharded, and are fp32 in the end."""
    module, inputs = families.make("llama", 8)
    options: dict[str, Any] = {"dtype": "fp32", "micro_batches": 2, "ac": "none"}
    plans = {}
    for reduce_dtype in ("fp32", "bf16"):
        session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, reduce_dtype=reduce_dtype, **options)
        plans[reduce_dtype] = session.plan(planner="data-parallel", mesh="dp=4")
        assert plans[reduce_dtype].job.reduce_dtype == reduce_dtype
    wide, narrow = (rows(plans[dtype], "all_reduce", "grad_reduce") for dtype in ("fp32", "bf16"))
    assert narrow == {nbytes // 2: count for nbytes, count in wide.items()}
    estimates = [plans[dtype].estimate for dtype in ("fp32", "bf16")]
    assert estimates[0] is not None
    assert estimates[1] is not None
    numel = sum(p.numel() for p in module.parameters())
    # At the peak most activations are live: of the last micro-batch's gradients, only the head's is reduced.
    head = dict(module.named_parameters())["lm_head.weight"].numel()
    saved_nbytes = estimates[0].memory["gradients"] - estimates[1].memory["gradients"]
    assert numel * 2 - head * 2 <= saved_nbytes <= numel * 2


@pytest.mark.parametrize(("family", "micro_batches", "ac"), [("gpt2", 2, "none"), ("llama", 1, "selective")])
def test_the_charge_of_a_use_in_the_program_is_that_in_the_estimate(family: str, micro_batches: int, ac: str) -> None:
    """The program adds parts that are priced once; the estimate prices each use by itself."""
    module, inputs = families.make(family, 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32")
    search = session._planner
    formulator, _, built = search.formulate(search.run_of(MeshSpec.parse("dp=2,tp=2"), micro_batches, ac), None)
    assert built is not None
    uses = [(parameter, use) for parameter in built.structure.parameters for use in parameter.uses]
    edges = formulator._parameter_edges(built.strategies, built.stored)
    compared = 0
    for (parameter, use), edge in zip(uses, edges, strict=True):
        choices = built.stored[edge.producer - len(built.strategies)]
        for (c, choice), q in itertools.product(enumerate(choices), dict.fromkeys(edge.consumer_ports)):
            price = formulator.use_price(parameter, use, choice, formulator._ports.port(q))
            assert (price is None) == ((c, q) not in edge.pairs)
            if price is not None:
                assert edge.pairs[c, q] == pytest.approx(dict(price.charge))
                compared += 1
    assert compared > 100
