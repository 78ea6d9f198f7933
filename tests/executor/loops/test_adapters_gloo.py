"""LoRA before and after a module is sharded gives the numbers of the unsharded model, on four real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from support.executor_cases import LLAMA_BLOCKS, fully_sharded, make_batch, make_model, megatron, with_fsdp_groups
from support.gloo import run_on_gloo
from support.selected import selected
from support.training_loops import Rows, as_under_torchrun, whole
from torch.distributed.tensor import DTensor, distribute_tensor

from executor import add_adapters, device_mesh_for, local_batch, prepare_trainer, save_adapters, shard_module
from executor.loops.adapters import load_adapters
from planner import ShardingPlan, build_plan
from planner.errors import LoopError, PlanMismatchError

pytestmark = pytest.mark.filterwarnings("default")

STEPS = 3
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]
TARGETS_ADDED = ["embed_tokens", *TARGETS]
"""The planner cannot plan the adapters of an embedding, which stand in a ParameterDict."""
PLANS = {
    "tensor parallel, vocabulary and FSDP": lambda: megatron(vocabulary=True, fsdp=True).plan,
    "FSDP groups": lambda: with_fsdp_groups(megatron(), LLAMA_BLOCKS).plan,
    "fully sharded, recomputed": lambda: (
        fully_sharded("llama", activation_checkpointing={"model.layers.*": "full"}).plan
    ),
}
MESHES = ("dp=2,tp=2",)


def config(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options)


def with_adapters(
    model: torch.nn.Module, make: Callable[..., Any] = peft.get_peft_model, targets: list[str] = TARGETS
) -> Any:
    """Return peft's model; the second projections are not zero, so that all adapters have gradients."""
    adapted = make(model, config(target_modules=targets))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                values: torch.Tensor = torch.randn(parameter.shape, generator=generator) / 8
                if isinstance(parameter, DTensor):
                    values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
                parameter.copy_(values)
    return adapted


def train(model: torch.nn.Module, local: Callable[[Any], Any]) -> dict[str, Any]:
    """Return losses of a few steps, and the parameters that they trained."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    losses = []
    for step in range(STEPS):
        loss = model(**local(make_batch("llama", step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    return {"losses": losses, "adapters": {name: whole(p) for name, p in trained.items()}}


def planned(mesh: str) -> ShardingPlan:
    model = with_adapters(make_model("llama"))
    inputs = make_batch("llama")
    return build_plan(model, cluster="1x4xtoy", mesh=mesh, dtype="fp32", optimizer="sgd", example_inputs=inputs)


def run(rank: int, written: list[str], plans: dict[str, ShardingPlan], folder: str) -> dict[str, Any]:
    as_under_torchrun(rank)
    torch.manual_seed(rank)  # adapters are those of rank 0
    results: dict[str, Any] = {}
    for name in written:
        plan = PLANS[name]()
        mesh = device_mesh_for(plan)
        model = with_adapters(shard_module(make_model("llama"), mesh, plan), add_adapters, TARGETS_ADDED)
        results[name] = train(model, lambda batch, plan=plan, mesh=mesh: local_batch(batch, mesh, plan))
    for name, plan in plans.items():
        mesh = device_mesh_for(plan)
        model = shard_module(with_adapters(make_model("llama")), mesh, plan)
        results[name] = train(model, lambda batch, plan=plan, mesh=mesh: local_batch(batch, mesh, plan))
    save_adapters(model, Path(folder) / "saved")
    other = add_adapters(sharded(), config())
    load_adapters(other, Path(folder) / "saved")
    results["loaded"] = {name: whole(p) for name, p in other.named_parameters() if p.requires_grad}
    trainer = trainer_of(other, f"{folder}/trainer", save_strategy="steps", save_steps=2)
    prepare_trainer(trainer).train()
    results["trainer"] = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    resumed = prepare_trainer(trainer_of(add_adapters(sharded(), config()), f"{folder}/trainer"))
    resumed.train(resume_from_checkpoint=f"{folder}/trainer/checkpoint-2")
    results["resumed"] = [log["loss"] for log in resumed.state.log_history if "grad_norm" in log]
    results["errors"] = errors()
    return results


def sharded() -> torch.nn.Module:
    plan = megatron(vocabulary=True, fsdp=True).plan
    return shard_module(make_model("llama"), device_mesh_for(plan), plan)


def trainer_of(model: torch.nn.Module, folder: str, **options: Any) -> transformers.Trainer:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=folder, **arguments | options),
        train_dataset=Rows(32),
    )


def errors() -> dict[str, str]:
    said = {}
    for option in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(LoopError) as refused:
            add_adapters(sharded(), config(**option))
        said[next(iter(option))] = str(refused.value)
    with pytest.raises(PlanMismatchError) as plain:
        peft.get_peft_model(sharded(), config())(**make_batch("llama"))
    said["get_peft_model"] = str(plain.value)
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    written = [name for name in selected(request, "name") if name in PLANS]
    return run_on_gloo(run, 4, written, {mesh: planned(mesh) for mesh in MESHES}, str(folder))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {
        name: train(with_adapters(make_model("llama"), targets=targets), lambda batch: batch)
        for name, targets in (("planned", TARGETS), ("added", TARGETS_ADDED))
    }


@pytest.mark.parametrize("name", [*PLANS, *MESHES])
def test_losses_and_adapters_are_those_of_the_unsharded_model(results: Any, expected: Any, name: str) -> None:
    actual, reference = results[3][name], expected["added" if name in PLANS else "planned"]
    assert actual["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert set(actual["adapters"]) == set(reference["adapters"])
    for key, tensor in reference["adapters"].items():
        assert (actual["adapters"][key] - tensor).abs().max().item() <= 1e-5 * tensor.abs().max().item()


def test_adapters_are_saved_whole_and_read_by_peft_and_under_another_plan(results: Any, folder: Path) -> None:
    trained = results[0][MESHES[-1]]["adapters"]
    model = peft.PeftModel.from_pretrained(make_model("llama"), folder / "saved")
    for adapters in (dict(model.named_parameters()), results[0]["loaded"]):
        assert all(torch.equal(adapters[name], tensor) for name, tensor in trained.items())


def test_a_trainer_trains_adapters_and_resumes(results: Any, folder: Path) -> None:
    model = peft.PeftModel.from_pretrained(make_model("llama"), folder / "saved", is_trainable=True)
    trainer = trainer_of(model, str(folder / "unsharded"))
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]
    assert results[1]["trainer"] == pytest.approx(losses, rel=1e-5)
    assert results[1]["resumed"] == pytest.approx(losses, rel=1e-5)
    files = {path.name for path in (folder / "trainer" / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("use_dora", "before build_plan"),
        ("init_lora_weights", "before build_plan"),
        ("modules_to_save", "before build_plan"),
        ("get_peft_model", "executor.add_adapters(model, config) in place of get_peft_model"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(results: Any, what: str, words: str) -> None:
    assert all(words in rank["errors"][what] for rank in results)
