"""accelerate's Accelerator with a sharded module gives the numbers of a loop in one process, on four real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from support.executor_cases import Case, data_parallel, fully_sharded, make_model, megatron
from support.gloo import run_on_gloo
from support.training_loops import Rows, as_under_torchrun, parameters_of
from torch.utils.data import DataLoader, DistributedSampler

from executor import device_mesh_for, prepare_accelerator, shard_module
from planner.errors import LoopError, PlanMismatchError

pytestmark = pytest.mark.filterwarnings("default")

ROWS, EVALUATED, BATCH = 32, 12, 8
ACCUMULATED = 2


def loader_of(rows: Rows, **options: Any) -> DataLoader:
    return DataLoader(rows, batch_size=BATCH, **options)


def parts(model: torch.nn.Module, *, seed: int) -> tuple[Any, ...]:
    """Return model, optimizer, training loader, evaluation loader and scheduler."""
    torch.manual_seed(seed)  # ranks have different seeds: the order of the rows is rank 0's
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loaders = loader_of(Rows(ROWS), shuffle=True), loader_of(Rows(EVALUATED, seed=1))
    return model, optimizer, *loaders, scheduler


def train(accelerator: Any, prepared: tuple[Any, ...], losses: list[float], *, epochs: int = 1) -> None:
    model, optimizer, loader, _, scheduler = prepared
    model.train()
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())


def evaluate(accelerator: Any, prepared: tuple[Any, ...]) -> dict[str, Any]:
    model, _, _, loader, _ = prepared
    model.eval()
    predictions, labels = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        for values, gathered in zip(
            (predictions, labels), accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"])), strict=True
        ):
            values.append(gathered)
    names = accelerator.gather_for_metrics(["a row"] * (EVALUATED % BATCH))
    return {"predictions": torch.cat(predictions), "labels": torch.cat(labels), "names": len(names)}


def results_of(accelerator: Any, prepared: tuple[Any, ...], losses: list[float]) -> dict[str, Any]:
    results = {"losses": [*losses], "rate": prepared[4].get_last_lr(), **evaluate(accelerator, prepared)}
    return {**results, "parameters": parameters_of(prepared[0])}


def sharded(case: Case) -> torch.nn.Module:
    return shard_module(make_model(case.family), device_mesh_for(case.plan), case.plan)


CASES = {
    "tensor parallel with FSDP": lambda: megatron(vocabulary=True, fsdp=True, micro_batches=ACCUMULATED),
    "data parallel": lambda: data_parallel("llama", micro_batches=ACCUMULATED),
}


def run(rank: int, folder: str) -> dict[str, Any]:
    as_under_torchrun(rank)
    results: dict[str, Any] = {}
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=ACCUMULATED)  # made before the model is sharded
    for name, make in CASES.items():
        accelerator.free_memory()
        model = sharded(make())
        prepared = prepare_accelerator(accelerator, model).prepare(*parts(model, seed=rank))
        assert prepared[0] is model
        losses: list[float] = []
        train(accelerator, prepared, losses)
        results[name] = results_of(accelerator, prepared, losses)
    accelerator.save_state(f"{folder}/state")
    whole = accelerator.get_state_dict(model)
    results["whole"] = {name: tensor for name, tensor in whole.items() if name == "lm_head.weight"}
    model.save_pretrained(f"{folder}/model", is_main_process=accelerator.is_main_process, state_dict=whole)

    other = sharded(fully_sharded("llama", micro_batches=ACCUMULATED))
    accelerator = prepare_accelerator(accelerate.Accelerator(gradient_accumulation_steps=ACCUMULATED), other)
    prepared = accelerator.prepare(*parts(other, seed=rank))
    accelerator.load_state(f"{folder}/state")
    train(accelerator, prepared, losses)
    results["resumed"] = results_of(accelerator, prepared, losses)
    results["errors"] = errors(sharded(data_parallel("llama")))
    return results


def errors(model: torch.nn.Module) -> dict[str, str]:
    said = {}
    with pytest.raises(PlanMismatchError) as wrapped:
        accelerate.Accelerator().prepare(model)
    said["unprepared"] = str(wrapped.value)
    accelerator = prepare_accelerator(accelerate.Accelerator(), model)
    rows = Rows(ROWS)
    with pytest.raises(LoopError) as sampler:
        accelerator.prepare(loader_of(rows, sampler=DistributedSampler(rows)))
    said["sampler"] = str(sampler.value)
    return said


def unsharded() -> dict[str, Any]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=True)
    prepared = accelerator.prepare(*parts(make_model("llama"), seed=0))
    losses: list[float] = []
    train(accelerator, prepared, losses)
    first = results_of(accelerator, prepared, losses)
    train(accelerator, prepared, losses)
    return {"trained": first, "resumed": results_of(accelerator, prepared, losses)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_on_gloo(run, 4, str(folder))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return unsharded()


@pytest.mark.parametrize("name", [*CASES, "resumed"])
def test_a_loop_has_the_numbers_of_one_process(results: Any, expected: Any, name: str) -> None:
    reference = expected.get(name, expected["trained"])
    actual = results[3][name]
    assert actual["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert actual["rate"] == pytest.approx(reference["rate"])
    largest = max(tensor.abs().max().item() for tensor in reference["parameters"].values())
    for key, tensor in reference["parameters"].items():
        assert (actual["parameters"][key] - tensor).abs().max().item() <= 1e-5 * largest


@pytest.mark.parametrize("name", [*CASES, "resumed"])
def test_metrics_get_every_row_once(results: Any, expected: Any, name: str) -> None:
    reference = expected.get(name, expected["trained"])
    actual = results[3][name]
    assert len(actual["predictions"]) == EVALUATED
    assert torch.equal(actual["labels"], reference["labels"])
    assert torch.equal(actual["predictions"], reference["predictions"])
    assert actual["names"] == EVALUATED % BATCH


def test_a_state_dict_is_whole_on_rank_0_and_saved_as_usual(results: Any, folder: Path) -> None:
    import transformers

    parameters = results[0]["data parallel"]["parameters"]
    assert torch.equal(results[0]["whole"]["lm_head.weight"], parameters["lm_head.weight"])
    assert all(not rank["whole"] for rank in results[1:])
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    assert all(torch.equal(parameters[name], parameter) for name, parameter in saved.named_parameters())


def test_what_would_be_wrong_is_refused_on_every_rank(results: Any) -> None:
    for rank in results:
        assert "executor.prepare_accelerator(accelerator, model)" in rank["errors"]["unprepared"]
        assert "DistributedSampler" in rank["errors"]["sampler"]
