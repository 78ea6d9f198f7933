"""Plans that were written for other libraries become a `ShardingPlan`, without a trace of the module.

torch's sharding plans, specs and Sharders   sharding_specs.plan_from_specs
the styles of torch's parallelize_module     parallel_styles.plan_from_styles
the names of styles of transformers          tp_plans.plan_from_tp_plan
transformers' DistributedConfig              distributed_config.plan_from_distributed_config
"""
