"""Runs a plan: turns a module into a DTensor module, and counts the collectives that the sharded module runs.

calibrate/  measurements of a cluster
launch/     ranks that have no plan yet
runtime/    hooks, FSDP, checkpointing and gradient reduction while the module runs
ops/        ops that DTensor cannot run as planned
resolve/    the plan, resolved against the module before anything is changed

The names below are imported on first use, because they need torch. `verify` is in `executor.verify`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "auto_parallelize": "planner.auto_parallelize",
    "Sharder": "executor.resolve.sharder",
    "device_mesh_for": "executor.resolve.mesh",
    "local_batch": "executor.resolve.batch",
    "local_micro_batches": "executor.resolve.micro_batches",
    "mesh_of": "executor.resolve.sharding_record",
    "natural_order": "executor.resolve.token_order",
    "parallelize_module": "executor.parallelize",
    "plan_of": "executor.resolve.sharding_record",
    "shard_module": "executor.shard",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'executor' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
