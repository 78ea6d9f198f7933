"""Exported configurations, launched with their frameworks on four gloo processes, and what a run of them gives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from executor.collective_counter import CollectiveCounter, Counts

ROOT = Path(__file__).parents[2]
RANKS, BATCH, SEQ, STEPS, LEARNING_RATE, VOCABULARY = 4, 8, 32, 3, 0.5, 256
CHECKPOINTED = "_checkpoint_wrapped_module."
"""What accelerate's activation checkpointing inserts in names of parameters."""

Calls = Counter[tuple[str, str, int]]
"""(axis, kind, bytes of a call) -> calls of a step; all-reduces count as one, since frameworks put them in buckets."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Losses of the steps, parameters by name after the last step, and the collectives of that step."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    calls: Calls


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """Return the samples of all steps, in the order in which they are trained on."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (STEPS * BATCH, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def calls_of(counts: Counts) -> Calls:
    """Return the collectives of all phases together."""
    calls: Calls = Counter()
    reduced: Counter[str] = Counter()
    for key, count in counts.items():
        if key.kind == "all_reduce":
            reduced[key.axis] += key.bytes * count
        else:
            calls[key.axis, key.kind, key.bytes] += count
    return calls + Counter({(axis, "all_reduce", nbytes): 1 for axis, nbytes in reduced.items()})


class Recorder(CollectiveCounter):
    """Counts the collectives of each step inside a framework's training loop, between steps too."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        """Start before the first step.

        Args:
            mesh: the mesh of FSDP, whose last axis shards, and whose first of two replicates; None: all ranks are
                replicas.
        """
        world = torch.distributed.group.WORLD
        assert world is not None
        axes = {str(world.group_name): "dp"}
        if mesh is not None:
            names = ("dp", "fsdp")[-mesh.ndim :]
            axes |= {str(mesh.get_group(index).group_name): name for index, name in enumerate(names)}
        super().__init__(axes, lambda: "forward")
        self._before: Counts = Counter()
        self._last: Counts = Counter()

    def end_step(self) -> None:
        """End a step, and start the next one."""
        self._last = self.counts - self._before
        self._before = self.counts.copy()

    def write(self, path: str, model: nn.Module, losses: list[float]) -> None:
        """Write the values of a `Run` to ``path`` on the first rank; every rank has to call this."""
        found = {name.replace(CHECKPOINTED, ""): whole(value.detach()) for name, value in model.named_parameters()}
        if torch.distributed.get_rank() == 0:
            calls = dict(calls_of(self._last))
            torch.save({"losses": losses, "parameters": found, "calls": calls}, path)


def leave() -> None:
    """End a rank whose results are written, with all others.

    Torch 2.13 at times aborts ("terminate called without an active exception") where gloo groups are taken down.
    """
    torch.distributed.barrier()
    os._exit(0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_unsharded(model: Any, micro_batches: int) -> Run:
    """Return what the steps give on one process; ``model`` is trained."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for batch in torch.stack([row["input_ids"] for row in samples(SEQ)]).chunk(STEPS):
        total = 0.0
        for tokens in batch.chunk(micro_batches):
            loss = model(input_ids=tokens, labels=tokens).loss / micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses=losses, parameters=dict(model.named_parameters()), calls=Counter())


def launch_accelerate(text: str, model: Path, folder: Path) -> Run:
    """Return a run under ``accelerate launch --config_file``.

    Args:
        text: an exported YAML, whose comments name arguments of the script.
        model: folder of a saved model.
        folder: where files go.
    """
    config, result = folder / "accelerate.yaml", folder / "result.pt"
    config.write_text(text)
    arguments = [f"--{name}={value}" for name, value in re.findall(r"^#   (\w+): (\S+)$", text, re.MULTILINE)]
    command = ["accelerate.commands.accelerate_cli", "launch", "--config_file", str(config)]
    command += ["--main_process_port", "0", str(ROOT / "tests/support/launched_accelerate.py")]
    _run([*command, f"--model={model}", f"--result={result}", *arguments], ACCELERATE_TORCH_DEVICE="cpu")
    return _read(result)


def launch_transformers(texts: Mapping[str, str], model: Path, folder: Path) -> dict[str, Run]:
    """Return runs of transformers' Trainer by name, one after the other on the same processes.

    Args:
        texts: exported JSONs by name.
        model: folder of a saved model.
        folder: where files go.
    """
    paths = {name: folder / f"{index}.json" for index, name in enumerate(texts)}
    for name, path in paths.items():
        path.write_text(texts[name])
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(ROOT / "tests/support/launched_trainer.py"), str(model)]
    _run([*command, *map(str, paths.values())])
    return {name: _read(path.with_suffix(".pt")) for name, path in paths.items()}


def _run(command: list[str], **environment: str) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment
    process = [sys.executable, "-m", *command]
    done = subprocess.run(process, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def _read(path: Path) -> Run:
    values = torch.load(path)
    return Run(losses=values["losses"], parameters=values["parameters"], calls=Counter(values["calls"]))
