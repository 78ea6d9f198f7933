"""The planner's progress, lines for a person, as events with fields."""

from __future__ import annotations

import re
from typing import Any

from api.requests.plan_request import read_cluster
from api.requests.schemas import PlanRequest
from planner.plan.sharding_plan import ShardingPlan
from planner.run.mesh_space import meshes_of

_BOUNDING = re.compile(r"bounding mesh (?P<mesh>\S+)(?: \((?P<number>\d+) of (?P<meshes>\d+)\))?")
_SOLVING = re.compile(
    r"solving mesh (?P<mesh>[^,\s]+(?:,[^,\s]+=\d+)*), (?P<micro_batches>\d+) micro-batches, "
    r"checkpointing (?P<ac>\w+)(?:, .*)?"
)
_BEST = re.compile(r"best so far (?P<step_time_s>\S+) s(?:, gap (?P<gap>\S+))?")


class ProgressReader:
    """Reads the lines of one solve, in order; knows how many meshes there are to look at."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._seen: list[str] = []
        self._best: dict[str, float] = {}

    def event(self, line: str) -> dict[str, Any]:
        """Return the event that ``line`` tells of: its ``stage``, and what is known of meshes and the best plan."""
        if found := _BEST.fullmatch(line):
            self._best = {name: float(value) for name, value in found.groupdict().items() if value is not None}
            return {"stage": "best", **self._best}
        if found := _BOUNDING.fullmatch(line):
            mesh = found["mesh"]
            self._seen.append(mesh)
            number, meshes = found["number"] or len(self._seen), found["meshes"] or self._meshes()
            return {"stage": "bounding", "mesh": mesh, "mesh_number": int(number), "meshes": int(meshes)}
        if found := _SOLVING.fullmatch(line):
            settings = {"micro_batches": int(found["micro_batches"]), "ac": found["ac"]}
            return {"stage": "solving", "mesh": found["mesh"], **settings, **self._best}
        return {"stage": line}

    def end(self, plan: ShardingPlan) -> dict[str, Any]:
        """Return the event that ends a solve: what the plan costs, and how far from the best it can be."""
        time_s = None if plan.estimate is None else plan.estimate.step_time_s
        gap = None if plan.solver is None else plan.solver.gap
        return {"stage": "planned", "mesh": str(plan.mesh.spec), "step_time_s": time_s, "gap": gap}

    def _meshes(self) -> int:
        if self._request.spec.mesh is not None:
            return 1
        return len(meshes_of(read_cluster(self._request, allow_local=False)))
