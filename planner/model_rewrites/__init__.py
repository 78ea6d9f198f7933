"""Module rewrites, applied alike for tracing and for running: experts, MLA, fused ops, fused projections.

experts as one op                experts
fused QKV, fused gate-up         fuse_projections.fuse_projections
fused ops and their kernels      fuse_ops.fuse_ops, fused_kernels
MLA, without copies of keys      mla.concatenate_mla_keys
torch's attention modules        torch_attention.attention_as_planned
masks and transformers' cache    eager_masks, cache_argument
checks of values, checkpoints    replaced_calls
branches on random numbers       random_branches.likelier_branches
assignments, CTC loss, autocast  replaced_calls
elements that a mask selects     selected_rows
weights that a call reads anew    weights_at_call.read_weights_at_call
dims on which an op is split     independent_dims.split_outputs
opaque modules as one op         opaque_op.opaque_as_one_op
modules on local tensors         local_module.LocalModule
values for tensors without       assumed_values.AssumedValues
attention on the meta device     attention_on_meta
images that are packed           image_sizes
paths of tensors in arguments    tree_paths.path_text
"""
