"""Plans that were written for other libraries become a `ShardingPlan`, without a trace of the module.

plans, specs and Sharders of torch's _shard    sharding_specs
styles of torch's `parallelize_module`         parallel_styles
transformers' `tp_plan`, `DistributedConfig`   tp_plans
"""
