"""The search: a branch and bound over meshes, numbers of micro-batches, checkpointing modes and pipelines.

the meshes of a cluster      mesh_space.meshes_of
the engine                   branch_and_bound.BranchAndBound
the search over meshes       mesh_search.MeshSearch, mesh_tasks
the search over pipelines    pipeline
where tasks run              task_pool, local_workers, worker_context
why no plan fits             infeasibility.infeasibility_report, infeasibility.find_infeasible
the least memory             least_memory.LeastMemorySearch
"""
