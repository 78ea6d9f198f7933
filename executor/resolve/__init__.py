"""A plan resolved against a module, before anything is changed: names, layouts, FSDP groups and checks.

the plan, resolved against one module    resolved_plan.resolve_plan, .ResolvedPlan
its checks, before any change            checks
names of modules, arguments, tensors     fqns, tensor_paths
parameters                               parameter_layouts, place_parameters
FSDP groups                              fsdp_groups
module boundaries, token order           boundaries, token_order
mesh, batch, Sharders                    mesh.device_mesh_for, batch.local_batch, sharder.Sharder
"""
