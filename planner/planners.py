"""The planners as objects: each takes the cluster and the job once, then `build_plan(module)` plans any module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from torch import nn

from planner.build import build_plan
from planner.graph.example_inputs import GivenInputs
from planner.plan.former_names import with_current_names
from planner.plan.job_spec import JobOptions
from planner.plan.planner_interface import ShardingPlanner
from planner.plan.sharding_plan import ShardingPlan


class _LocalPlanner(ShardingPlanner):
    """A planner that runs in this process.

    Args:
        example_inputs: as for `build_plan`.
        options: the fields of `JobSpec` except ``planner``, as for `build_plan`.
    """

    kind: ClassVar[str]

    def __init__(self, *, example_inputs: GivenInputs = None, **options: Unpack[JobOptions]) -> None:
        self._example_inputs = example_inputs
        self._options: JobOptions = {**with_current_names(options), "planner": self.kind}  # type: ignore[typeddict-item]
        self._tp_plan: Mapping[str, str] | None = None

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for ``module``.

        Raises:
            PlannerError: there is no plan. `InfeasibleError`: no plan fits the memory.
        """
        return build_plan(module, example_inputs=self._example_inputs, tp_plan=self._tp_plan, **self._options)


class ILPShardingPlanner(_LocalPlanner):
    """The main planner: it returns the fastest plan that fits the memory, by integer programming."""

    kind = "ilp"


class DataParallelPlanner(_LocalPlanner):
    """The data-parallel baseline: parameters are replicated, the batch is sharded over all devices."""

    kind = "data-parallel"


class FullyShardedPlanner(_LocalPlanner):
    """The FSDP baseline (ZeRO-3 or -2): parameters, gradients, optimizer state and batch sharded over all devices."""

    kind = "fully-sharded"


class TensorParallelPlanner(_LocalPlanner):
    """The tensor-parallel baseline: the hand-written plan that a Hugging Face config carries, on the innermost axis.

    Args:
        tp_plan: FQN pattern of modules -> style; None: the plan that the model carries.
        example_inputs: as for the other planners.
        options: as for the other planners.
    """

    kind = "tensor-parallel"

    def __init__(
        self,
        *,
        tp_plan: Mapping[str, str] | None = None,
        example_inputs: GivenInputs = None,
        **options: Unpack[JobOptions],
    ) -> None:
        super().__init__(example_inputs=example_inputs, **options)
        self._tp_plan = tp_plan


class RandomPlanner(_LocalPlanner):
    """Plans with random feasible layouts, to test the executor and the estimator; not for training.

    Args:
        seed: equal seeds give equal plans.
        example_inputs: as for the other planners.
        options: as for the other planners.
    """

    kind = "random"

    def __init__(self, *, seed: int = 0, example_inputs: GivenInputs = None, **options: Unpack[JobOptions]) -> None:
        super().__init__(example_inputs=example_inputs, **options)
        self._options["planner"] = f"random:{seed}"
