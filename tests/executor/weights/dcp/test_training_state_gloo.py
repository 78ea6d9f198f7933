"""Training state, resumed under other plans and on another number of ranks: as if the run had not been interrupted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.executor_cases import (
    LLAMA_BLOCKS,
    Case,
    R,
    fully_sharded,
    loss_of,
    make_batch,
    make_model,
    megatron,
    with_fsdp_groups,
)
from support.gloo import run_on_gloo
from support.weight_cases import CASES, sharded_on_meta, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from executor import load_training_state, load_weights, save_training_state
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.errors import WeightsError
from planner.model_rewrites.fuse_projections import unfuse_state_dict
from planner.plan.sharding_plan import PlanMesh

STEPS_BEFORE, STEPS_AFTER = 2, 1


def fused() -> Case:
    """Return data-parallel Llama with fused projections, all parameters stored sharded on both axes."""
    case = fully_sharded("llama")
    stored: dict[str, Any] = {}
    for name, layout in case.plan.plan.items():
        for parts, own in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                name = name.replace(f".{part}.", f".{own}.")
        stored[name] = layout
    computed = {name: (R, R) for name, layout in stored.items() if layout != (R, R)}
    job = dataclasses.replace(case.plan.job, fused_projections=True)
    return Case("llama", dataclasses.replace(case.plan, plan=stored, compute_plan=computed, job=job))


def on_two_ranks() -> Case:
    case = megatron()
    return Case("llama", dataclasses.replace(case.plan, mesh=PlanMesh(axes=(("dp", 1), ("tp", 2)), device="cpu")))


PLANS: dict[str, Callable[[], Case]] = {
    "fsdp and tp": lambda: with_fsdp_groups(megatron(), LLAMA_BLOCKS),
    "tp": megatron,
    "fused": fused,
}


class Run:
    """A model, its optimizer with two groups, and its scheduler."""

    def __init__(self, case: Case, *, on_meta: bool) -> None:
        self.plan, self.mesh = case.plan, device_mesh_for(case.plan)
        if on_meta:
            self.model = sharded_on_meta("llama", case.plan)
        else:
            self.model = shard_module(make_model("llama"), self.mesh, case.plan)
        self.optimizer, self.scheduler = make_optimizer(self.model)

    def step(self, number: int) -> None:
        batch = make_batch("llama", seed=number)
        loss_of(self.model(**local_batch(batch, self.mesh, self.plan))).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def arguments(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self.model, self.optimizer

    def parameters(self) -> dict[str, torch.Tensor]:
        return unfuse_state_dict(self.model, {name: whole(p) for name, p in self.model.state_dict().items()})


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "lr": 2e-3}]
    # A large eps, because Adam turns gradients that are nearly zero into steps of full size, of either sign.
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


@functools.cache
def unsharded() -> dict[str, torch.Tensor]:
    """Return the parameters after all steps without interruption, on one process."""
    model = make_model("llama")
    optimizer, scheduler = make_optimizer(model)
    for number in range(STEPS_BEFORE + STEPS_AFTER):
        loss_of(model(**make_batch("llama", seed=number))).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


def difference(run: Run) -> float:
    expected, own = unsharded(), run.parameters()
    assert own.keys() == expected.keys()
    return max((own[name] - tensor).abs().max().item() for name, tensor in expected.items())


ORDINARY = (("fsdp and tp", "tp"), ("tp", "fused"), ("fused", "fsdp and tp"))


def save_and_resume(rank: int, folder: str, pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return, for each pair of plans, how far the resumed run is from the uninterrupted one."""
    results: dict[str, Any] = {}
    for saved in PLANS:
        run, path = Run(PLANS[saved](), on_meta=False), Path(folder) / saved
        for number in range(STEPS_BEFORE):
            run.step(number)
        extra = {"step": STEPS_BEFORE, "seen": [1, 2]}
        save_training_state(path, *run.arguments(), scheduler=run.scheduler, extra=extra)
        drawn = torch.rand(1)
        for resumed in (to for start, to in pairs if start == saved):
            again = Run(PLANS[resumed](), on_meta=True)
            found = load_training_state(path, *again.arguments(), scheduler=again.scheduler)
            assert found == extra
            assert torch.equal(torch.rand(1), drawn)
            before, after = run.parameters(), again.parameters()
            assert all(torch.equal(before[name], after[name]) for name in before)
            for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
                again.step(number)
            results[f"{saved} -> {resumed}"] = difference(again)
    if pairs != ORDINARY:
        return results
    results["weights alone"] = max(weights_alone(Path(folder) / plan, plan) for plan in ("tp", "fused"))
    results["strided shards"] = strided_shards(Path(folder) / "strided")
    results["torch's calls"] = by_torchs_own_calls(folder)
    results["scalars and buffers"] = scalars_and_buffers(Path(folder) / "scalars")
    results["errors"] = errors(Path(folder) / "tp")
    return results


