"""The planner interface, as in ``torch.distributed._shard.sharding_plan``."""

from __future__ import annotations

import abc

from torch import nn

from planner.plan.sharding_plan import ShardingPlan


class ShardingPlanner(abc.ABC):
    """Something that decides how a module is split. Which cluster and which job, the planner itself knows."""

    @abc.abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """Return the plan for ``module``, which stays as it is and may be on the meta device.

        Raises:
            PlannerError: there is no plan; the subclass says why.
        """
