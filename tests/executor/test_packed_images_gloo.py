"""Models whose images are packed train and generate on four ranks as the unsharded model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covered.coverage import CLUSTER
from covered.popular import inputs_of
from covered.small_configs import small_model
from support.gloo import GlooRanks
from support.packed_images import MARK, AddsToMarks, SeesImages, inputs
from support.trained_steps import Errors, errors_in_steps
from torch import nn

from executor import device_mesh_for, local_batch, shard_module
from planner import build_plan
from planner.errors import JobError, RanksError
from planner.plan.sharding_plan import ShardingPlan

LR = 1e-3
MESHES = ("dp=4", "dp=2,tp=2")
OWN = {"own": SeesImages, "adds to marks": AddsToMarks}


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as started:
        yield started


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name](), inputs()
    model = small_model(name)
    return model.train(), inputs_of(model)


def plan_of(name: str, **options: Any) -> ShardingPlan:
    model, given = made(name)
    settings = {"cluster": CLUSTER, "dtype": "fp32", "micro_batches": 1, "tolerance": 0.0, **options}
    return build_plan(model, example_inputs=given, **settings)


def errors(rank: int, name: str, plan: dict[str, Any]) -> Errors:
    return errors_in_steps(ShardingPlan.from_dict(plan), functools.partial(made, name), LR)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "name", [*OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen3_vl", "glm4v"))]
)
def test_a_model_that_sees_trains_as_unsharded(ranks: GlooRanks, name: str, mesh: str) -> None:
    plan = plan_of(name, mesh=mesh)
    assert all("0=0" in split for split in plan.opaque_modules.values())
    for found in ranks.call(errors, name, plan.to_dict()):
        assert max(found) < 1e-5


@pytest.mark.parametrize("planner", ["fully-sharded", "random:3"])
def test_other_plans_train_as_unsharded(ranks: GlooRanks, planner: str) -> None:
    plan = plan_of("own", mesh="dp=2,tp=2", planner=planner)
    for found in ranks.call(errors, "own", plan.to_dict()):
        assert max(found) < 1e-5


def losses(rank: int, plan: dict[str, Any]) -> list[float]:
    """Return the losses of one batch, cut by hand, by ``local_batch``, and by it from this rank's samples.

    What ``local_batch`` returns may be moved, as to a GPU.
    """
    model, given = made("own")
    sharding = ShardingPlan.from_dict(plan)
    expected = model(**given)
    sharded = shard_module(made("own")[0], device_mesh_for(sharding, device_type="cpu"), sharding)
    by_hand = {name: tensor.chunk(4)[rank] for name, tensor in given.items()}
    calls = [by_hand, local_batch(given, sharded), local_batch(by_hand, sharded, is_local=True)]
    calls.append({name: tensor.clone() for name, tensor in calls[1].items()})
    return [float(expected), *(float(sharded(**call)) for call in calls)]


def test_batches_may_be_cut_in_any_way(ranks: GlooRanks) -> None:
    plan = plan_of("own", mesh="dp=4", planner="fully-sharded")
    for expected, *found in ranks.call(losses, plan.to_dict()):
        assert found == pytest.approx([expected] * 4, rel=1e-6)


def refusals(rank: int, plan: dict[str, Any]) -> list[str]:
    """Return the errors of a batch with a mark too few, and of one whose samples have images of other sizes."""
    sharding = ShardingPlan.from_dict(plan)
    sharded = shard_module(made("own")[0], device_mesh_for(sharding, device_type="cpu"), sharding)
    fewer, other = inputs(), inputs()
    fewer["ids"] = fewer["ids"].clone()
    fewer["ids"][:, 2] = MARK + 1
    other["sizes"] = other["sizes"].flip(0)[torch.tensor([0, 1, 3, 2, *range(4, 16)])]
    messages = []
    for call in (fewer, other):
        try:
            sharded(**local_batch(call, sharded))
        except (RuntimeError, JobError) as error:
            messages.append(str(error))
    return messages


def test_batches_that_do_not_go_with_the_plan_are_refused(ranks: GlooRanks) -> None:
    plan = plan_of("own", mesh="dp=4", planner="fully-sharded")
    for tokens, sizes in ranks.call(refusals, plan.to_dict()):
        assert "another number of image tokens than there are image features" in tokens
        assert "other sizes for sample" in sizes


def checked(rank: int, plan: dict[str, Any]) -> tuple[list[str], str]:
    """Return what is logged where all ranks pass equal tables, and the error where one rank has other sizes."""
    sharding = ShardingPlan.from_dict(plan)
    sharded = shard_module(made("own")[0], device_mesh_for(sharding, device_type="cpu"), sharding)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardplan").addHandler(handler)
    by_hand = {name: tensor.chunk(4)[rank] for name, tensor in inputs().items()}
    sharded(**by_hand)
    if rank == 3:
        by_hand["sizes"] = by_hand["sizes"].flip(0)
    try:
        sharded(**by_hand)
    except RanksError as error:
        return records, str(error)
    return records, ""


def test_ranks_have_images_of_the_same_sizes(ranks: GlooRanks) -> None:
    plan = plan_of("own", mesh="dp=4", planner="fully-sharded")
    for logged, error in ranks.call(checked, plan.to_dict()):
        assert logged == []
        assert "'sizes'" in error


def generated(rank: int, plan: dict[str, Any]) -> bool:
    (reference, given), (model, _) = made("qwen2_5_vl"), made("qwen2_5_vl")
    given = {name: value for name, value in given.items() if name not in ("labels", "use_cache")}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = reference.eval().generate(**given, **options)  # type: ignore[operator]
    sharding = ShardingPlan.from_dict(plan)
    sharded: Any = shard_module(model.eval(), device_mesh_for(sharding, device_type="cpu"), sharding)
    return torch.equal(sharded.generate(**given, **options), expected)


@pytest.mark.slow
def test_a_model_that_sees_generates_as_unsharded(ranks: GlooRanks) -> None:
    assert all(ranks.call(generated, plan_of("qwen2_5_vl", mesh="dp=2,tp=2").to_dict()))
