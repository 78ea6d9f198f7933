"""Which mesh, micro-batches and checkpointing are best? A branch and bound over all of them.

the engine                   branch_and_bound.BranchAndBound
the search over meshes       mesh_search.MeshSearch, mesh_tasks
the search over pipelines    pipeline
where tasks run              task_pool, local_workers, worker_context
nothing fits: why            infeasibility.infeasibility_report
"""
