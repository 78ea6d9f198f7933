"""The planner interface, as in ``torch.distributed._shard.sharding_plan``."""

from __future__ import annotations

import abc

from torch import nn
from torch.distributed._shard.sharding_plan import ShardingPlanner as TorchShardingPlanner

from planner.plan.sharding_plan import ShardingPlan


class ShardingPlanner(TorchShardingPlanner):
    """A planner, torch's too: it returns a plan for any module. The planner object holds the cluster and the job."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for ``module``, which is not changed and may be on the meta device.

        Raises:
            PlannerError: there is no plan; the class of the error says why.
        """
