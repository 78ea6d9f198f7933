# Source: NVIDIA/Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh @core_v0.16.1: at least 32 GPUs (its one
# node of 8 does not hold pp 4 x ep 8); no figures
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 \
    --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --overlap-param-gather \
    --overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --bf16 --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
