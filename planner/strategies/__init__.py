"""Strategies: the ways to shard each op, from DTensor's behaviour and from rules for the executor's own ops.

the strategies of all regions on a mesh      enumerate.StrategyTable
what DTensor can do without communication    dtensor_rules.DTensorRules
rules of the executor's own ops              own_rules, expert_parallel, context_parallel
ops that each rank runs by itself            local_ops
losses, and sums over the batch              reduction_rules
collectives inside an op                     axis_rule.InnerCollective, own_collectives
zigzag token order                           token_reordering, context_parallel_order
"""
