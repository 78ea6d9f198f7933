"""A training script as people write it for ``accelerate launch``, on the CPUs of gloo processes.

Exports are for GPUs. On CPUs, accelerate 1.15 replaces FSDP by DDP: ``AcceleratorState.__init__`` looks at FSDP for the
types in a list only (state.py, line 986), and MULTI_CPU is not in it. So with FSDP, processes are said to have
accelerators (`take_gloo`), while their device (ACCELERATE_TORCH_DEVICE) is the CPU. With DDP, ``cpu=True`` does.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from support.launched_exports import LEARNING_RATE, Recorder, leave, samples
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

OPTIMIZERS = {"sgd": torch.optim.SGD}


def take_gloo() -> None:
    """Let accelerate take gloo for the backend of several accelerators."""

    def prepare_backend(*unused: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend


def arguments() -> argparse.Namespace:
    """Return where files are, and the arguments that the comments of an export name."""
    parser = argparse.ArgumentParser()
    for name in ("model", "result", "optim"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def mesh_of_fsdp(accelerator: Accelerator) -> DeviceMesh | None:
    """Return the mesh that ``fsdp2_prepare_model`` takes (utils/fsdp_utils.py)."""
    mesh: DeviceMesh | None = accelerator.torch_device_mesh
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


def main() -> None:
    """Train, and write what is to be compared."""
    given = arguments()
    is_sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if is_sharded:
        take_gloo()
    accelerator = Accelerator(cpu=not is_sharded, gradient_accumulation_steps=given.gradient_accumulation_steps)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    optimizer: Any = OPTIMIZERS[given.optim](model.parameters(), lr=LEARNING_RATE)
    rows: Any = samples(given.max_length)
    loader: Any = DataLoader(rows, batch_size=given.per_device_train_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[list[float]] = [[]]
    with Recorder(mesh_of_fsdp(accelerator)) as recorder:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item() / given.gradient_accumulation_steps)
            if accelerator.sync_gradients:
                recorder.end_step()
                losses.append([])
    of_rank = torch.tensor([sum(step) for step in losses[:-1]])
    recorder.write(given.result, accelerator.unwrap_model(model), accelerator.reduce(of_rank, "mean").tolist())
    leave()


if __name__ == "__main__":
    main()
