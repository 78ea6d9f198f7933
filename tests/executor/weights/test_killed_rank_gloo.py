"""A rank that is killed while weights are read or written: the others raise, and the old checkpoint is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killed_rank import errors_of_survivors, kill_me
from support.weight_cases import CASES, build, read_checkpoint, sharded_on_meta, write_checkpoint
from torch.distributed.checkpoint import FileSystemWriter

from executor.weights import load, replaced_folder
from executor.weights.dcp.training_state import load_training_state, save_training_state
from executor.weights.load import load_weights
from executor.weights.safetensors_file import SafetensorsFile
from executor.weights.save import save_weights


def killing_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which kills this process when it is called the ``call``-th time."""
    calls = 0

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            kill_me()
        return function(*args, **kwargs)

    return killing


def killed_in_loading(rank: int, folder: str) -> None:
    model = sharded_on_meta("llama", CASES["llama"]().plan)
    if rank == 1:
        load.read_into = killing_at(5, load.read_into)
    load_weights(model, Path(folder) / "llama")


def killed_in_saving(rank: int, folder: str) -> None:
    model = sharded_on_meta("llama", CASES["llama"]().plan)
    load_weights(model, Path(folder) / "llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    if rank == 2:
        SafetensorsFile.write = killing_at(2, SafetensorsFile.write)  # type: ignore[method-assign]
    save_weights(model, Path(folder) / "llama", max_shard_bytes=1e5)


def killed_in_replacing(rank: int, folder: str) -> None:
    model = sharded_on_meta("llama", CASES["llama"]().plan)
    load_weights(model, Path(folder) / "llama")
    if rank == 0:
        replaced_folder._exchange = killing_at(1, replaced_folder._exchange)
    save_weights(model, Path(folder) / "llama")


def killed_in_a_training_state(rank: int, folder: str) -> None:
    model = sharded_on_meta("llama", CASES["llama"]().plan)
    load_weights(model, Path(folder) / "llama")
    save_training_state(Path(folder) / "state", model, extra={"step": 1})
    if rank == 3:
        FileSystemWriter.write_data = killing_at(1, FileSystemWriter.write_data)  # type: ignore[method-assign]
    save_training_state(Path(folder) / "state", model, extra={"step": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint("llama", tmp_path / "llama")
    return tmp_path


def check_whole(folder: Path) -> None:
    expected, read = build("llama").state_dict(), read_checkpoint(folder)
    assert read.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


@pytest.mark.parametrize(
    "function",
    [
        killed_in_loading,
        killed_in_saving,
        pytest.param(killed_in_replacing, marks=pytest.mark.slow),
    ],
)
def test_the_others_raise_and_the_checkpoint_is_whole(function: Callable[..., None], folder: Path) -> None:
    errors = errors_of_survivors(function, 4, str(folder))
    assert all("Error" in error for error in errors.values()), errors
    check_whole(folder / "llama")


@pytest.mark.slow
def test_a_training_state_is_whole_after_a_rank_was_killed_in_writing_the_next(folder: Path) -> None:
    errors = errors_of_survivors(killed_in_a_training_state, 4, str(folder))
    assert all("Error" in error or "Exception" in error for error in errors.values()), errors
    model = build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert load_training_state(folder / "state", model) == {"step": 1}
    expected = build("llama").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
