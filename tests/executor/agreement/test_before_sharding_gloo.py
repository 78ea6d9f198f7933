"""Ranks that do not shard the same all raise one error before anything is changed, and no rank waits for another."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.executor_cases import FP32
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from executor.agreement import statement
from executor.resolve.sharder import Sharder
from executor.shard import shard_module
from planner.plan.sharding_plan import PlanMesh, ShardingPlan


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, width), nn.Linear(width, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.rand(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc2(self.fc1(x))) * self.scale


class Renames(Sharder):
    """Replaces a module, and changes the tree of the one that it gets."""

    def shard(self, module: nn.Module) -> nn.Module:
        module.register_buffer("added", torch.zeros(1))
        module.register_forward_hook(lambda *_: None)
        module.changed = True
        return nn.Identity()


class Fails(Renames):
    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        raise OSError("no such table")


PLAN = ShardingPlan(
    mesh=PlanMesh.parse("tp=4"),
    plan={"fc1.*": (Shard(0),), "fc2.weight": (Shard(1),), "fc2.bias": (Replicate(),)},
    input_plan={"input": {"x": (Replicate(),)}, "norm.input": [(Replicate(),)]},
    job=FP32,
)
OTHER_PLAN = dataclasses.replace(PLAN, plan=dict(PLAN.plan) | {"fc1.*": (Replicate(),)})
UNEVEN_PLAN = dataclasses.replace(PLAN, plan={"fc1.weight": (Shard(2),)})
SHARDER_PLAN = dataclasses.replace(PLAN, plan={"fc1": "first", "norm": "second", "fc2.weight": (Shard(1),)})


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of ``shard_module`` on one rank."""

    module: Callable[[], nn.Module] = Block
    plan: ShardingPlan = PLAN
    options: Any = dataclasses.field(default_factory=dict)


def of_rank(faulty: int, call: Call) -> list[Call]:
    return [call if rank == faulty else Call() for rank in range(4)]


def frozen() -> nn.Module:
    model = Block()
    model.fc2.weight.requires_grad_(False)
    return model


SHARDERS = {"first": Renames(), "second": Renames()}
DISAGREEMENTS: dict[str, list[Call]] = {
    "plan": of_rank(2, Call(plan=OTHER_PLAN)),
    "shapes": of_rank(1, Call(module=functools.partial(Block, 32))),
    "dtype": of_rank(3, Call(module=lambda: Block().to(torch.bfloat16))),
    "frozen": of_rank(0, Call(module=frozen)),
    "source": of_rank(1, Call(options={"src_data_rank": 1})),
    "source on meta": of_rank(0, Call(module=lambda: on_meta(Block()))),
    "own values, one on meta": [
        Call(module=lambda: on_meta(Block()), options={"src_data_rank": None}),
        *[Call(options={"src_data_rank": None})] * 3,
    ],
    "sharders": [
        Call(plan=SHARDER_PLAN, options={"sharders": SHARDERS | ({"second": Fails()} if rank == 3 else {})})
        for rank in range(4)
    ],
    "own checks": of_rank(1, Call(plan=UNEVEN_PLAN)),
    "source outside the mesh": [Call(options={"src_data_rank": 4})] * 4,
}


class FailsOnRank2(Fails):
    def shard(self, module: nn.Module) -> nn.Module:
        return super().shard(module) if dist.get_rank() == 2 else Renames.shard(self, module)


class ReturnsNoModule(Renames):
    def shard(self, module: nn.Module) -> nn.Module:
        super().shard(module)
        return 3  # type: ignore[return-value]


