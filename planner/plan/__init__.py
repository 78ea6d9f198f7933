"""The plan as data: `ShardingPlan`, its job, its estimate, its file."""
