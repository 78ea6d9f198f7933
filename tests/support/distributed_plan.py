"""Plans a small model in one process and on a local cluster of dask or ray; prints both plans as JSON.

    python -m support.distributed_plan dask

A process of its own: both engines start threads and processes, and ray changes a class of joblib.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import joblib
from support import families

from planner.plan.sharding_plan import ShardingPlan
from planner.run.stage_clock import Clock
from planner.search.task_pool import Pool
from planner.session import PlanningSession

WORKERS = 2


@contextmanager
def dask_cluster() -> Iterator[None]:
    from distributed import Client, LocalCluster

    local = LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None)
    with local as cluster, Client(cluster), joblib.parallel_config("dask"):
        yield


@contextmanager
def ray_cluster() -> Iterator[None]:
    import ray
    from ray.util.joblib import register_ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        register_ray()
        with joblib.parallel_config("ray"):
            yield
    finally:
        ray.shutdown()


CLUSTERS = {"dask": dask_cluster, "ray": ray_cluster}


def plan(jobs: int) -> ShardingPlan:
    module, inputs = families.make("gpt2", 8)
    session = PlanningSession(
        module, example_inputs=inputs, cluster="1x4xtoy", dtype="fp32", memory_gb=0.003, jobs=jobs
    )
    return session.plan()


def document(found: ShardingPlan) -> dict[str, Any]:
    """Return a plan as JSON, without the seconds that it took."""
    written = found.to_dict() | {"timings": None}
    written["solver"] = written["solver"] | {"time_s": None}
    return written


def processes() -> int:
    """Return in how many processes other than this one tasks of a pool ran."""
    seen, left = set[int](), [process_id] * 8
    pool = Pool(Context(Clock()), jobs=-1)
    pool.run(lambda: (0, left.pop()) if left else None, lambda tag, task, process: seen.add(process), None)
    return len(seen - {os.getpid()})


class Context:
    def __init__(self, clock: Any) -> None:
        self.clock = clock


def process_id(context: Context, constraints: None) -> int:
    time.sleep(0.2)
    return os.getpid()


if __name__ == "__main__":
    from support import distributed_plan  # workers import its functions by this name

    (engine,) = sys.argv[1:]
    alone = document(plan(1))
    with CLUSTERS[engine]():
        print(json.dumps({"alone": alone, "engine": document(plan(-1)), "processes": distributed_plan.processes()}))
