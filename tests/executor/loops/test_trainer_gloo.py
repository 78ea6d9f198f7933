"""transformers' Trainer with a sharded model gives the numbers of a Trainer in one process, on four real processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.executor_cases import Case, data_parallel, fully_sharded, make_model, megatron
from support.gloo import run_on_gloo
from support.training_loops import Rows, as_under_torchrun, largest_difference, parameters_of

from executor import device_mesh_for, prepare_trainer, shard_module
from planner.errors import LoopError, PlanMismatchError, RanksError

# What transformers and torch warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")

EVALUATED = 10
"""Rows of evaluation: the last batch is smaller."""
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "max_steps": 5,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,  # AdamW would divide rounding by rounding
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop with the plan that its model runs, and the arguments of its Trainer."""

    family: str
    arguments: dict[str, Any]

    def case(self) -> Case:
        if self.family == "gpt2":
            return data_parallel("gpt2", micro_batches=2)
        return megatron(vocabulary=True, fsdp=True)


LOOPS = {
    "tensor parallel with FSDP, clipping": Loop("llama", {"max_grad_norm": 0.5}),
    "data parallel, accumulation, label smoothing": Loop(
        "gpt2", {"gradient_accumulation_steps": 2, "max_steps": 3, "label_smoothing_factor": 0.1}
    ),
}


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    right = logits[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[prediction.label_ids[:, 1:] != -100].mean()), "rows": len(logits)}


def make_trainer(model: torch.nn.Module, folder: str, **arguments: Any) -> transformers.Trainer:
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=folder, **COMMON | arguments),
        train_dataset=Rows(48),
        eval_dataset=Rows(EVALUATED, seed=1),
        compute_metrics=accuracy,
    )


def results_of(trainer: transformers.Trainer) -> dict[str, Any]:
    """Return losses and gradient norms of the steps, metrics of an evaluation, and the parameters at the end."""
    steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    metrics = {name: value for name, value in trainer.evaluate().items() if name.startswith("eval_")}
    metrics = {name: metrics[name] for name in ("eval_loss", "eval_accuracy", "eval_rows")}
    return {"steps": steps, "metrics": metrics, "parameters": parameters_of(trainer.model)}


def unsharded(name: str, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(make_model(LOOPS[name].family), str(folder), **LOOPS[name].arguments)
    trainer.train()
    return results_of(trainer)


def sharded(case: Case, folder: str, **arguments: Any) -> transformers.Trainer:
    model = shard_module(make_model(case.family), device_mesh_for(case.plan), case.plan)
    trainer: transformers.Trainer = prepare_trainer(make_trainer(model, folder, **arguments))
    return trainer


def run(rank: int, folder: str) -> dict[str, Any]:
    as_under_torchrun(rank)
    results: dict[str, Any] = {}
    for name, loop in LOOPS.items():
        trainer = sharded(loop.case(), folder, **loop.arguments)
        trainer.train()
        results[name] = results_of(trainer)
    name, loop = next(iter(LOOPS.items()))

    # A checkpoint after three steps, resumed under another plan.
    first = sharded(
        loop.case(), folder, **loop.arguments, save_strategy="steps", save_steps=3, save_total_limit=1, seed=42
    )
    first.add_callback(StopAfterThree())
    first.train()
    second = sharded(fully_sharded("llama"), folder, **loop.arguments)
    second.train(resume_from_checkpoint=True)
    results["resumed"] = results_of(second)
    second.save_model()  # into a folder that holds checkpoints

    results["errors"] = errors(loop, folder)
    return results


class StopAfterThree(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def errors(loop: Loop, folder: str) -> dict[str, str]:
    """Return what is said of loops that would be wrong."""
    case = loop.case()
    model = shard_module(make_model(case.family), device_mesh_for(case.plan), case.plan)
    said = {}
    with pytest.raises(PlanMismatchError) as unprepared:
        make_trainer(model, folder).train()
    said["unprepared"] = str(unprepared.value)
    with pytest.raises(PlanMismatchError) as plain:
        prepare_trainer(make_trainer(make_model("llama"), folder))
    said["plain"] = str(plain.value)
    for option in ("bf16", "torch_compile", "activation_checkpointing"):
        with pytest.raises(LoopError) as refused:
            prepare_trainer(make_trainer(model, folder, **{option: True}))
        said[option] = str(refused.value)
    trainer = prepare_trainer(make_trainer(model, folder))
    trainer.train_dataset = Rows(8, seed=int(torch.distributed.get_rank()))
    with pytest.raises(RanksError) as different:
        trainer.train()
    said["different batches"] = str(different.value)
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = run_on_gloo(run, 4, str(folder))[3]
    return results


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    return {name: unsharded(name, folder) for name in LOOPS}


@pytest.mark.parametrize("name", LOOPS)
def test_losses_and_gradient_norms_are_those_of_one_process(results: Any, expected: Any, name: str) -> None:
    assert len(results[name]["steps"]) == LOOPS[name].arguments.get("max_steps", 5)
    for step, reference in zip(results[name]["steps"], expected[name]["steps"], strict=True):
        assert step == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("name", [*LOOPS, "resumed"])
def test_parameters_and_metrics_are_those_of_one_process(results: Any, expected: Any, name: str) -> None:
    reference = expected.get(name, expected[next(iter(LOOPS))])
    largest = max(tensor.abs().max().item() for tensor in reference["parameters"].values())
    actual = results[name]["parameters"]
    assert set(actual) == set(reference["parameters"])
    for key, tensor in reference["parameters"].items():
        assert (actual[key] - tensor).abs().max().item() <= 1e-5 * largest
    assert results[name]["metrics"] == pytest.approx(reference["metrics"], rel=1e-5)
    assert reference["metrics"]["eval_rows"] == EVALUATED


def test_a_checkpoint_is_read_by_from_pretrained(results: Any, folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert largest_difference(model, results["resumed"]["parameters"]) == 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unprepared", "executor.prepare_trainer(trainer)"),
        ("plain", "is no sharded module"),
        ("bf16", "bf16 by autocast"),
        ("torch_compile", "torch_compile, which a sharded model does not allow"),
        ("activation_checkpointing", "activation_checkpointing"),
        ("different batches", "Ranks 1, 2, 3 pass another batch than rank 0"),
    ],
)
def test_what_would_be_wrong_is_refused_on_every_rank(results: Any, what: str, words: str) -> None:
    assert words in results["errors"][what]
