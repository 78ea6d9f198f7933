"""Weights on four ranks: state dicts on one of them, errors on all of them, gradients after loading from meta."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.executor_cases import (
    FP32,
    LLAMA_BLOCKS,
    Case,
    P,
    loss_of,
    make_batch,
    make_model,
    megatron,
    reshard_after_step,
    with_fsdp_groups,
)
from support.gloo import run_on_gloo
from support.weight_cases import read_checkpoint, sharded_on_meta, whole, write_checkpoint
from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.weights.load import load_weights
from executor.weights.safetensors_file import SafetensorsFile
from executor.weights.save import save_weights
from planner.errors import WeightsError


def case() -> Case:
    """Return Llama with tensor parallelism, FSDP groups kept for the step, and gradients reduced on tp afterwards."""
    made = reshard_after_step(with_fsdp_groups(megatron(micro_batches=2), LLAMA_BLOCKS))
    norms = {name: (layout[0], P) for name, layout in made.plan.plan.items() if "norm" in name}
    return Case("llama", dataclasses.replace(made.plan, gradient_plan={**made.plan.gradient_plan, **norms}))


def in_bf16() -> Case:
    """Return the same, computed in bf16 and stored in fp32."""
    made = case()
    job = dataclasses.replace(FP32, dtype="bf16", reduce_dtype="fp32")
    return Case("llama", dataclasses.replace(made.plan, job=job))


def for_prefill() -> Case:
    """Return a plan for inference, which stores parameters in bf16."""
    made = megatron()
    job = dataclasses.replace(FP32, dtype="bf16", phase="prefill", training=False)
    return Case("llama", dataclasses.replace(made.plan, job=job, input_plan={}, output_plan={}))


def in_bf16_as(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    return parameter.dtype == torch.bfloat16 and torch.equal(whole(parameter), tensor.bfloat16())


def sharded(make: Callable[[], Case] = case) -> nn.Module:
    return sharded_on_meta("llama", make().plan)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except WeightsError as error:
        return str(error)
    return "no error"


def gradients(model: nn.Module, plan: Any) -> list[float]:
    """Return differences of loss and gradients from the unsharded model's, after one step of two micro-batches.

    A gradient in another layout than its parameter's, which is not reduced, is infinitely different.
    """
    batch, reference = make_batch("llama"), make_model("llama")
    for _ in range(plan.micro_batches):
        loss = loss_of(model(**local_batch(batch, device_mesh_for(plan), plan)))
        (loss / plan.micro_batches).backward()
    expected = loss_of(reference(**batch))
    expected.backward()
    wanted = dict(reference.named_parameters())
    largest = max(p.grad.abs().max() for p in wanted.values())
    parameters = dict(model.named_parameters())
    if any(p.grad.placements != p.placements for p in parameters.values()):
        return [math.inf]
    differences = [(whole(p.grad) - wanted[name].grad).abs().max() / largest for name, p in parameters.items()]
    return [abs(whole(loss).item() - expected.item()), *(d.item() for d in differences)]


def scenarios(rank: int, folder: str) -> dict[str, Any]:
    path = Path(folder) / "llama"
    plan, results = case().plan, {}
    state = read_checkpoint(path)

    model = sharded()
    load_weights(model, state if rank == 2 else None)
    results["gradients, state dict on one rank"] = gradients(model, plan)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()
    load_weights(model, state)
    results["gradients, loaded again after a step"] = gradients(model, plan)
    model = sharded(in_bf16)
    load_weights(model, path)
    results["gradients in bf16"] = gradients(model, plan)
    results["dtypes"] = {str(p.dtype) for p in model.parameters()} | {str(p.grad.dtype) for p in model.parameters()}

    model = sharded(for_prefill)
    load_weights(model, path)
    results["stored in bf16"] = [name for name, p in model.named_parameters() if not in_bf16_as(p, state[name])]

    model = sharded()
    results["path on some ranks"] = error_of(lambda: load_weights(model, path if rank < 2 else None))
    results["no file on one rank"] = error_of(lambda: load_weights(model, path if rank != 3 else path / "lost"))
    other = {name: tensor for name, tensor in state.items() if rank != 1 or "norm" not in name}
    results["names missing on one rank"] = error_of(lambda: load_weights(model, other))
    results["still on meta"] = all(p.is_meta for p in model.parameters())
    results["saved from meta"] = error_of(lambda: save_weights(model, path))
    load_weights(model, path)
    results["save_pretrained"] = error_of(lambda: model.save_pretrained(path))
    results["a folder of something else"] = error_of(lambda: save_weights(model, Path(folder)))

    SafetensorsFile.write = fails_on(rank, 1, SafetensorsFile.write)  # type: ignore[method-assign]
    results["disk full"] = error_of_any(lambda: save_weights(model, path, max_shard_bytes=1e5))
    return results


def error_of_any(call: Callable[[], object]) -> str:
    try:
        call()
    except (WeightsError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fails_on(rank: int, failing: int, write: Callable[..., None]) -> Callable[..., None]:
    def failing_write(*args: Any) -> None:
        if rank == failing:
            raise OSError("No space left on device")
        write(*args)

    return failing_write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint("llama", folder / "llama")
    (folder / "llama" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Mapping[str, Any]]:
    return run_on_gloo(scenarios, 4, str(folder), timeout_s=60)


def test_hooks_of_parameters_survive_loading_from_meta(results: list[Mapping[str, Any]]) -> None:
    for of_rank in results:
        assert max(of_rank["gradients, state dict on one rank"]) <= 1e-5
        assert max(of_rank["gradients, loaded again after a step"]) <= 1e-5
        # bf16 has 8 bits: sums in another order differ by about 2**-8.
        assert max(of_rank["gradients in bf16"]) <= 2e-2
        assert of_rank["dtypes"] == {"torch.float32"}


def test_values_are_cast_to_the_dtype_that_the_plan_stores(results: list[Mapping[str, Any]]) -> None:
    assert [of_rank["stored in bf16"] for of_rank in results] == [[]] * 4


def test_an_error_of_one_rank_is_an_error_of_all(results: list[Mapping[str, Any]]) -> None:
    for rank, of_rank in enumerate(results):
        assert "Rank 0 has a path as its source of weights, and rank 2 has none" in of_rank["path on some ranks"]
        said = "neither a file nor a folder" if rank == 3 else "Rank 3 failed in opening the source of weights"
        assert said in of_rank["no file on one rank"]
        assert "model.norm.weight" in of_rank["names missing on one rank"]
        assert of_rank["still on meta"] is True


def test_saving_says_what_is_wrong_on_every_rank(results: list[Mapping[str, Any]]) -> None:
    for rank, of_rank in enumerate(results):
        assert "Call load_weights first" in of_rank["saved from meta"]
        assert "Call executor.save_weights(module, folder) on every rank" in of_rank["save_pretrained"]
        assert ("llama" if rank == 0 else "Rank 0 failed") in of_rank["a folder of something else"]
        assert "No space left on device" in of_rank["disk full"]


def test_a_checkpoint_is_whole_after_saving_failed(results: list[Mapping[str, Any]], folder: Path) -> None:
    expected = make_model("llama").state_dict()
    read = read_checkpoint(folder / "llama")
    assert read.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())
    assert sorted(item.name for item in folder.iterdir()) == ["llama"]
    assert (folder / "llama" / "tokenizer.json").exists()
