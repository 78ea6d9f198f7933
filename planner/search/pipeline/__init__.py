"""Which pipeline is best? The same search over stages, their meshes and their splits.

meshes and pipelines together    co_search.search_meshes_and_pipelines
the pipelines of a job           space
their search                     search
stages as models of their own    split_graph, stage_planners
blocks over stages               partition, interleaving
a pipeline's step time           step_time
"""
