"""Buffers that a forward writes end as in the unsharded run, and so do losses, in training and in evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from executor.verify import verify
from planner import build_plan
from planner.model_rewrites.sync_batch_norm import batch_norm_for_sync
from planner.plan.job import Job
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

BATCH = 16
TOLERANCE = 1e-5
"""Of losses, and of buffers and parameters relative to the largest element."""


class Net(nn.Module):
    """Layers, and the loss of their last result [batch, classes]."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x).flatten(1), labels)


class Averages(nn.Module):
    """Buffers that are written in place, through a slice, by assignment, and by assignment of what depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("slices", torch.zeros(2, 8))
        self.register_buffer("hidden", torch.ones(8), persistent=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
                self.slices[1] = h.sum(0)
            self.last = h.detach().sum(0)
            self.hidden.lerp_(h.detach().mean(0), 0.5)
        return h + self.mean * self.hidden


class Last(Net):
    """The root itself owns a buffer, which it replaces."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result = self.layers(x)
        if self.training:
            self.last = 0.5 * self.last + result.detach().amax(0)
        return F.cross_entropy(result, labels)


class Ranges(nn.Module):
    """The range of what passes, as quantizers observe it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            low, high = torch.aminmax(x.detach())
            self.low.copy_(torch.min(low, self.low))
            self.high.copy_(torch.max(high, self.high))
        return x.clamp(self.low, self.high)


class Codebook(nn.Module):
    """A codebook that is read, and then moved: a recomputation has to read what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x * self.codes.clone()
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return result


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


MODELS: Mapping[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "batch norm": ((8,), lambda: Net(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))),
    "cumulative batch norm": (
        (8,),
        lambda: Net(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 8)),
    ),
    "batch norm without parameters": (
        (8,),
        lambda: Net(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8)),
    ),
    "synchronized": ((8,), lambda: Net(nn.Linear(8, 8), nn.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 8))),
    "batch norm of sequences": ((8, 4), lambda: Net(nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(32, 8))),
    "images": (
        (4, 4, 4),
        lambda: Net(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 8)),
    ),
    "volumes": ((4, 2, 2, 2), lambda: Net(nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(32, 8))),
    "averages": ((8,), lambda: Net(nn.Linear(8, 8), Averages(), nn.Linear(8, 8))),
    "root": ((8,), lambda: Last(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))),
    "ranges": ((8,), lambda: Net(nn.Linear(8, 8), Ranges(), nn.Linear(8, 8))),
    "codebook": ((8,), lambda: Net(nn.Linear(8, 8), Codebook(), nn.Linear(8, 8))),
    "spectral norm": ((8,), lambda: Net(spectral(), nn.ReLU(), nn.Linear(8, 8))),
    "instance norm": (
        (4, 8),
        lambda: Net(nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(32, 8)),
    ),
}
"""Name -> (shape of a sample, model)."""

# The momentum of a cumulative average is a number that torch.export cannot know: it is planned by hand.
PLANNED = [name for name in MODELS if name != "cumulative batch norm"]
MESHES = ("dp=4", "dp=2,tp=2")


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][1]()


