"""Parameters gathered with their block: which can be, what they cost, and how the plan says so."""

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
    """Return the float32 bytes of what one block gathers, and the number of blocks that ``pattern`` matches."""
    parameters = dict(module.named_parameters())
    count = len({name.split(".")[2] for name in parameters if name.startswith(pattern.removesuffix("*"))})
    names = plan.fully_shard[pattern]
    return sum(parameters[f"{pattern.replace('*', '0')}.{name}"].numel() for name in names) * 4, count


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_block_gathers_in_one_collective_and_reduces_in_one(micro_batches: int) -> None:
    module, plan = fully_sharded("llama", "dp=4", micro_batches=micro_batches)
    ((pattern, names),) = plan.fully_shard.items()
    assert pattern == "model.layers.*"
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} <= set(names)
    nbytes, blocks = block_nbytes(module, plan, pattern)
    each = (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
    once = (("all_gather", "param_gather"), ("reduce_scatter", "grad_reduce"))
    # Of several micro-batches, parameters are kept for the step.
    for kind, phase in each if micro_batches == 1 else once:
        assert rows(plan, kind, phase)[nbytes] == blocks, (kind, phase)
    for name in names:
        assert plan.gradient_plan[f"{pattern}.{name}"] == plan.plan[f"{pattern}.{name}"]


def test_what_is_outside_of_blocks_is_gathered_by_itself() -> None:
    module, plan = fully_sharded("llama", "dp=4", micro_batches=1)
    embedding = dict(module.named_parameters())["model.embed_tokens.weight"]
    assert embedding.numel() * 4 in rows(plan, "all_gather", "forward")
    _, flat = fully_sharded("mlp", "dp=4", micro_batches=1)
    assert not flat.fully_shard


def test_checkpointed_blocks_gather_before_the_recomputation_and_not_again() -> None:
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
        # The gradient is whole on the axis already: a reduce-scatter would add it up.
        ((Shard(0), R), (Shard(0), R), (R, R), (R, R), (0,), False),
        # It is left as a sum on the other axis, but says that it is not.
        ((Shard(0), R), (Shard(0), R), (R, R), (P, P), (0,), False),
        # On two axes, as one.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, R), (P, P), (0, 1), True),
        # They split two dims, or only one of them gathers.
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (R, R), (P, P), (0, 1), False),
        ((Shard(0), Shard(1)), (Shard(0), Shard(1)), (R, R), (P, P), (0,), False),
        # The gradient is summed on one of the two alone.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, R), (P, R), (0, 1), False),
        # An inner axis splits the same dim.
        ((Shard(0), Shard(0)), (Shard(0), Shard(0)), (R, Shard(0)), (P, Shard(0)), (0,), False),
        # Used as it is stored.
        ((Shard(0), R), (Shard(0), R), (Shard(0), R), (Shard(0), R), (0,), False),
    ],
)
def test_what_fully_shard_can_do(
    stored: Layout, accumulated: Layout, compute: Layout, gradient: Layout, axes: tuple[int, ...], accepted: bool
) -> None:
    choice = StorageOption(stored=stored, accumulated=accumulated, fsdp_axes=axes)
    assert (fsdp_use_layouts(choice) == (compute, gradient)) is accepted


def test_all_blocks_gather_over_the_same_axes() -> None:
    """`fully_shard` splits a module over one axis, or several as one; random plans would mix them if they could."""
    module, inputs = families.make("llama", 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32", micro_batches=1)
    seen = set()
    for seed in range(8):
        plan = session.plan(planner=f"random:{seed}", mesh="dp=2,tp=2")
        over = set()
        for pattern, names in plan.fully_shard.items():
            for name in names:
                key = f"{pattern}.{name}"
                stored, compute = plan.plan[key], plan.compute_plan[key]
                over.add(tuple(axis for axis, (a, b) in enumerate(zip(stored, compute, strict=True)) if a != b))
        assert len(over) <= 1
        seen |= over
    assert {(0,), (0, 1)} <= seen, "random plans do not gather over one axis, or not over two: the test shows nothing"


def test_in_16_bits_a_gradient_takes_half_the_wire_and_half_the_memory_until_it_is_reduced() -> None:
    """Worked by hand, of data parallelism in two micro-batches: all gradients are there whole, and end in fp32."""
    module, inputs = families.make("llama", 8)
    options: dict[str, Any] = {"dtype": "fp32", "micro_batches": 2, "ac": "none"}
    found = {}
    for reduce_dtype in ("fp32", "bf16"):
        session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, reduce_dtype=reduce_dtype, **options)
        found[reduce_dtype] = session.plan(planner="data-parallel", mesh="dp=4")
        assert found[reduce_dtype].job.reduce_dtype == reduce_dtype
    wide, narrow = (rows(found[dtype], "all_reduce", "grad_reduce") for dtype in ("fp32", "bf16"))
    assert narrow == {nbytes // 2: count for nbytes, count in wide.items()}
    estimates = [found[dtype].estimate for dtype in ("fp32", "bf16")]
    assert estimates[0] is not None
    assert estimates[1] is not None
    numel = sum(p.numel() for p in module.parameters())
    # At the peak most activations are there: of the last gradients none has been reduced but the head's.
    head = dict(module.named_parameters())["lm_head.weight"].numel()
    saved = estimates[0].memory["gradients"] - estimates[1].memory["gradients"]
    assert numel * 2 - head * 2 <= saved <= numel * 2


@pytest.mark.parametrize(("family", "micro_batches", "ac"), [("gpt2", 2, "none"), ("llama", 1, "selective")])
def test_uses_in_a_program_are_priced_as_in_an_estimate(family: str, micro_batches: int, ac: str) -> None:
    """Put together from parts that are priced once, or each by itself: the same."""
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
