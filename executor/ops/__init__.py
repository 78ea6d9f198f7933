"""Ops that DTensor cannot run as planned, on local tensors.

calls on DTensors, sent to these ops    dispatch.OwnOps
attention; with the sequence sharded    attention, context_parallel, zigzag_attention
linear layers                           linear
embeddings, cross entropy, fused ops    lookups, cross_entropy, fused
experts and their tokens                experts, token_exchange, grouped_gemm
gradients accumulated inside GEMMs      shared_input_linears
"""
