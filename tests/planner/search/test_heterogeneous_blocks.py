"""Blocks that differ: the first k of n checkpointed, or laid out apart from the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import families
from typer.testing import CliRunner

from api.cli.main import app
from api.requests.model_configs import find_config
from api.requests.model_registry import load_model, quiet_libraries
from api.requests.plan_request import opened_request
from api.requests.schemas import PlanRequest
from planner.errors import JobError, PlanMismatchError
from planner.graph.trace_module import ModuleNames
from planner.plan.job import Checkpointing
from planner.plan.sharding_plan import PlanMesh, ShardingPlan
from planner.regions.blocks import Blocks
from planner.session import PlanningSession
from planner.writing.block_grouping import plan_groupings
from planner.writing.reprice import estimate_plan

BATCH = 8
MESH = "dp=2,tp=2"
GAP = 1e-3


def session_of(family: str, **options: Any) -> PlanningSession:
    module, inputs = families.make(family, BATCH)
    job = {"cluster": "4xtoy", "dtype": "fp32", "micro_batches": 1, "ac": "none", **options}
    return PlanningSession(module, example_inputs=inputs, **job)


def step_s(plan: ShardingPlan) -> float:
    assert plan.estimate is not None
    return plan.estimate.step_time_s


def peak(plan: ShardingPlan) -> int:
    assert plan.estimate is not None
    return plan.estimate.peak_memory_bytes


def repriced(family: str, plan: ShardingPlan) -> ShardingPlan:
    """Return the plan of a file without prices, priced."""
    module, inputs = families.make(family, BATCH)
    document = json.loads(plan.to_json()) | {"estimate": None, "solver": None}
    return estimate_plan(module, ShardingPlan.from_dict(document), example_inputs=inputs)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("family", "ac"), [("gpt2", "full:1"), ("llama", "selective:1"), ("bert", "full:1"), ("t5", "selective:1")]
)
def test_blocks_that_differ_are_priced_alike_from_their_file(family: str, ac: str, seed: int) -> None:
    plan = session_of(family, ac=ac).plan(planner=f"random:{seed}", mesh=MESH)
    assert set(plan.activation_checkpointing.values()) == {ac.removesuffix(":1")}
    assert len({json.dumps(entry) for entry in json.loads(plan.to_json())["plan"].values()}) > 1
    assert repriced(family, plan).estimate == plan.estimate


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_the_first_block_lies_between_none_and_all(mode: str) -> None:
    none, first, every = (
        session_of("llama", ac=ac).plan(planner="fully-sharded", mesh="dp=4") for ac in ("none", f"{mode}:1", mode)
    )
    assert first.activation_checkpointing == {"model.layers.0": mode}
    assert step_s(none) < step_s(first) < step_s(every)
    assert peak(every) <= peak(first) < peak(none)
    assert first.job.ac == f"{mode}:1"


def test_as_many_blocks_as_there_are_is_all_of_them() -> None:
    every, many = (session_of("llama", ac=ac).plan(mesh=MESH) for ac in ("full", "full:2"))
    assert many.activation_checkpointing == {"model.layers.*": "full"}
    assert many.estimate == every.estimate


@pytest.mark.parametrize(("family", "share"), [("gpt2", 0.3), pytest.param("llama", 0.6, marks=pytest.mark.slow)])
def test_a_plan_is_never_slower_for_blocks_that_may_differ(family: str, share: float) -> None:
    free = session_of(family).plan(mesh=MESH)
    least = session_of(family).least_memory_bytes(mesh=MESH)
    assert least is not None
    cap = {"memory_gb": (least + share * (peak(free) - least)) / 1e9}
    alike, apart = (session_of(family, heterogeneous_blocks=vary, **cap).plan(mesh=MESH) for vary in (False, True))
    assert step_s(apart) <= step_s(alike)
    assert peak(apart) <= cap["memory_gb"] * 1e9
    assert repriced(family, apart).estimate == apart.estimate
    solver = apart.solver
    assert solver is not None
    assert solver.objective_s is not None
    assert solver.bound_s is not None
    assert solver.bound_s <= solver.objective_s


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_half_of_the_blocks_checkpointed_is_faster_than_all_of_them() -> None:
    config = find_config("gpt2", allow_local=False)
    assert config is not None
    with quiet_libraries():
        module = load_model({"hf_config": {**config.values, "n_layer": 4}}, seq=1024).module

    def planned(**options: Any) -> ShardingPlan:
        job: dict[str, Any] = {"cluster": "1x8xh100-sxm-80gb", "batch": 64, "seq": 1024, "micro_batches": 1}
        return PlanningSession(module, **job, **options).plan(mesh="dp=8")

    least, most = (peak(planned(ac=ac)) for ac in ("full", "none"))
    cap_gb = (least + 0.4 * (most - least)) / 1e9
    alike, apart = (planned(heterogeneous_blocks=vary, memory_gb=cap_gb) for vary in (False, True))
    assert alike.activation_checkpointing == {"transformer.h.*": "selective"}
    assert apart.activation_checkpointing == {"transformer.h.{0-1}": "selective"}
    assert step_s(apart) < 0.98 * step_s(alike)
    assert peak(apart) <= cap_gb * 1e9
    assert estimate_plan(module, ShardingPlan.from_dict(json.loads(apart.to_json()))).estimate == apart.estimate


@pytest.mark.parametrize("text", ["full:0", "none:2", "full:", "full:x", "full:²", "full:1:1", "some", "full:-1"])
def test_other_ways_to_say_it_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="ac is"):
        Checkpointing.parse(text)


def test_what_is_said_comes_back() -> None:
    for text in ("none", "selective", "full", "full:12"):
        assert str(Checkpointing.parse(text)) == text


def test_checkpointing_a_module_that_is_no_block_has_no_price() -> None:
    plan = session_of("llama").plan(mesh=MESH)
    document = json.loads(plan.to_json()) | {"activation_checkpointing": {"model.layers.*.mlp": "full"}}
    module, inputs = families.make("llama", BATCH)
    with pytest.raises(PlanMismatchError, match=r"model\.layers\.0\.mlp"):
        estimate_plan(module, ShardingPlan.from_dict(document), example_inputs=inputs)


@pytest.mark.parametrize(("every", "tried"), [(1, 1), (2, 2), (6, 4)])
def test_few_groupings_of_a_plan_are_tried(every: int, tried: int) -> None:
    """A plan that tells blocks apart in ten places is not ours, and has one grouping besides the coarsest."""
    names = tuple(f"layers.{index}" for index in range(12))
    blocks = Blocks(of_region={}, representatives=(names[0],), lists={"layers.*": names})
    again = dict.fromkeys((name for index, name in enumerate(names) if index % every == 0), "full")
    plan = ShardingPlan(mesh=PlanMesh(axes=(("dp", 4),)), activation_checkpointing=again)
    found = plan_groupings(plan, blocks, ModuleNames(parameters=(), modules=("", *names)))
    assert len(found) == tried
    assert dict(found[0].modes) == again
    assert len(dict.fromkeys(number for _, number in found[-1].parts)) == (0 if every == 1 else 12 if every == 2 else 4)


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_asked_for_by_name(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PlanRequest] = []

    def noted(request: PlanRequest, **_: Any) -> ShardingPlan:
        seen.append(request)
        raise JobError("that is enough.")

    monkeypatch.setattr("api.cli.main.plan_of", noted)
    command = [
        "plan",
        "gpt2",
        "--cluster",
        "4xtoy",
        "--batch",
        "4",
        "--seq",
        "16",
        *(["--heterogeneous-blocks"] if asked else []),
    ]
    assert CliRunner().invoke(app, command).exit_code == 2
    assert [request.spec.heterogeneous_blocks for request in seen] == [asked]
    assert opened_request(seen[0], allow_local=False).spec.heterogeneous_blocks is asked


def test_the_first_block_is_laid_out_apart_where_its_gather_waits() -> None:
    """What is stored split of the first block is gathered while nothing computes; of the others it is not.

    Folded, the relaxation is the best plan itself: it does not tell.
    """
    config = find_config("vit-large", allow_local=False)
    assert config is not None
    with quiet_libraries():
        module = load_model({"hf_config": {**config.values, "num_hidden_layers": 8}}).module
    job: dict[str, Any] = {"cluster": "1x8xh100-sxm-80gb", "batch": 8, "micro_batches": 1, "ac": "none"}
    alike, apart = (
        PlanningSession(module, **job, heterogeneous_blocks=vary).plan(mesh="dp=2,tp=4", memory_bytes=80 * 10**9)
        for vary in (False, True)
    )
    assert step_s(apart) < 0.985 * step_s(alike)
    assert any(".{1-7}." in key for key in apart.plan)
