"""Eight families in ``from_pretrained`` format: loaded into shards from meta, trained one step, saved, read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from support.gloo import run_on_gloo
from support.unsharded import TOLERANCE
from support.weight_cases import CASES, batch_of, build, read_checkpoint, sharded_on_meta, whole, write_checkpoint

from executor.resolve.batch import local_batch
from executor.weights.load import load_weights
from executor.weights.save import save_weights

ORDINARY = ("llama", "mixtral", "qwen3")


def load_step_save(rank: int, folder: str, families: list[str]) -> dict[str, list[str]]:
    return {family: faults_of(rank, family, Path(folder) / family) for family in families}


def faults_of(rank: int, family: str, folder: Path) -> list[str]:
    """Return what is wrong with one family, in words."""
    faults = []
    plan = CASES[family]().plan
    model = sharded_on_meta(family, plan)
    load_weights(model, folder)
    save_weights(model, folder.with_name(f"{family}-again"), max_shard_bytes=2e5)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device_mesh = next(iter(parameters.values())).device_mesh
    loss = model(**local_batch(batch_of(family), device_mesh, plan)).loss
    expected = build(family)(**batch_of(family)).loss
    if abs(whole(loss).item() - expected.item()) > TOLERANCE:
        faults.append(f"the loss is {whole(loss).item()}, not {expected.item()}")
    loss.backward()
    optimizer.step()
    after = folder.with_name(f"{family}-after")
    save_weights(model, after)
    own = {name: whole(parameter) for name, parameter in model.state_dict().items()}
    if rank == 0:
        before, again = read_checkpoint(folder), read_checkpoint(folder.with_name(f"{family}-again"))
        faults += [f"{name} is in one file only" for name in before.keys() ^ again.keys()]
        faults += [f"{name} is not what was loaded" for name in before if not same(before[name], again.get(name))]
        read = type(build(family)).from_pretrained(after).state_dict()
        faults += [f"{name} read is not the module's" for name, tensor in own.items() if not same(tensor, read[name])]
        before_step = build(family).state_dict()
        if all(same(tensor, before_step[name]) for name, tensor in own.items()):
            faults.append("the step changed nothing")
    return faults


def same(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and tensor.dtype == other.dtype and torch.equal(tensor, other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers.logging.disable_progress_bar()
    return tmp_path_factory.mktemp("checkpoints")


def check(folder: Path, families: list[str]) -> None:
    for family in families:
        write_checkpoint(family, folder / family)
    assert run_on_gloo(load_step_save, 4, str(folder), families)[0] == {family: [] for family in families}


def test_what_is_loaded_and_trained_is_what_transformers_reads(folder: Path) -> None:
    check(folder, list(ORDINARY))


@pytest.mark.slow
def test_the_other_families_too(folder: Path) -> None:
    check(folder, [family for family in CASES if family not in ORDINARY])