DISAGREEMENTS["a Sharder fails"] = [
    Call(plan=SHARDER_PLAN, options={"sharders": {"first": Renames(), "second": FailsOnRank2()}})
] * 4
DISAGREEMENTS["no module"] = [
    Call(plan=SHARDER_PLAN, options={"sharders": {"first": Renames(), "second": ReturnsNoModule()}})
] * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended on one rank."""

    kind: str = ""
    text: str = ""
    ranks: tuple[int, ...] | None = None
    seconds: float
    untouched: bool


def tree(module: nn.Module) -> list[Any]:
    """Return all that the tree of ``module`` has, by identity."""
    return [
        (
            name,
            id(part),
            type(part),
            sorted((key, id(value)) for key, value in vars(part).items()),
            [sorted((key, id(value)) for key, value in vars(part)[f].items()) for f in ("_parameters", "_buffers")],
            list(part._forward_hooks),
        )
        for name, part in module.named_modules()
    ]


def outcome(call: Call, mesh: DeviceMesh) -> Outcome:
    module = call.module()
    before, begin = tree(module), time.monotonic()
    try:
        shard_module(module, mesh, call.plan, **call.options)
    except Exception as error:  # noqa: BLE001  any kind is an outcome
        return Outcome(
            kind=type(error).__name__,
            text=str(error),
            ranks=getattr(error, "ranks", None),
            seconds=time.monotonic() - begin,
            untouched=tree(module) == before,
        )
    return Outcome(seconds=time.monotonic() - begin, untouched=tree(module) == before)


def all_outcomes(rank: int) -> dict[str, Outcome]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    results = {}
    for name, calls in DISAGREEMENTS.items():
        torch.manual_seed(rank)
        results[name] = outcome(calls[rank], mesh)
    results["mesh"] = outcome(Call(), mesh if rank else DeviceMesh("cpu", torch.arange(4)))
    statement._own_version = lambda: "0.1" if rank else "0.2"  # type: ignore[attr-defined]
    results["version"] = outcome(Call(), mesh)
    statement._own_version = lambda: "0.2"  # type: ignore[attr-defined]
    hurried = Call(options={"agreement_timeout_s": 1.0})
    if rank != 3:
        results["absent"] = outcome(hurried, mesh)
    dist.barrier()
    if rank == 3:
        results["absent"] = outcome(hurried, mesh)
    # Another set of ranks, one of which has made no exchange with the others yet.
    part = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("tp",))
    thirds = dataclasses.replace(PLAN, mesh=PlanMesh.parse("tp=3"), plan={"fc1.*": (Replicate(),)})
    results["outside"] = outcome(Call(plan=thirds), part)
    # After all these errors the ranks still agree.
    results["equal"] = outcome(Call(), mesh)
    results["weights on the source alone"] = weights_on_the_source_alone(rank, mesh)
    return results


def weights_on_the_source_alone(rank: int, mesh: DeviceMesh) -> Outcome:
    torch.manual_seed(7)
    reference = Block()
    module = copy.deepcopy(reference) if rank == 0 else on_meta(Block())
    begin = time.monotonic()
    shard_module(module, mesh, PLAN)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.full_tensor(), reference.get_parameter(name)), name
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name)), name
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(x).full_tensor(), reference(x))
    return Outcome(seconds=time.monotonic() - begin, untouched=False)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return run_on_gloo(all_outcomes, 4)


@pytest.mark.parametrize(
    ("name", "ranks", "texts"),
    [
        ("plan", (2,), ["plan[", "on ranks 0, 1, 3", "on rank 2"]),
        ("shapes", (1,), ["parameter 'fc1.weight' is (16, 8) torch.float32 on ranks 0, 2, 3, (32, 8)"]),
        ("dtype", (3,), ["(16,) torch.bfloat16 on rank 3", "and 4 more"]),
        ("frozen", (0,), ["frozen on rank 0", "on ranks 1, 2, 3"]),
        ("source", (1,), ["src_data_rank is 0 on ranks 0, 2, 3, 1 on rank 1"]),
        ("source on meta", (0,), ["10 tensors on rank 0", "rank 0 is to send them", "load_weights"]),
        ("own values, one on meta", (0,), ["src_data_rank is None"]),
        ("sharders", (3,), ["second: Renames on ranks 0, 1, 2", "second: Fails on rank 3"]),
        ("mesh", (0,), ["device mesh is", "on rank 0"]),
        ("version", (0,), ["version of shardplan is 0.2 on rank 0, 0.1 on ranks 1, 2, 3"]),
        ("absent", (3,), ["Rank 3 did not come", "agreement_timeout_s"]),
    ],
)
def test_ranks_that_differ_all_raise_one_error_that_names_them(
    outcomes: list[dict[str, Outcome]], name: str, ranks: tuple[int, ...], texts: list[str]
) -> None:
    results = [by_name[name] for by_name in outcomes]
    assert {result.kind for result in results} == {"RanksError"}
    assert len({result.text for result in results}) == 1
    assert all(result.ranks == ranks for result in results)
    assert all(text in results[0].text for text in texts), results[0].text
    assert all(result.untouched for result in results)
    assert all(result.seconds < 10 for result in results)


@pytest.mark.parametrize(
    ("name", "rank", "kind", "text"),
    [("own checks", 1, "PlanLayoutError", "fc1.weight"), ("a Sharder fails", 2, "OSError", "no such table")],
)
def test_an_error_of_one_rank_reaches_the_others(
    outcomes: list[dict[str, Outcome]], name: str, rank: int, kind: str, text: str
) -> None:
    results = [by_name[name] for by_name in outcomes]
    assert results[rank].kind == kind
    for other in (result for index, result in enumerate(results) if index != rank):
        assert other.kind == "RanksError"
        assert other.ranks == (rank,)
        assert f"rank {rank}: {kind}" in other.text
        assert text in other.text
    assert all(result.untouched for result in results)


@pytest.mark.parametrize(
    ("name", "kind"), [("source outside the mesh", "PlanMismatchError"), ("no module", "PlanTypeError")]
)
def test_an_error_of_all_ranks_is_raised_as_it_is(outcomes: list[dict[str, Outcome]], name: str, kind: str) -> None:
    assert {by_name[name].kind for by_name in outcomes} == {kind}
    assert all(by_name[name].untouched for by_name in outcomes)


def test_a_rank_outside_the_mesh_raises_and_the_others_shard(outcomes: list[dict[str, Outcome]]) -> None:
    *inside, outside = (by_name["outside"] for by_name in outcomes)
    assert outside.kind == "PlanMismatchError"
    assert "Rank 3 is not in the device mesh" in outside.text
    assert [result.kind for result in inside] == ["", "", ""]


def test_equal_ranks_shard_and_ranks_on_meta_get_the_values_of_the_source(outcomes: list[dict[str, Outcome]]) -> None:
    assert [by_name["equal"].kind for by_name in outcomes] == [""] * 4
    assert all("weights on the source alone" in by_name for by_name in outcomes)
