# Source: NVIDIA/NeMo nemo/collections/llm/recipes/mixtral_8x7b.py @0067c7b58, its values as Megatron-LM's flags: 2 nodes of 8 GPUs; no figures
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --num-experts 8 --moe-router-topk 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \
    --num-virtual-stages-per-pipeline-rank 8 --expert-model-parallel-size 8 --sequence-parallel \
    --micro-batch-size 1 --global-batch-size 512 --bf16 --use-distributed-optimizer
