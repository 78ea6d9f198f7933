# Source: NVIDIA/NeMo nemo/collections/llm/recipes/llama3_8b.py @00617962f, its values as Megatron-LM's flags: 8 GPUs; no figures
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 512 --bf16 --use-distributed-optimizer
