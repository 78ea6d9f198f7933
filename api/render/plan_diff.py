"""The differences between two plans, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.plan.sharding_plan import Estimate, ShardingPlan

_PARTS = ("step_time_s", "forward_s", "backward_s", "grad_reduce_s", "optimizer_s", "compute_s", "communication_s")
_LAYOUTS = ("plan", "compute_plan", "gradient_plan", "read_above", "input_plan", "output_plan", "fully_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two plans.

    Attributes:
        field: field of the plans, such as ``mesh``, ``estimate.memory`` or ``compute_plan``.
        key: key in the field, such as a memory role or an FQN pattern; "" where the field has no keys.
        left, right: value of the first and of the second plan; None where the plan has no such value.
    """

    field: str
    key: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All differences between two plans.

    Attributes:
        settings: mesh, pipeline, micro-batches, checkpointing, job, cluster, fingerprint.
        seconds: seconds of the parts of a step, and of each kind of collective by axis and phase.
        nbytes: bytes of the peak per device, and of each memory role at the peak.
        layouts: layouts, FSDP groups, modules that are not resharded, and local ops.
    """

    settings: tuple[Change, ...]
    seconds: tuple[Change, ...]
    nbytes: tuple[Change, ...]
    layouts: tuple[Change, ...]

    @property
    def equal(self) -> bool:
        """Whether the plans have no difference."""
        return not (self.settings or self.seconds or self.nbytes or self.layouts)

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as JSON data."""
        groups = {"settings": self.settings, "seconds": self.seconds, "bytes": self.nbytes, "layouts": self.layouts}
        rows = {
            name: [
                {"field": change.field, "key": change.key, "left": change.left, "right": change.right}
                for change in changes
            ]
            for name, changes in groups.items()
        }
        return {"equal": self.equal, **rows}


def diff_plans(left: ShardingPlan, right: ShardingPlan) -> PlanDiff:
    """Return where the two plans differ; timings, solver reports and notes are left out."""
    return PlanDiff(
        settings=tuple(_settings(left.to_dict(), right.to_dict())),
        seconds=tuple(_by_key("estimate", _seconds(left.estimate), _seconds(right.estimate))),
        nbytes=tuple(_by_key("estimate.memory", _nbytes(left.estimate), _nbytes(right.estimate))),
        layouts=tuple(_layouts(left.to_dict(), right.to_dict())),
    )


def _settings(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Change]:
    if left["micro_batches"] != right["micro_batches"]:
        yield Change(field="micro_batches", key="", left=left["micro_batches"], right=right["micro_batches"])
    for field in ("mesh", "pipeline", "activation_checkpointing", "job", "cluster", "fingerprint"):
        yield from _by_key(field, left.get(field) or {}, right.get(field) or {})


def _layouts(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Change]:
    for field in _LAYOUTS:
        yield from _by_key(field, left.get(field) or {}, right.get(field) or {})
    for field in ("keep_gathered", "keep_gathered_for_step", "local_ops", "uneven_lengths"):
        marked = [dict.fromkeys(plan.get(field) or (), True) for plan in (left, right)]
        yield from _by_key(field, *marked)


def _by_key(field: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*left, *right]):
        if left.get(key) != right.get(key):
            yield Change(field=field, key=key, left=left.get(key), right=right.get(key))


def _seconds(estimate: Estimate | None) -> dict[str, float]:
    if estimate is None:
        return {}
    seconds: dict[str, float] = {name: getattr(estimate, name) for name in _PARTS}
    for row in estimate.collectives:
        name = f"{row.kind} {row.axis} {row.phase}"
        seconds[name] = seconds.get(name, 0.0) + row.time_s
    return seconds


def _nbytes(estimate: Estimate | None) -> dict[str, int]:
    return {} if estimate is None else {"peak": estimate.peak_memory_bytes, **estimate.memory}
