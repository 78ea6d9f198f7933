"""The planner: it returns the fastest `ShardingPlan` for a model, a cluster and a job.

defaults/        what a job assumes where nothing is given: cluster, batch, sequence length
imported/        plans that were written for other libraries
verification/    a step of a plan is run on fake processes, before the plan is given
writing/         a decision becomes a plan; a plan is priced again
search/          meshes, micro-batches, checkpointing modes and pipelines: branch and bound
run/             one mesh: its bounds, its integer program, its solution
formulation/     prices become a problem; a solution becomes a decision, with its estimate
pricing/         seconds and bytes of every choice
liveness/        where memory can peak, and what is alive there
profile/         FLOPs, bytes and saved tensors of every op
strategies/      the layouts in which each op can run
regions/         ops that choose their layouts together; blocks
wire/            a traced graph as JSON
graph/           a module is traced to a graph
counting/        FLOPs and live bytes of code that runs on meta tensors
ilp/             the integer program and its solvers; knows no graph
plan/            the plan, the job and the estimate as data
model_rewrites/  modules that are replaced, for tracing and for running

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
    "plan_from_distributed_config": "planner.imported.distributed_config",
    "plan_from_styles": "planner.imported.parallel_styles",
    "plan_from_tp_plan": "planner.imported.tp_plans",
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
