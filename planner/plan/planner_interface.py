"""The planner interface, as in ``torch.distributed._shard.sharding_plan``."""

from __future__ import annotations

import abc

from torch import nn
from torch.distributed._shard.sharding_plan.api import ShardingPlanner as TorchShardingPlanner

from planner.plan.sharding_plan import ShardingPlan


class ShardingPlanner(abc.ABC):
    """A planner: it returns a plan for any module. The planner object holds the cluster and the job.

    Its instances are instances of torch's ``ShardingPlanner`` too.
    """

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for ``module``, which is not changed and may be on the meta device.

        Raises:
            PlannerError: there is no plan; the class of the error says why.
        """


# Not a base class, because torch's plans are of another type.
TorchShardingPlanner.register(ShardingPlanner)  # type: ignore[type-abstract]
