"""Keys of torchtitan: those that were renamed, and those whose values are not priced."""

from __future__ import annotations

RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
}
"""Key of an older release -> the key of today."""

UNPRICED = {
    "training.enable_cpu_offload": "offloading is not priced",
    "training.disable_loss_parallel": "logits are priced as split",
    "parallelism.disable_loss_parallel": "logits are priced as split",
    "parallelism.enable_fsdp_symm_mem": "collectives are priced without symmetric memory",
    "parallelism.module_fqns_per_model_part": "stages are priced as equal",
    "parallelism.pipeline_parallel_schedule_csv": "the schedule is priced as pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_split_points": "stages are priced as equal",
    "experimental.pipeline_parallel_split_points": "stages are priced as equal",
    "parallelism.expert_parallel_comm_backend": "priced as plain all-to-all",
    "compile.enable_async_tensor_parallel": "collectives of tensor parallelism are priced as exposed",
    "override.imports": "overrides are not priced",
    "optimizer.early_step_in_backward": "the optimizer is priced after backward",
    "float8.enable_fsdp_float8_all_gather": "priced as an all-gather in 16 bits",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": "priced as an all-gather in 16 bits",
    "training.enable_fsdp_float8_all_gather": "priced as an all-gather in 16 bits",
    "quantize.grouped_mm.float8.fqns": "experts are priced in 16 bits",
    "quantize.grouped_mm.mx.fqns": "experts are priced in 16 bits",
    "fault_tolerance.enable": "fault tolerance is not priced",
}
"""Key -> why its value is not in the price."""

OFF: tuple[object, ...] = (False, "false", "False", "none", "None", "", "standard", [], "[]")
