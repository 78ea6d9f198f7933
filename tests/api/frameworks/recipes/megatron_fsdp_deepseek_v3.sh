# Source: NVIDIA/Megatron-LM examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh @d98e8a64d; no figures
python -u pretrain_gpt.py --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 \
    --seq-length 4096 --num-experts 256 --micro-batch-size 4 --global-batch-size 2048 --bf16 --use-megatron-fsdp \
    --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer --overlap-grad-reduce \
    --overlap-param-gather --expert-model-parallel-size 8 --recompute-granularity selective --use-nccl-ub \
    --recompute-modules mlp moe mla_up_proj layernorm --mtp-num-layers 1 --ckpt-format fsdp_dtensor
