"""The search over pipelines: numbers of stages, their meshes, and splits of the blocks over them.

meshes and pipelines together    co_search.search_meshes_and_pipelines
the pipelines of a job           space
their search                     search
stages as models of their own    split_graph, stage_planners
blocks over stages               partition, interleaving
a pipeline's step time           step_time
"""
