"""The root of a sharded module as a loop meets it: what it remembers, what it takes, and what it refuses.

plan, mesh and hooks of a sharded root      sharded_root.ShardedRoot
arguments that the plan does not name       root_arguments
tables of the sizes of images               packed_images
parameters that are added after sharding    added_parameters
parameters that are unfrozen after it       unfrozen_parameters
torch.compile, save_pretrained, deepcopy    eager_only, save_pretrained, copies
"""
