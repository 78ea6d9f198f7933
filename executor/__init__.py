"""Runs a plan: turns a module into a DTensor module, and counts the collectives that the sharded module runs.

loops/            Trainer, accelerate and peft with a sharded module
calibrate/        measurements of a cluster
weights/          checkpoints, read into shards and written from shards
launch/           ranks that have no plan yet: one call plans and shards
agreement/        checks that all ranks hold what the plan needs
runtime/          hooks, FSDP, checkpointing and gradient reduction while the module runs
ops/              ops that DTensor cannot run as planned
resolve/          the plan, resolved against the module before anything is changed
torch_internals/  torch's private names

The names below are imported on first use, because they need torch. `verify` is in `executor.verify`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "add_adapters": "executor.loops.adapters",
    "auto_parallelize": "executor.launch.auto_parallelize",
    "data_shard": "executor.resolve.batch",
    "device_mesh_for": "executor.resolve.mesh",
    "load_adapters": "executor.loops.adapters",
    "load_training_state": "executor.weights.dcp.training_state",
    "load_weights": "executor.weights.load",
    "local_batch": "executor.resolve.batch",
    "local_micro_batches": "executor.resolve.micro_batches",
    "mesh_of": "executor.resolve.sharded_as",
    "natural_order": "executor.resolve.token_order",
    "parallelize_module": "executor.parallelize",
    "plan_of": "executor.resolve.sharded_as",
    "prepare_accelerator": "executor.loops.accelerator",
    "prepare_trainer": "executor.loops.trainer",
    "random_state": "executor.runtime.random_state",
    "save_adapters": "executor.loops.adapters",
    "save_training_state": "executor.weights.dcp.training_state",
    "save_weights": "executor.weights.save",
    "seed_random_ops": "executor.runtime.random_state",
    "set_accumulation_steps": "executor.runtime.optimizer_steps",
    "set_random_state": "executor.runtime.random_state",
    "shard_added_parameters": "executor.runtime.root.added_parameters",
    "shard_module": "executor.shard",
    "Sharder": "executor.resolve.sharder",
    "whole_batches": "executor.runtime.whole_batches",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
