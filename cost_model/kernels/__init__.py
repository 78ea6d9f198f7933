"""Seconds of compute on one device: GEMMs, attention, memory-bound ops, optimizers.

GEMMs, attention, all other ops    gemm.gemm_time_s, attention.attention_time_s, compute.op_time_s
optimizers, and bytes of a state   optimizers
the optimizer's step and memory    optimizer_memory
rates inside a step                in_step, step_constants
fitted constants                   efficiency.toml, step_constants.toml
"""
