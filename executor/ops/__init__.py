"""Ops that DTensor cannot run as planned, on local tensors; context_parallel/ has attention over split sequences.

calls on DTensors, sent to these ops    dispatch.OwnOps
attention                               attention
linear layers                           linear
convolutions                            convolution
ops that DTensor has no rule for        local
modules that cannot be traced           opaque
embeddings, cross entropy, fused ops    lookups, cross_entropy, fused
sums, means, other losses               reductions
experts and their tokens                experts, token_exchange, grouped_gemm
ops that update buffers                 buffers/
gradients accumulated inside GEMMs      shared_input_linears
"""
