"""The run of a sharded module: hooks, FSDP, activation checkpointing and gradient reduction; root/ is its outside.

redistribution at module boundaries    boundary_hooks
FSDP groups                            fully_sharded
activation checkpointing               checkpointing, saved_tensor_recompute
gradient reduction, once a step        grad_reduction
parameters at use                      parameter_views
"""
