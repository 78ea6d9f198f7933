"""`stated_error`: the relative error of step times that docs/cost-model/accuracy.md states for plans of a kind."""

from __future__ import annotations

from dataclasses import dataclass

from cost_model import ClusterSpec
from planner.plan.sharding_plan import ShardingPlan

PAGE = "docs/cost-model/accuracy.md"
"""The page that states the errors; a test compares it with the constants below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedError:
    """A mean absolute error against published measurements.

    Attributes:
        row: the quantity, as the page's table names it.
        error: mean absolute error of the step time, as a fraction of the measured time.
        runs: number of measured runs.
    """

    row: str
    error: float
    runs: int


DENSE_PLAN = StatedError(row="plans priced op by op, fully sharded, 16 bit", error=0.107, runs=23)
"""Training of dense models under plans; page of 2026-11."""

DENSE_CONFIGURATION = StatedError(row="step time, dense, 16 bit", error=0.064, runs=231)
"""Training of dense models, priced from degrees; page of 2026-11."""

EXPERTS = StatedError(row="step time, mixture of experts", error=0.146, runs=52)
"""Training of mixtures of experts; page of 2026-11. It is stated for prices from degrees, none for plans."""

STATED = (DENSE_PLAN, DENSE_CONFIGURATION, EXPERTS)

_EXPERTS_KEY = ".experts."


def stated_error(plan: ShardingPlan, cluster: ClusterSpec | None) -> StatedError | None:
    """Return the error that is stated for such plans; None: no measurement of such jobs is behind the cost model.

    Training in 16 bits on GPUs was measured. Inference, float32 and devices that are no GPUs were not.

    Args:
        plan: the plan.
        cluster: the cluster that its estimate is for; None: not known.
    """
    if not plan.job.training or cluster is None or not _is_measured(cluster, plan.job.dtype):
        return None
    return EXPERTS if any(_EXPERTS_KEY in f".{key}." for key in plan.plan) else DENSE_PLAN


def stated_configuration_error(cluster: ClusterSpec, dtype: str, *, has_experts: bool) -> StatedError | None:
    """Return the error that is stated for training steps priced from degrees; None: such jobs were not measured."""
    if not _is_measured(cluster, dtype):
        return None
    return EXPERTS if has_experts else DENSE_CONFIGURATION


def _is_measured(cluster: ClusterSpec, dtype: str) -> bool:
    return bool(cluster.device.architecture) and dtype in ("bf16", "fp16")
