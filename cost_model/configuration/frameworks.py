"""The implementations of today's frameworks, where their configurations leave a choice open.

Sources: the frameworks' code, as `benchmarks/published/frameworks` states for each of their releases.
"""

from __future__ import annotations

from dataclasses import replace

from cost_model.configuration.implementation import (
    AllocatorOptions,
    DataParallelOptions,
    ExpertOptions,
    Implementation,
    KernelOptions,
    LossOptions,
    LowPrecisionOptions,
    StateOptions,
    TensorParallelOptions,
)

MEGATRON = Implementation(
    kernels=KernelOptions(attention="cudnn", fused_ops=True, host_ops_per_layer=20),
    low_precision=LowPrecisionOptions(cast_nbytes=4.0, saves_cast_inputs=True),
    tensor_parallel=TensorParallelOptions(async_tp=True, saves_gathered_inputs=False),
    experts=ExpertOptions(bias_kernels=True),
    data_parallel=DataParallelOptions(reduce_nbytes=2),
    state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, gradients_persist=True, master_nbytes=4),
    # 16-bit logits and their float32 copy, which softmax overwrites
    loss=LossOptions(logit_nbytes=6.0, traffic_nbytes=30.0),
)
"""Megatron-Core with Transformer Engine, tp-comm-overlap, and gradients in 16 bits."""

FSDP2 = Implementation(
    kernels=KernelOptions(attention="flash2", separate_linears=True, attention_copies=4.0, host_ops_per_layer=60),
    tensor_parallel=TensorParallelOptions(copies=True),
    loss=LossOptions(logit_hole_nbytes=2.0),
    allocator=AllocatorOptions(gather_stream=True, reduce_stream=True),
)
"""Eager torch with ``fully_shard``, and parameters, gradients and states in float32."""

FSDP2_BF16 = replace(FSDP2, state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, optimizer_nbytes=4))
"""The same with parameters, gradients and states in 16 bits."""


def with_compile(implementation: Implementation) -> Implementation:
    """Return an eager implementation under torch.compile; one whose kernels are fused already is returned as it is."""
    kernels = implementation.kernels
    if kernels.fused_ops:
        return implementation
    return replace(
        implementation,
        kernels=replace(kernels, fused_ops=True, host_ops_per_layer=kernels.host_ops_per_layer // 2),
        low_precision=replace(implementation.low_precision, shares_casts=True),
        loss=replace(implementation.loss, traffic_nbytes=14.0),
        saving=replace(implementation.saving, recomputes_elementwise=True, selective_unread=False),
    )
