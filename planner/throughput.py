"""How many sequences at once: inference at batches of 1, 2, 4, ... until their key-value cache does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cost_model import ClusterSpec
from planner.errors import JobError, SolverError
from planner.job import JobPhase
from planner.outer_search import Progress
from planner.plan import ShardingPlan
from planner.session import PlanningSession
from planner.traced_module import TracedModule, trace_module
from planner.tradeoffs import step_time_s

MOST = 4096
"""The largest batch that is tried unless another is asked for: small models would go on and on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """A phase of inference at some batch.

    Attributes:
        plan: the fastest; None where none fits, or none was found in time.
        in_time: whether the search came to an answer before its time was up.
    """

    batch: int
    plan: ShardingPlan | None
    in_time: bool = True

    @property
    def items_per_s(self) -> float:
        """Tokens (or samples) per second, of all devices together."""
        assert self.plan is not None
        return self.plan.job.items[0] / step_time_s(self.plan)


def batches(
    model: nn.Module | TracedModule,
    *,
    cluster: str | ClusterSpec | Mapping[str, Any],
    phase: JobPhase = "decode",
    mesh: str | None = None,
    most: int = MOST,
    progress: Progress | None = None,
    **options: Any,
) -> list[BatchSize]:
    """Return the fastest plan at each batch, the smallest first: 1, 2, 4, ... up to the first that does not fit.

    Args:
        model: as for `build_plan`; traced once.
        phase: "prefill" or "decode".
        mesh: None: the best of all meshes with up to ``axes`` axes, for each batch anew.
        most: the largest batch that is tried.
        progress: told of each stage.
        options: the job and the search, as for `build_plan`, without a batch.

    Raises:
        JobError: the phase is training, which puts any batch through in micro-batches.
        PlannerError: the job cannot be planned at all.
    """
    if phase == "training":
        advice = "Choose prefill or decode; for training, sizes compares clusters."
        raise JobError("batches are compared for inference.", what_to_do=advice, field="phase")
    if not isinstance(model, TracedModule):
        job = {name: options[name] for name in ("seq", "dtype", "fused") if name in options}
        model = trace_module(model, batch=1, phase=phase, **job)
    found: list[BatchSize] = []
    batch = 1
    while batch <= most and (not found or found[-1].plan is not None):
        session = PlanningSession(
            model, cluster=cluster, phase=phase, batch=batch, progress=_at(batch, progress), **options
        )
        try:
            found.append(BatchSize(batch=batch, plan=session.plan_if_any(mesh=mesh)))
        except SolverError:
            found.append(BatchSize(batch=batch, plan=None, in_time=False))
        batch *= 2
    return found


def _at(batch: int, progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda stage: progress(f"batch {batch}: {stage}")


def best_batch(found: list[BatchSize], *, within_s: float | None = None) -> BatchSize | None:
    """Return the batch with the most tokens per second, of those whose step takes at most ``within_s``; None: none.

    Args:
        found: what `batches` returned.
        within_s: of a decoding step, the longest that a sequence may wait for its next token; None: no limit.
    """
    fit = [size for size in found if size.plan is not None and (within_s is None or step_time_s(size.plan) <= within_s)]
    return max(fit, key=lambda size: (size.items_per_s, -size.batch), default=None)