def weights_alone(folder: Path, plan: str) -> float:
    model = load_weights(sharded_on_meta("llama", PLANS["fsdp and tp"]().plan), folder)
    run = Run(PLANS[plan](), on_meta=True)
    load_training_state(folder, *run.arguments(), scheduler=run.scheduler)
    own = {name: whole(p) for name, p in model.state_dict().items()}
    return max((own[name] - tensor).abs().max().item() for name, tensor in run.parameters().items())


def by_torchs_own_calls(folder: str) -> list[str]:
    """Return names that differ: torch reads what we write, and we read what torch writes."""
    run = Run(PLANS["tp"](), on_meta=False)
    run.step(0)
    states = dict(zip(("model", "optimizer"), get_state_dict(*run.arguments()), strict=True))
    dcp.save(states, checkpoint_id=Path(folder) / "torch's")
    read = load_weights(sharded_on_meta("llama", PLANS["fsdp and tp"]().plan), Path(folder) / "torch's")
    own, again = run.parameters(), {name: whole(p) for name, p in read.state_dict().items()}
    save_training_state(Path(folder) / "ours", *run.arguments())
    other = Run(PLANS["fsdp and tp"](), on_meta=False)
    other.step(1)
    model, optimizer = get_state_dict(*other.arguments())
    tensors = {"model": model, "optimizer": {"state": optimizer["state"]}}
    for values in tensors["optimizer"]["state"].values():
        del values["step"]  # no tensor of the parameter's shape
    dcp.load(tensors, checkpoint_id=Path(folder) / "ours")
    wrong = [name for name, tensor in model.items() if not torch.equal(whole(tensor), own[name])]
    states_of = {name: run.optimizer.state[p] for name, p in run.model.named_parameters()}
    for name, values in tensors["optimizer"]["state"].items():
        wrong += [name for key in values if not torch.equal(whole(values[key]), whole(states_of[name][key]))]
    return wrong + [name for name in own if not torch.equal(own[name], again[name])]


def strided_shards(folder: Path) -> dict[str, Any]:
    """Save experts whose gate and up weights are a strided shard: torch's own save refuses it."""
    plan = CASES["mixtral"]().plan
    model = shard_module(make_model("mixtral"), device_mesh_for(plan), plan)
    by_torch = "saved"
    try:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "by torch")
    except dcp.api.CheckpointException as error:
        by_torch = str(error)
    save_training_state(folder / "ours", model)
    again = load_weights(sharded_on_meta("mixtral", fully_sharded("mixtral").plan), folder / "ours")
    expected = make_model("mixtral").state_dict()
    wrong = [name for name, p in again.state_dict().items() if not torch.equal(whole(p), expected[name])]
    return {"by torch": by_torch, "wrong": wrong}


