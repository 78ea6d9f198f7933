"""torch's private names, which the executor uses nowhere else: to be checked with each new version of torch.

DTensors, collectives, dispatch, autograd    dtensor
``fully_shard``                              fsdp
optimizers and the gradient scaler           optim
random ops and generators                    random
several calls that shard one module          parallel
shards of a dim, parameters exchanged        weights
key-value stores                             store
gloo process groups                          gloo
``torch.compile`` of modules                 compile
generation                                   generation
modes that see calls of torch                function_modes
parameters that a forward sees otherwise     shown_parameters
"""
