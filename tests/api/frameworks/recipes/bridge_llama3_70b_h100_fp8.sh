# Source: NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md @21b02e0cf (v0.3.0), 26.02 container, DGX-H100: 64 H100, 1621 tokens/s and GPU
torchrun --nproc-per-node 8 scripts/training/run_recipe.py --recipe llama3_70b_pretrain_config \
    model.tensor_model_parallel_size=4 \
    model.pipeline_model_parallel_size=8 \
    model.virtual_pipeline_model_parallel_size=5 \
    model.context_parallel_size=1 \
    train.global_batch_size=256 \
    train.micro_batch_size=1 \
    mixed_precision=bf16_with_fp8_current_scaling_mixed
