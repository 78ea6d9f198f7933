"""The planner: it returns the fastest `ShardingPlan` for a model, a cluster and a job.

The names below are imported on first use, so that importing `planner.errors` or `planner.progress` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "DataParallelPlanner": "planner.planners",
    "FullyShardedPlanner": "planner.planners",
    "ILPShardingPlanner": "planner.planners",
    "RandomPlanner": "planner.planners",
    "TensorParallelPlanner": "planner.planners",
    "ShardingPlan": "planner.plan.sharding_plan",
    "ShardingPlanner": "planner.plan.planner_interface",
    "PlanningSession": "planner.session",
    "build_plan": "planner.build",
    "estimate_plan": "planner.writing.reprice",
    "explain": "planner.explanation",
    "fuse_projections": "planner.model_rewrites.fuse_projections",
    "trace_module": "planner.graph.trace_module",
    "unfuse_state_dict": "planner.model_rewrites.fuse_projections",
}

_FORMER_NAMES = {"pack_projections": "fuse_projections", "unpack_state_dict": "unfuse_state_dict"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    name = _FORMER_NAMES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
