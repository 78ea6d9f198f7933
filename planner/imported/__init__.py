"""Plans that were written for other libraries become a `ShardingPlan`, without a trace of the module.

sharding_specs    torch.distributed._shard: `ShardingPlan`, `ChunkShardingSpec`, Sharders
parallel_styles   torch.distributed.tensor.parallel: the styles of `parallelize_module`
tp_plans          transformers: the strings of `tp_plan`, and `DistributedConfig`
"""
