"""The plan as data: `ShardingPlan`, its job, its estimate, its file.

the plan                             sharding_plan.ShardingPlan
what may be asked of a plan          job_spec.JobSpec
what it was planned for, resolved    job.Job
what a step costs                    estimate.Estimate
layouts at module boundaries         ports.Port
its file and its JSON Schema         file, document
what every planner offers            planner_interface.ShardingPlanner
"""
