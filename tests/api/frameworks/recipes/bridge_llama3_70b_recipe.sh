# Source: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/recipes/llama/llama3.py @0.3.1: 32 GPUs or more; no figures
torchrun --nproc-per-node 8 scripts/training/run_recipe.py --recipe llama3_70b_pretrain_config \
    train.train_iters=100
