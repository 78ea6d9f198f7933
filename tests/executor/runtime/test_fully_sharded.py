"""What parameters that are gathered together run, hold and free; on fake processes, counts worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.executor_cases import (
    FP32,
    LLAMA_BLOCKS,
    MESH,
    S0,
    S1,
    Case,
    R,
    gathered,
    keeping,
    keeping_for_step,
    make_batch,
    make_model,
    megatron,
    replicated_on_tp,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost_model.layouts.layout import split_factor
from executor.collective_counter import CollectiveKey
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals import collective_of, fake_process_group, is_communication, local_of
from executor.verify import observed_collectives
from planner.errors import PlanLayoutError
from planner.plan.job import Job
from planner.plan.patterns import match_keys
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

BYTES = {"bf16": 2, "fp32": 4}
BLOCKS = "model.layers.*"
SIDES = {**LLAMA_BLOCKS, "lm_head": ("weight",), "model.embed_tokens": ("weight",)}


def observed(case: Case) -> Counter[CollectiveKey]:
    return observed_collectives(make_model(case.family), case.plan, make_batch(case.family))


def expected(base: Case, case: Case) -> Counter[CollectiveKey]:
    """What ``base`` runs, its parameters whole on dp, with the collectives of the groups in ``case`` instead."""
    rows, model, job = observed(base), make_model(case.family), case.plan.job
    for pattern, names in case.plan.fully_shard.items():
        kept, for_step = pattern in case.plan.keep_gathered, pattern in case.plan.keep_gathered_for_step
        for module in match_keys([pattern], [fqn for fqn, _ in model.named_modules()])[pattern]:
            elements = 0
            for name in names:
                fqn = f"{module}.{name}" if module else name
                layout = case.plan.compute_plan[fqn]
                local = math.prod(model.get_parameter(fqn).shape) // split_factor(layout, MESH.shape)
                elements += local
                nbytes = local * BYTES[job.reduce_dtype]
                rows[CollectiveKey(phase="grad_reduce", kind="all_reduce", axis="dp", bytes=nbytes)] -= 1
            calls = case.plan.micro_batches
            sent, summed = elements * BYTES[job.dtype], elements * BYTES[job.reduce_dtype]
            if for_step:
                rows[CollectiveKey(phase="param_gather", kind="all_gather", axis="dp", bytes=sent)] += 1
                rows[CollectiveKey(phase="grad_reduce", kind="reduce_scatter", axis="dp", bytes=summed)] += 1
                continue
            rows[CollectiveKey(phase="forward", kind="all_gather", axis="dp", bytes=sent)] += calls
            if job.training:
                rows[CollectiveKey(phase="backward", kind="all_gather", axis="dp", bytes=sent)] += 0 if kept else calls
                rows[CollectiveKey(phase="backward", kind="reduce_scatter", axis="dp", bytes=summed)] += calls
    return +rows


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"micro_batches": 3},
        {"activation_checkpointing": {BLOCKS: "full"}},
        {"activation_checkpointing": {BLOCKS: "selective"}, "micro_batches": 2},
        {"job": Job(dtype="bf16", reduce_dtype="fp32")},
        {"job": Job(dtype="bf16", reduce_dtype="bf16"), "activation_checkpointing": {BLOCKS: "full"}},
        {"job": dataclasses.replace(FP32, training=False)},
    ],
    ids=["plain", "3 micro-batches", "full AC", "selective AC", "bf16", "bf16 throughout, AC", "inference"],
)
def test_a_group_runs_one_gather_each_way_and_one_reduction(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = gathered(base, SIDES)
    if case.plan.job.training:
        assert observed(case) == expected(base, case)
        return
    forward = {row: count for row, count in observed(case).items() if row.kind == "all_gather" and row.axis == "dp"}
    assert forward == {row: count for row, count in expected(base, case).items() if row in forward}
    assert {row.phase for row in forward} == {"forward"}
    assert sum(forward.values()) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batches": 3},
        {"activation_checkpointing": {BLOCKS: "full"}},
        {"activation_checkpointing": {BLOCKS: "selective"}, "micro_batches": 2},
    ],
    ids=["3 micro-batches", "full AC", "selective AC"],
)
def test_what_is_kept_is_gathered_once_for_forward_and_backward(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = keeping(gathered(base, SIDES))
    assert observed(case) == expected(base, case)
    # Some groups may be kept, and others not.
    part = Case(case.family, dataclasses.replace(case.plan, keep_gathered=(BLOCKS,)))
    assert observed(part) == expected(base, part) != observed(case)


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batches": 4},
        {"activation_checkpointing": {BLOCKS: "full"}, "micro_batches": 3},
        {"activation_checkpointing": {BLOCKS: "selective"}, "micro_batches": 2},
        {"job": Job(dtype="bf16", reduce_dtype="fp32"), "micro_batches": 3},
        {"job": Job(dtype="bf16", reduce_dtype="bf16"), "micro_batches": 2},
        {},
    ],
    ids=["4 micro-batches", "full AC", "selective AC", "bf16", "bf16 throughout", "one micro-batch"],
)
def test_what_is_kept_for_the_step_is_gathered_and_reduced_once(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = keeping_for_step(gathered(base, SIDES))
    assert observed(case) == expected(base, case)
    # Of the same model, others may be kept from forward to backward, and others not at all.
    part = dataclasses.replace(case.plan, keep_gathered_for_step=(BLOCKS,), keep_gathered=("lm_head",))
    assert observed(Case(case.family, part)) == expected(base, Case(case.family, part))


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("mlp", {"fc1": ("weight", "bias"), "fc2": ("weight",), "": ("head.weight",)}),
        ("gpt2", {"transformer.h.*": ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_fc.weight", "ln_1.weight")}),
        ("bert", {"bert.encoder.layer.*": ("intermediate.dense.weight", "output.dense.weight")}),
        (
            "t5",
            {
                "encoder.block.*": ("layer.1.DenseReluDense.wi.weight",),
                "decoder.block.*": ("layer.1.EncDecAttention.k.weight", "layer.2.DenseReluDense.wi.weight"),
            },
        ),
        ("vit", {"vit": ("layers.0.mlp.fc1.weight",)}),
    ],
)
def test_every_family_runs_its_groups_and_nothing_else(family: str, groups: dict[str, tuple[str, ...]]) -> None:
    base = replicated_on_tp(family)
    case = gathered(base, groups)
    assert observed(case) == expected(base, case)
    assert observed(keeping(case)) == expected(base, keeping(case))
    several = replicated_on_tp(family, micro_batches=3)
    for_step = keeping_for_step(gathered(several, groups))
    assert observed(for_step) == expected(several, for_step)


class Wide(nn.Module):
    """Two blocks whose weights would take eight terabytes."""

    def __init__(self) -> None:
        super().__init__()
        size = 2**20
        self.blocks = nn.ModuleList([nn.Linear(size, size, bias=False, device="meta") for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hundreds_of_ranks_are_verified_without_memory(dtype: str) -> None:
    mesh = PlanMesh(axes=(("dp", 128), ("tp", 4)), device="cpu")
    case = replicated_on_tp("mlp")
    stored, computed = {"blocks.*.weight": (S0, S1)}, {"blocks.*.weight": (R, S1)}
    plan = dataclasses.replace(
        case.plan,
        mesh=mesh,
        job=Job(dtype=dtype, reduce_dtype="fp32"),
        plan=stored,
        compute_plan=computed,
        gradient_plan=stored,
        fully_shard={"blocks.*": ("weight",)},
        input_plan={
            "input": {"x": Port(layout=(S0, R))},
            "blocks.*.input": (Port(layout=(S0, S1)),),
        },
    )
    inputs = {"x": torch.empty(128, 2**20, dtype=torch.bfloat16 if dtype == "bf16" else None, device="meta")}
    found = observed_collectives(Wide(), plan, inputs)
    on_dp = {(row.phase, row.kind, row.bytes): count for row, count in found.items() if row.axis == "dp"}
    elements = 2**40 // 4
    assert on_dp == {
        ("forward", "all_gather", elements * BYTES[dtype]): 2,
        ("backward", "all_gather", elements * BYTES[dtype]): 2,
        ("backward", "reduce_scatter", elements * 4): 2,
    }


class Order(TorchDispatchMode):
    """Notes the collectives on dp, one after the other."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if is_communication(func):
            kind, nbytes, group = collective_of(func, args)
            if group == self._group:
                self.ran.append((kind, nbytes))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_process_group(4):
        yield


