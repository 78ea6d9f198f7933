"""Collectives and memory of FSDP groups, compared with counts worked out by hand, on fake processes."""

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
    make_batch,
    make_model,
    megatron,
    replicated_on_tp,
    reshard_after_backward,
    reshard_after_step,
    with_fsdp_groups,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost_model.layouts.layout import split_factor
from executor.collective_counter import CollectiveKey
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.torch_internals.dtensor import collective_of, fake_process_group, is_communication, local_of
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
    """Return the collectives of ``base``, with those of the FSDP groups of ``case`` instead of all-reduces on dp."""
    rows, model, job = observed(base), make_model(case.family), case.plan.job
    for pattern, names in case.plan.fully_shard.items():
        until_backward = pattern in case.plan.keep_gathered
        for_step = pattern in case.plan.keep_gathered_for_step
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
                rows[CollectiveKey(phase="backward", kind="all_gather", axis="dp", bytes=sent)] += (
                    0 if until_backward else calls
                )
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
def test_a_group_runs_an_all_gather_in_forward_and_backward_and_a_reduce_scatter(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = with_fsdp_groups(base, SIDES)
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
def test_resharding_after_backward_runs_one_all_gather(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = reshard_after_backward(with_fsdp_groups(base, SIDES))
    assert observed(case) == expected(base, case)
    # Some groups reshard after the backward, others after the forward.
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
def test_resharding_after_the_step_runs_one_all_gather_and_one_reduce_scatter(fields: dict[str, Any]) -> None:
    base = megatron(vocabulary=True, **fields)
    case = reshard_after_step(with_fsdp_groups(base, SIDES))
    assert observed(case) == expected(base, case)
    # Other groups of the same model reshard after the backward, or after the forward.
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
def test_every_family_runs_the_collectives_of_its_groups(family: str, groups: dict[str, tuple[str, ...]]) -> None:
    base = replicated_on_tp(family)
    case = with_fsdp_groups(base, groups)
    assert observed(case) == expected(base, case)
    assert observed(reshard_after_backward(case)) == expected(base, reshard_after_backward(case))
    several = replicated_on_tp(family, micro_batches=3)
    for_step = reshard_after_step(with_fsdp_groups(several, groups))
    assert observed(for_step) == expected(several, for_step)


class Wide(nn.Module):
    """Two blocks whose weights have eight terabytes."""

    def __init__(self) -> None:
        super().__init__()
        size = 2**20
        self.blocks = nn.ModuleList([nn.Linear(size, size, bias=False, device="meta") for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_verify_counts_hundreds_of_ranks_without_memory(dtype: str) -> None:
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
    observed_counts = observed_collectives(Wide(), plan, inputs)
    on_dp = {(row.phase, row.kind, row.bytes): count for row, count in observed_counts.items() if row.axis == "dp"}
    elements = 2**40 // 4
    assert on_dp == {
        ("forward", "all_reduce", BYTES[dtype]): 1,  # of the loss
        ("forward", "all_gather", elements * BYTES[dtype]): 2,
        ("backward", "all_gather", elements * BYTES[dtype]): 2,
        ("backward", "reduce_scatter", elements * 4): 2,
    }


class Order(TorchDispatchMode):
    """Records the collectives on dp in their order."""

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
LOSS = ("all_reduce", 4)
SUMS = [("reduce_scatter", nbytes) for _, nbytes in GATHERS]


@pytest.mark.usefixtures("ranks")
def test_the_next_all_gather_is_prefetched_before_a_reduce_scatter() -> None:
    plan = chain_plan()
    mesh = device_mesh_for(plan)
    model = shard_module(Chain(), mesh, plan, src_data_rank=None)
    for evaluated in (False, True):
        if evaluated:
            # A forward without gradients leaves no module that the next backward would prefetch.
            with torch.no_grad():
                model(torch.randn(4, 8))
        with Order(str(mesh.get_group("dp").group_name)) as order:
            model(torch.randn(4, 8)).backward()
        first, second, third = GATHERS
        backward = [third, second, SUMS[2], first, SUMS[1], SUMS[0]]
        assert order.ran == [*GATHERS, LOSS, *backward]


@pytest.mark.usefixtures("ranks")
def test_gathered_parameters_are_freed_after_their_module() -> None:
    plan = chain_plan()
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    sharded = dict(model.named_parameters())
    weights: list[DTensor] = []

    def note(module: nn.Module, args: Any) -> None:
        weights.append(module.weight)

    for layer in model.layers:
        layer.register_forward_pre_hook(note)
    loss = model(torch.randn(4, 8))
    assert [tuple(weight.placements) for weight in weights] == [(R, R)] * 3
    assert [local_of(weight).untyped_storage().size() for weight in weights] == [0, 0, 0]
    assert all(sharded[name] is parameter for name, parameter in model.named_parameters())
    loss.backward()
    assert [local_of(weight).untyped_storage().size() for weight in weights] == [0, 0, 0]
    assert all(parameter.grad.placements == (S0, R) for parameter in model.parameters())


@pytest.mark.usefixtures("ranks")
def test_a_gradient_that_is_not_partial_is_an_error() -> None:
    plan = chain_plan(batch=(R, R))
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    loss = model(torch.randn(4, 8))
    with pytest.raises(
        PlanLayoutError, match=r"'layers.2.\w+' comes as \(R, R\), but fully_shard reduces \(P\(sum\), R\)"
    ):
        loss.backward()


@pytest.mark.usefixtures("ranks")
def test_a_gradient_that_is_partial_on_another_axis_is_an_error() -> None:
    plan = chain_plan(batch=(S0, S0))
    model = shard_module(Chain(), device_mesh_for(plan), plan, src_data_rank=None)
    loss = model(torch.randn(4, 8))
    with pytest.raises(PlanLayoutError, match=r"comes as \(P\(sum\), P\(sum\)\)"):
        loss.backward()


class Viewed(nn.Module):
    """A model that changes its block's result, a view, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.block(x)
        hidden += 1
        return hidden.square().mean()


@pytest.mark.usefixtures("ranks")
def test_a_module_whose_result_is_changed_in_place_gathers_in_backward() -> None:
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
    assert order.ran == [gather, LOSS, gather, ("reduce_scatter", gather[1])]


@pytest.mark.usefixtures("ranks")
def test_a_sharded_model_on_meta_can_be_materialized() -> None:
    plan = chain_plan()
    with torch.device("meta"):
        model = Chain()
    shard_module(model, device_mesh_for(plan), plan)
    before = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model(torch.randn(4, 8)).backward()
    assert all(parameter.grad.placements == (S0, R) for parameter in model.parameters())