class Scaled(nn.Module):
    """A module with a parameter without dims, and buffers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        self.scale = nn.Parameter(distribute_tensor(torch.tensor(value), mesh, (R,)))
        self.bias = nn.Parameter(torch.tensor(value))
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(value)


def scalars_and_buffers(folder: Path) -> list[str]:
    modules = Scaled(2.0), Scaled(3.0)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in modules]
    for parameter in modules[0].parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizers[0].step()
    save_training_state(folder, modules[0], optimizers[0])
    load_training_state(folder, modules[1], optimizers[1])
    for module, optimizer in zip(modules, optimizers, strict=True):
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 0.25
        optimizer.step()
    first, second = ({name: whole(t) for name, t in module.state_dict().items()} for module in modules)
    return [name for name in first if not torch.equal(first[name], second[name])]


def errors(folder: Path) -> list[str]:
    run = Run(PLANS["tp"](), on_meta=True)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    one_group = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    calls: list[Callable[[], Any]] = [
        lambda: load_training_state(folder, run.model),
        lambda: load_training_state(folder, *run.arguments()),
        lambda: load_training_state(folder, run.model, other, scheduler=run.scheduler),
        lambda: load_training_state(folder, run.model, one_group, scheduler=run.scheduler),
        lambda: load_training_state(folder.parent / "nowhere", *run.arguments()),
        lambda: save_training_state(folder, *run.arguments()),
        lambda: save_training_state(folder.parent, make_model("llama")),
        lambda: save_training_state(folder.parent / "other", make_model("llama"), extra={"path": Path("x")}),
    ]
    said = []
    for call in calls:
        with pytest.raises(WeightsError) as caught:
            call()
        said.append(str(caught.value))
    return said


def resume_on_two(rank: int, folder: str) -> dict[str, float]:
    results = {}
    for saved in ("fsdp and tp",):
        run = Run(on_two_ranks(), on_meta=True)
        load_training_state(Path(folder) / saved, *run.arguments(), scheduler=run.scheduler)
        for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            run.step(number)
        results[saved] = difference(run)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training-state")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_on_gloo(save_and_resume, 4, str(folder), ORDINARY)


def test_a_run_resumed_under_any_plan_is_the_uninterrupted_run(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        differences = {name: value for name, value in of_rank.items() if "->" in name}
        assert len(differences) == len(ORDINARY)
        assert max(differences.values()) <= 1e-5, differences
        assert of_rank["weights alone"] == 0.0


@pytest.mark.slow
def test_every_pair_of_plans(tmp_path: Path) -> None:
    pairs = tuple(pair for pair in itertools.product(PLANS, repeat=2) if pair not in ORDINARY)
    for differences in run_on_gloo(save_and_resume, 4, str(tmp_path), pairs):
        assert len(differences) == len(pairs)
        assert max(differences.values()) <= 1e-5, differences


def test_a_run_on_four_ranks_is_resumed_on_two(results: list[dict[str, Any]], folder: Path) -> None:
    for of_rank in run_on_gloo(resume_on_two, 2, str(folder)):
        assert max(of_rank.values()) <= 1e-5, of_rank


def test_torch_reads_what_we_write_and_we_read_what_torch_writes(results: list[dict[str, Any]]) -> None:
    assert [of_rank["torch's calls"] for of_rank in results] == [[]] * 4


def test_scalars_and_buffers_are_resumed(results: list[dict[str, Any]]) -> None:
    assert [of_rank["scalars and buffers"] for of_rank in results] == [[]] * 4


def test_strided_shards_are_saved(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["strided shards"]["by torch"] != "saved"
        assert of_rank["strided shards"]["wrong"] == []


def test_errors_say_what_to_do(results: list[dict[str, Any]]) -> None:
    expected = [
        "has an optimizer, and none was passed",
        "has a scheduler, and none was passed",
        "1 of the optimizer's 1 parameters are not the module's",
        "The parameters of group 0 of the optimizer",
        "holds no training state",
        "Call load_weights first",
        "it is not a checkpoint that this call would replace",
        "numbers, texts, tensors",
    ]
    for of_rank in results:
        for said, words in zip(of_rank["errors"], expected, strict=True):
            assert words in said or said.startswith("Rank 0 failed in")
