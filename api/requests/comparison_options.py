"""The options of a job that comparisons of plans do not take, for the command line and HTTP alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.errors import JobError

ComparisonKind = Literal["alternatives", "pareto", "sweep", "batches"]

_NOT_OF_PARETO = ("planner", "executable_only", "jobs", "tolerance")

NOT_OF_COMPARISONS: dict[ComparisonKind, tuple[str, ...]] = {
    "alternatives": ("mesh", *_NOT_OF_PARETO),
    "pareto": _NOT_OF_PARETO,
    "sweep": ("mesh", "planner", "executable_only", "jobs", "pins", "data_axes", "axes"),
}
"""Fields of `JobSpec` that a comparison does not take."""

OF_BATCHES = ("cluster", "mesh", "seq", "memory_gb", "phase", "dtype", "techniques", "time_limit_s")
"""Fields of `JobSpec` that a comparison of batches takes."""

_NOT_COMPARED = ("auto", "async-tp", "heterogeneous-blocks")


def check_techniques(techniques: Sequence[str]) -> None:
    """Raise a `JobError` that names the techniques with which plans are not compared."""
    refused = [name for name in _NOT_COMPARED if name in techniques]
    if refused:
        advice = "Name those that `shardplan plan` chose." if "auto" in refused else "Leave it out, or use plan."
        raise JobError(
            f"techniques is {', '.join(refused)}: for one plan, not for a comparison.",
            what_to_do=advice,
            field="techniques",
        )
