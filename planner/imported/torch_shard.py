"""The names of ``torch.distributed._shard``, which is private to torch; checked with torch 2.13."""

from __future__ import annotations

from torch.distributed._shard.sharder import Sharder
from torch.distributed._shard.sharding_plan.api import ShardingPlan, ShardingPlanner
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

__all__ = ["ChunkShardingSpec", "Sharder", "ShardingPlan", "ShardingPlanner"]