def batch_of(name: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 3 + torch.randn(BATCH, *MODELS[name][0], generator=generator)
    return {"x": x, "labels": torch.randint(0, 8, (BATCH,), generator=generator)}


def planned(name: str, mesh: str, **options: Any) -> ShardingPlan:
    options = {"micro_batches": 1, "dtype": "fp32", "optimizer": "sgd", "cluster": "4xtoy"} | options
    return build_plan(make(name), example_inputs=batch_of(name, 0), batch=BATCH, mesh=mesh, **options)


def run(name: str, model: nn.Module, plan: ShardingPlan, feed: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Return losses of two steps of training and one of evaluation, and the state after them, all whole."""
    found = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        parts = zip(*(value.chunk(plan.micro_batches) for value in batch_of(name, step).values()), strict=True)
        for index, (x, labels) in enumerate(parts):
            loss = model(**feed({"x": x, "labels": labels}))
            (loss / plan.micro_batches).backward()
            found[f"loss {step}.{index}"] = loss
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluation"] = model(**feed(batch_of(name, 5)))
    found |= model.state_dict() | dict(model.named_buffers())
    return {key: whole(value).detach().clone() for key, value in found.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrong_of(name: str, plan: ShardingPlan) -> list[str]:
    mesh = device_mesh_for(plan)
    reference = make(name)
    batch_norm_for_sync(reference)  # torch's own does not run on CPUs
    expected = run(name, reference, plan, lambda batch: batch)
    model = shard_module(make(name), mesh, plan)
    found = run(name, model, plan, lambda batch: local_batch(batch, mesh, plan))
    assert found.keys() == expected.keys()
    assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
    return [
        f"{key}: {found[key]} for {value}"
        for key, value in expected.items()
        if not torch.allclose(
            found[key].double(), value.double(), rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(value.abs().max()))
        )
    ]


class Kept(nn.Module):
    """Buffers of many kinds, all with values of this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("saved", torch.full((3, 2), float(rank)))
        self.register_buffer("unsaved", torch.full((3,), rank, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 3]))
        self.register_buffer("angles", torch.full((2,), complex(rank, 1)))
        self.register_buffer("scale", torch.tensor(rank, dtype=torch.bfloat16))
        self.register_buffer("expanded", torch.full((1, 2), float(rank)).expand(3, 2))
        self.register_buffer("on_meta", torch.empty(2, device="meta"), persistent=False)
        self.other = nn.Module()
        self.other.register_buffer("same", self.saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def placed(rank: int, source: int | None) -> dict[str, Any]:
    plan = ShardingPlan(
        mesh=PlanMesh(axes=(("dp", 2), ("tp", 2)), device="cpu"),
        job=Job(dtype="fp32", master_dtype=None, optimizer="sgd"),
        plan={"weight": (Replicate(), Replicate())},
    )
    model = shard_module(Kept(rank), device_mesh_for(plan), plan, src_data_rank=source)
    values = {name: buffer.tolist() for name, buffer in model.named_buffers() if not buffer.is_meta}
    return values | {"tied": model.saved is model.other.same, "on meta": model.on_meta.is_meta}


def on_ranks(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    sources = {f"from {source}": placed(rank, source) for source in (0, 1, None)}
    return sources | {case: wrong_of(name, ShardingPlan.from_dict(plan)) for case, (name, plan) in cases.items()}


CHECKPOINTED = ("batch norm", "averages", "codebook")
BASELINES = ("ddp", "fsdp")
HOW = ("full", "selective", "2 micro-batches")
CASES = [
    *(f"{name}, {mesh}" for name in PLANNED for mesh in MESHES),
    *(f"{name}, {how}" for name in CHECKPOINTED for how in HOW),
    *(f"{name}, {planner}" for name in ("batch norm", "averages") for planner in BASELINES),
    "cumulative, dp=4",
]
ORDINARY = {
    *(f"{name}, dp=2,tp=2" for name in ("batch norm", "averages", "ranges", "images", "spectral norm", "synchronized")),
    *(
        "batch norm, dp=4",
        "root, dp=4",
        "batch norm, fsdp",
        "averages, ddp",
        "codebook, full",
        "averages, selective",
        "batch norm, full",
        "batch norm, 2 micro-batches",
    ),
}
"""Cases of every kind; the others are variants of them, and run in the slow suite."""


def plan_of(case: str) -> tuple[str, ShardingPlan]:
    """Return the model's name and the plan of a case."""
    name, _, how = case.partition(", ")
    if name == "cumulative":
        return "cumulative batch norm", dataclasses.replace(planned("batch norm", how), fingerprint={})
    if how in MESHES:
        return name, planned(name, how)
    if how in BASELINES:
        return name, planned(name, "dp=4", planner=how)
    if how == "2 micro-batches":
        return name, planned(name, "dp=4", micro_batches=2)
    checkpointed = {"layers.1": how}
    return name, dataclasses.replace(planned(name, "dp=2,tp=2"), activation_checkpointing=checkpointed)


Ran = tuple[dict[str, tuple[str, ShardingPlan]], list[dict[str, Any]]]
"""Case -> model and plan; and what every rank found."""


def ran(cases: Iterable[str]) -> Ran:
    plans = {case: plan_of(case) for case in cases}
    return plans, run_on_gloo(on_ranks, 4, {case: (name, plan.to_dict()) for case, (name, plan) in plans.items()})


@pytest.fixture(scope="module")
def ordinary() -> Ran:
    return ran(case for case in CASES if case in ORDINARY)


@pytest.fixture(scope="module")
def slow() -> Ran:
    return ran(case for case in CASES if case not in ORDINARY)


@pytest.fixture
def of_case(case: str, request: pytest.FixtureRequest) -> Ran:
    """Return the run of the suite that has ``case``."""
    found: Ran = request.getfixturevalue("ordinary" if case in ORDINARY else "slow")
    return found


def marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=() if case in ORDINARY else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", marked(CASES))
def test_buffers_and_losses_are_those_of_the_unsharded_run(of_case: Ran, case: str) -> None:
    assert [result[case] for result in of_case[1]] == [[]] * 4


@pytest.mark.parametrize("case", marked(f"{name}, {mesh}" for name in PLANNED for mesh in MESHES))
def test_the_plan_has_the_collectives_of_the_writes(of_case: Ran, case: str) -> None:
    name, plan = of_case[0][case]
    assert verify(make(name), plan, batch_of(name, 0)).differences == ()


@pytest.mark.parametrize(("source", "rank"), [(0, 0), (1, 3)])
def test_all_ranks_get_the_buffers_of_one(ordinary: Ran, source: int, rank: int) -> None:
    expected = Kept(rank)
    for result in ordinary[1]:
        found = dict(result[f"from {source}"])
        assert found.pop("tied")
        assert found.pop("on meta")
        assert found == {name: buffer.tolist() for name, buffer in expected.named_buffers() if not buffer.is_meta}


def test_without_a_source_ranks_keep_their_buffers(ordinary: Ran) -> None:
    assert [result["from None"]["saved"][0][0] for result in ordinary[1]] == [0.0, 1.0, 2.0, 3.0]
