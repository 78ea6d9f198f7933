"""``prepare_trainer``: transformers' ``Trainer`` with a sharded module, fed with whole batches by every rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.loops.accelerator import prepare_accelerator
from executor.loops.adapters import has_adapters, load_adapters, save_adapters
from executor.runtime.root.sharded_root import root_of
from executor.weights.dcp.training_state import load_training_state, save_training_state
from executor.weights.load import load_weights
from executor.weights.save import save_weights
from planner.errors import LoopError

_STATE_FOLDER = "training_state"
"""Name of the folder in a Trainer's checkpoint that has the shards of all ranks, optimizer states included."""


def prepare_trainer(trainer: Any) -> Any:
    """Return ``trainer``, changed in place to train its sharded model; call it before ``train`` and ``evaluate``.

    Batch sizes of the arguments are then those of a whole step: ``per_device_train_batch_size`` is the plan's batch
    over its micro-batches, and ``gradient_accumulation_steps`` the number of micro-batches. Losses, metrics and order
    of the rows are those of a Trainer in one process. A checkpoint has the weights as ``from_pretrained`` reads them,
    and the shards of all ranks, from which ``resume_from_checkpoint`` resumes under any plan.

    Args:
        trainer: a ``Trainer``, or an instance of a subclass, whose model is the result of ``shard_module``, or peft's
            model around it. The process group has the ranks of the plan and no others.

    Raises:
        PlanMismatchError: the model is not sharded.
        LoopError: the arguments ask for mixed precision, FSDP, DeepSpeed, ``torch_compile``, activation checkpointing
            or batches that differ between ranks.
    """
    model = trainer.model
    root_of(model)
    arguments = trainer.args
    asked = {
        "fp16_full_eval or bf16_full_eval": arguments.fp16_full_eval or arguments.bf16_full_eval,
        "torch_compile": arguments.torch_compile,
        "activation_checkpointing": arguments.activation_checkpointing,
        "train_sampling_strategy='batch_rebalance'": arguments.train_sampling_strategy == "batch_rebalance",
        "auto_find_batch_size": arguments.auto_find_batch_size,
        "model_init": trainer.model_init is not None,
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise LoopError(
            f"The Trainer is told to use {', '.join(refused)}, which a sharded model does not allow.",
            what_to_do="Leave them out: the plan says dtype, checkpointing and batch.",
        )
    prepare_accelerator(trainer.accelerator, model)
    if not isinstance(trainer, _ShardedTrainer):
        trainer.__class__ = type(type(trainer).__name__, (_ShardedTrainer, type(trainer)), {})
    trainer.gather_function = functools.partial(
        trainer.accelerator.gather_for_metrics, use_gather_object=arguments.eval_use_gather_object
    )
    # "The model already owns placement and gradient reduction", as transformers says of models that it sharded itself.
    trainer.is_distributed_loading_by_transformers = True
    trainer.place_model_on_device = False
    return trainer


class _ShardedTrainer:
    """The parts of a ``Trainer`` that see all ranks together as one process; files hold the shards of all ranks."""

    model: nn.Module
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples of a step."""
        samples: int = vars(self)["_train_batch_size"] * args.gradient_accumulation_steps
        return samples

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights, of peft's model those of its adapters, and what else a Trainer writes."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if has_adapters(self.model):
            save_adapters(self.model, folder)
        else:
            _make_checkpoint_folder(folder, self.model)
            save_weights(self.model, folder)
        if self.args.should_save:
            collator = vars(self)["data_collator"]
            processing = vars(self)["processing_class"] or getattr(collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_training_state(Path(output_dir) / _STATE_FOLDER, self.model, self.optimizer, scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / _STATE_FOLDER).is_dir():  # otherwise loaded together with the optimizer's state
            _load(self.model, folder)

    def _load_best_model(self) -> None:
        _load(self.model, Path(vars(self)["state"].best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint) / _STATE_FOLDER
        if folder is not None and folder.is_dir():
            load_training_state(folder, self.model, self.optimizer, scheduler=self.lr_scheduler)


def _make_checkpoint_folder(folder: Path, model: nn.Module) -> None:
    """Make ``folder`` with a config, for which ``save_weights`` looks where a folder holds older checkpoints."""
    config: Any = getattr(model, "config", None)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            config.save_pretrained(folder)
    dist.barrier()


def _load(model: nn.Module, folder: Path) -> None:
    """Load the weights in a checkpoint."""
    if not has_adapters(model):
        load_weights(model, folder)
    elif (folder / _STATE_FOLDER).is_dir():
        load_weights(model, folder / _STATE_FOLDER)
    else:
        load_adapters(model, folder)
