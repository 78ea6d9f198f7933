"""The plan as data: `ShardingPlan`, its job, its estimate, its file.

the plan                             sharding_plan.ShardingPlan
the job as a user states it          job_spec.JobSpec
the job as a plan records it         job.Job
techniques, and what each gives      techniques.Technique, .TechniqueGain
what a step costs                    estimate.Estimate
layouts at module boundaries         ports.Port
its file and its JSON Schema         file, document
the error stated for such prices     stated_errors.stated_error
the interface of every planner       planner_interface.ShardingPlanner
"""
