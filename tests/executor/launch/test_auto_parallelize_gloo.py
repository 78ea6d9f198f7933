"""`auto_parallelize` on four gloo processes: what it returns trains as the unsharded module, or all ranks raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.executor_cases import make_batch, make_model
from support.gloo import run_on_gloo
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from executor import auto_parallelize, local_micro_batches, mesh_of, plan_of
from planner.errors import PlanError

STEPS, LR = 3, 0.05


def losses(module: nn.Module, batch: Any) -> list[float]:
    """Return the loss of each of a few steps, of a sharded or a plain module."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    result = []
    for _ in range(STEPS):
        try:
            parts = local_micro_batches(module, batch)
        except PlanError:  # a plain module
            parts = [batch]
        total = 0.0
        for part in parts:
            output = module(**part) if isinstance(part, dict) else module(*part)
            loss = (output if isinstance(output, torch.Tensor) else output.loss) / len(parts)
            loss.backward()
            value = loss.detach()
            total += float(value.full_tensor() if isinstance(value, DTensor) else value)
        optimizer.step()
        optimizer.zero_grad()
        result.append(total)
    return result


def trained(family: str, **options: Any) -> dict[str, Any]:
    """Return the losses of an auto-parallelized model and of the same model unsharded, and what the plan says."""
    module, batch = make_model(family), make_batch(family)
    if family == "llama":
        batch["labels"] = batch["input_ids"]  # no ignored labels: the mean of micro-batches' means is that of the batch
    expected = losses(copy.deepcopy(module), batch)
    returned = auto_parallelize(module, batch, **options)
    plan = plan_of(module)
    return {
        "expected": expected,
        "losses": losses(module, batch),
        "in_place": returned is module,
        "mesh": (mesh_of(module).mesh_dim_names, tuple(mesh_of(module).shape)),
        "planned": (plan.mesh.names, plan.mesh.shape),
        "micro_batches": plan.micro_batches,
        "assumed": [line.split(":")[0] for line in plan.assumed],
        "cluster": (plan.cluster["nodes"], plan.cluster["devices_per_node"]),
        "text": plan.to_json(),
        "copied": bool(plan.fully_shard) or plan_of(copy.deepcopy(module)) is plan,
    }


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class and the text of what ``call`` raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is the result
        return type(error).__name__, str(error)
    return "", ""


class FailsOnFirst(nn.Module):
    """A module whose forward fails on rank 0 only, in a way that no planner expects."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank = nn.Linear(4, 4), rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()

    def parameters(self, recurse: bool = True) -> Any:
        if self.rank == 0:
            raise KeyError("only here")
        return super().parameters(recurse)


def scenarios(rank: int) -> dict[str, Any]:
    inputs = make_batch("mlp")
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("half",))
    table: dict[str, Any] = {
        "alone": trained("mlp"),
        "mesh": trained("llama", mesh=square),
        "micro-batches": trained("llama", mesh="dp=2,tp=2", micro_batches=2, cluster="1x4xtoy"),
        "same mesh": mesh_of(auto_parallelize(make_model("mlp"), inputs, mesh=square)) is square,
        "nothing fits": raised(lambda: auto_parallelize(make_model("mlp"), inputs, memory_gb=1e-6)),
        "other size": raised(lambda: auto_parallelize(make_model("mlp"), inputs, cluster="2x8xtoy")),
        "fault": raised(lambda: auto_parallelize(FailsOnFirst(rank), (torch.zeros(8, 4),))),
        "outside": ("", "") if rank < 2 else raised(lambda: auto_parallelize(make_model("mlp"), inputs, mesh=pair)),
        "half": trained("mlp", mesh=pair)["losses"] if rank < 2 else None,
        "not sharded": raised(lambda: plan_of(nn.Linear(2, 2))),
    }
    module = auto_parallelize(make_model("mlp"), inputs, micro_batches=2, mesh="dp=4")
    table["odd batch"] = raised(lambda: local_micro_batches(module, tuple(t[:7] for t in inputs.values())))
    return table


@pytest.fixture(scope="module")
def tables() -> list[dict[str, Any]]:
    return run_on_gloo(scenarios, 4)


@pytest.mark.parametrize("name", ["alone", "mesh", "micro-batches"])
def test_losses_are_those_of_the_unsharded_module(tables: list[dict[str, Any]], name: str) -> None:
    for table in tables:
        row = table[name]
        assert row["losses"] == pytest.approx(row["expected"], rel=1e-5)
        assert row["losses"][-1] < row["losses"][0]
        assert row["in_place"]
        assert row["copied"]
        assert row["text"] == tables[0][name]["text"]


def test_the_cluster_is_that_of_the_ranks(tables: list[dict[str, Any]]) -> None:
    row = tables[0]["alone"]
    assert row["assumed"] == ["cluster 1x4xcpu", "dtype fp32"]
    assert row["cluster"] == (1, 4)


def test_a_device_mesh_is_the_mesh_of_plan_and_module(tables: list[dict[str, Any]]) -> None:
    row = tables[0]["mesh"]
    assert row["mesh"] == row["planned"] == (("outer", "inner"), (2, 2))
    assert all(table["same mesh"] for table in tables)


def test_micro_batches_are_fed_one_after_the_other(tables: list[dict[str, Any]]) -> None:
    row = tables[0]["micro-batches"]
    assert row["micro_batches"] == 2
    assert row["assumed"] == ["dtype fp32"]
    assert tables[0]["odd batch"][0] == "PlanLayoutError"
    assert "7 samples does not divide into the plan's 2 micro-batches" in tables[0]["odd batch"][1]


def test_a_mesh_of_some_ranks_is_theirs_alone(tables: list[dict[str, Any]]) -> None:
    assert tables[0]["half"] == pytest.approx(tables[0]["alone"]["expected"], rel=1e-5)
    for rank in (2, 3):
        kind, text = tables[rank]["outside"]
        assert kind == "PlanMismatchError"
        assert f"Rank {rank} is not in the device mesh, which has the ranks 0, 1" in text


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("nothing fits", "InfeasibleError", "No plan fits"),
        ("other size", "JobError", "has 16 devices, and this program 4 ranks"),
    ],
)
def test_all_ranks_raise_what_the_first_does(tables: list[dict[str, Any]], name: str, kind: str, said: str) -> None:
    assert {table[name] for table in tables} == {tables[0][name]}
    assert tables[0][name][0] == kind
    assert said in tables[0][name][1]


def test_a_fault_of_the_first_rank_alone_is_raised_on_all(tables: list[dict[str, Any]]) -> None:
    assert tables[0]["fault"] == ("KeyError", "'only here'")
    for table in tables[1:]:
        assert table["fault"][0] == "PlanError"
        assert "Rank 0 failed while it planned: KeyError: 'only here'" in table["fault"][1]


def test_a_module_that_is_not_sharded_has_no_plan(tables: list[dict[str, Any]]) -> None:
    assert tables[0]["not sharded"] == (
        "PlanMismatchError",
        "This Linear is no sharded module. Give the module that auto_parallelize or shard_module returned, not a part "
        "of it.",
    )
