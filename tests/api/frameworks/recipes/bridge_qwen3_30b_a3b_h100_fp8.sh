# Source: NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md @21b02e0cf (v0.3.0), 26.02 container, DGX-H100: 16 H100, 5113 tokens/s and GPU
torchrun --nproc-per-node 8 scripts/training/run_recipe.py --recipe qwen3_30b_a3b_pretrain_config \
    model.tensor_model_parallel_size=1 \
    model.sequence_parallel=false \
    model.pipeline_model_parallel_size=2 \
    model.virtual_pipeline_model_parallel_size=12 \
    model.expert_model_parallel_size=8 \
    model.expert_tensor_parallel_size=1 \
    model.seq_length=4096 \
    model.recompute_granularity=null \
    model.recompute_method=null \
    model.recompute_num_layers=null \
    train.global_batch_size=1024 \
    train.micro_batch_size=1 \
    mixed_precision=bf16_with_fp8_current_scaling_mixed
