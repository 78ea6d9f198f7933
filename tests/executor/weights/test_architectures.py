"""Many architectures of transformers: loaded onto meta from what ``save_pretrained`` writes, and written the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import ARCHITECTURES
from support.weight_cases import read_checkpoint

from executor import load_weights, save_weights

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_loaded_as_from_pretrained_does_and_saved_as_save_pretrained_does(name: str, tmp_path: Path) -> None:
    module: Any = ARCHITECTURES[name].build()
    torch.manual_seed(0)
    real = type(module)(module.config)
    real.save_pretrained(tmp_path / "before", max_shard_size="20KB")
    read = type(module).from_pretrained(tmp_path / "before")
    load_weights(module, tmp_path / "before")
    for kind in ("named_parameters", "named_buffers"):
        expected, own = dict(getattr(read, kind)()), dict(getattr(module, kind)())
        assert own.keys() == expected.keys()
        assert [key for key in own if not torch.equal(own[key], expected[key])] == []
    save_weights(module, tmp_path / "after", max_shard_bytes=2e4)
    before, after = read_checkpoint(tmp_path / "before"), read_checkpoint(tmp_path / "after")
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    again = type(module).from_pretrained(tmp_path / "after").state_dict()
    assert [key for key, tensor in read.state_dict().items() if not torch.equal(tensor, again[key])] == []
