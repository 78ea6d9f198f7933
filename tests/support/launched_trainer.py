"""A training script on transformers' Trainer, which runs exported JSONs on the CPUs of gloo processes.

Arguments: the folder of a saved model, and JSONs; the result of ``name.json`` goes to ``name.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.launched_exports import LEARNING_RATE, STEPS, Recorder, leave, samples
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

OF_TEST: dict[str, Any] = {
    "max_steps": STEPS,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
"""``TrainingArguments`` that no export names; exports are for GPUs."""


class StepEnds(TrainerCallback):
    """Tells a recorder where steps end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_end(self, *unused: Any, **more: Any) -> None:
        """End a step, before the trainer logs."""
        self._recorder.end_step()


class LossTrainer(Trainer):
    """A trainer that keeps what each micro-batch adds to the loss of its step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[torch.Tensor] = []

    def training_step(self, *inputs: Any) -> torch.Tensor:
        """Return what a micro-batch adds to the loss."""
        loss: torch.Tensor = super().training_step(*inputs)
        self.losses.append(loss)
        return loss


def mesh_of_fsdp(model: Any, config: DistributedConfig) -> DeviceMesh:
    """Return the mesh that ``apply_fully_sharded_data_parallelism`` takes (distributed/fsdp.py)."""
    mesh: DeviceMesh = model._mesh_manager.get_mesh(
        ("dp_replicate", "fsdp") if config.dp_replicate_size > 1 else "fsdp"
    )
    return mesh


def train(model_folder: str, path: Path) -> None:
    """Train under an export, and write what is to be compared."""
    document = json.loads(path.read_text())
    config = DistributedConfig.from_dict(document)
    values = document | OF_TEST | {"output_dir": str(path.parent)}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(values, allow_extra_keys=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, distributed_config=config, dtype=torch.float32)
    recorder = Recorder(mesh_of_fsdp(model, config))
    rows = samples(document["max_length"])
    trainer = LossTrainer(model=model, args=arguments, train_dataset=rows, callbacks=[StepEnds(recorder)])
    with recorder:
        trainer.train()
    of_rank = torch.stack(trainer.losses).view(STEPS, -1).sum(1)
    recorder.write(str(path.with_suffix(".pt")), model, trainer.accelerator.reduce(of_rank, "mean").tolist())


def main() -> None:
    """Train under each export."""
    for name in sys.argv[2:]:
        train(sys.argv[1], Path(name))
    leave()


if __name__ == "__main__":
    main()