class Chain(nn.Module):
    """Three layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def chain_plan(batch: Any = (S0, R)) -> ShardingPlan:
    split, whole = {"layers.*.*": (S0, R)}, {"layers.*.*": (R, R)}
    return ShardingPlan(
        mesh=MESH,
        job=FP32,
        plan=split,
        compute_plan=whole,
        gradient_plan=split,
        fully_shard={"layers.*": ("weight", "bias")},
        input_plan={"input": {"x": Port(layout=batch)}},
    )


GATHERS = [("all_gather", 4 * (n * 2 * n + 2 * n)) for n in (8, 16, 32)]
SUMS = [("reduce_scatter", nbytes) for _, nbytes in GATHERS]


@pytest.mark.usefixtures("ranks")
def test_the_next_modules_gather_comes_before_this_ones_reduction() -> None:
    plan = chain_plan()
    mesh = device_mesh_for(plan)
    model = shard_module(Chain(), mesh, plan, src_data_rank=None)
    for evaluated in (False, True):
        if evaluated:
            # It leaves nothing behind that the next backward would prefetch.
            with torch.no_grad():
                model(torch.randn(4, 8))
        with Order(str(mesh.get_group("dp").group_name)) as order:
            model(torch.randn(4, 8)).backward()
        first, second, third = GATHERS
        backward = [third, second, SUMS[2], first, SUMS[1], SUMS[0]]
        assert order.ran == [*GATHERS, *backward]


@pytest.mark.usefixtures("ranks")
def test_gathered_copies_live_while_their_module_runs() -> None:
    plan = chain_plan()
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    resting = dict(model.named_parameters())
    gathered_: list[DTensor] = []

    def note(module: nn.Module, args: Any) -> None:
        gathered_.append(module.weight)

    for layer in model.layers:
        layer.register_forward_pre_hook(note)
    loss = model(torch.randn(4, 8))
    assert [tuple(weight.placements) for weight in gathered_] == [(R, R)] * 3
    assert [local_of(weight).untyped_storage().size() for weight in gathered_] == [0, 0, 0]
    assert all(resting[name] is parameter for name, parameter in model.named_parameters())
    loss.backward()
    assert [local_of(weight).untyped_storage().size() for weight in gathered_] == [0, 0, 0]
    assert all(parameter.grad.placements == (S0, R) for parameter in model.parameters())


@pytest.mark.usefixtures("ranks")
def test_a_gradient_that_is_not_partial_is_refused() -> None:
    plan = chain_plan(batch=(R, R))
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    loss = model(torch.randn(4, 8))
    with pytest.raises(
        PlanLayoutError, match=r"'layers.2.\w+' comes as \(R, R\), but fully_shard reduces \(P\(sum\), R\)"
    ):
        loss.backward()


@pytest.mark.usefixtures("ranks")
def test_a_gradient_that_is_partial_on_another_axis_too_is_refused() -> None:
    plan = chain_plan(batch=(S0, S0))
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    loss = model(torch.randn(4, 8))
    with pytest.raises(PlanLayoutError, match=r"comes as \(P\(sum\), P\(sum\)\)"):
        loss.backward()


class Viewed(nn.Module):
    """Its block returns a view, which it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.block(x)
        hidden += 1
        return hidden.square().mean()


@pytest.mark.usefixtures("ranks")
def test_a_view_that_is_changed_in_place_keeps_its_modules_gather() -> None:
    plan = dataclasses.replace(
        chain_plan(),
        plan={"block.0.*": (S0, R)},
        compute_plan={"block.0.*": (R, R)},
        gradient_plan={"block.0.*": (S0, R)},
        fully_shard={"block": ("0.weight", "0.bias")},
    )
    mesh = device_mesh_for(plan)
    model = shard_module(Viewed(), mesh, plan, src_data_rank=None)
    with Order(str(mesh.get_group("dp").group_name)) as order:
        model(torch.randn(4, 8)).backward()
    gather = ("all_gather", 4 * (8 * 8 + 8))
    assert order.ran == [gather, gather, ("reduce_scatter", gather[1])]


@pytest.mark.usefixtures("ranks")
def test_a_model_on_meta_can_be_given_memory_after_it_was_sharded() -> None:
    plan = chain_plan()
    with torch.device("meta"):
        model = Chain()
    shard_module(model, device_mesh_for(plan), plan)
    known = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(one is other for one, other in zip(known, model.parameters(), strict=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(torch.randn(4, 8)).backward()
    assert all(parameter.grad.placements == (S0, R) for parameter in model.parameters())
