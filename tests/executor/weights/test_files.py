"""Safetensors files that are written tensor by tensor, and folders that are replaced when they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from executor.weights import replaced_folder as module
from executor.weights.ranks import Ranks
from executor.weights.replaced_folder import replaced_folder
from executor.weights.safetensors_file import SafetensorsFile
from executor.weights.sources import SAFETENSORS_DTYPES, safetensors_tensors
from planner.errors import WeightsError


def test_every_dtype_and_shape_is_read_by_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {kind: (torch.randn(3, 5) * 9).to(dtype) for kind, dtype in SAFETENSORS_DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.randn(4, 6).T}
    path = tmp_path / "a.safetensors"
    with SafetensorsFile(path, tensors, {"format": "pt"}) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(bytes_of(read[name]), bytes_of(tensor)), name
    assert {name: lazy.dtype for name, lazy in safetensors_tensors(path).items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'w' has the dtype torch\.complex128"):
        SafetensorsFile(tmp_path / "a.safetensors", {"w": torch.zeros(1, dtype=torch.complex128)}, {})


def write(folder: Path, text: str, *, keeps_others: bool = True) -> None:
    ranks = Ranks(nn.Linear(1, 1))
    with replaced_folder(folder, ranks, is_ours=lambda name: name == "ours", keeps_others=keeps_others) as new_folder:
        (new_folder / "ours").write_text(text)
        if text == "raises":
            raise OSError(text)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_and_other_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(module, "_exchange", lambda path, other: False)
    folder = tmp_path / "parent" / "folder"
    write(folder, "first")
    (folder / "tokenizer").write_text("kept")
    (folder / "more").mkdir()
    (folder / "more" / "file").write_text("kept")
    (tmp_path / "parent" / ".folder.killed.partial").mkdir()
    write(folder, "second")
    with pytest.raises(OSError, match="raises"):
        write(folder, "raises")
    assert {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == {
        "parent/folder/ours": "second",
        "parent/folder/tokenizer": "kept",
        "parent/folder/more/file": "kept",
    }
    assert [item.name for item in (tmp_path / "parent").iterdir()] == ["folder"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("kept")
    for folder in (tmp_path, tmp_path / "thesis"):
        with pytest.raises(WeightsError, match="exists already"):
            write(folder, "new")
    write(tmp_path / "a", "first")
    (tmp_path / "a" / "notes").write_text("kept")
    with pytest.raises(WeightsError, match="with notes"):
        write(tmp_path / "a", "second", keeps_others=False)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(WeightsError, match="exists already"):
        write(tmp_path / "link", "second")
    assert (tmp_path / "thesis").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "first")
