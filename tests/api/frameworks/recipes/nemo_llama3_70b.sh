# Source: NVIDIA/NeMo nemo/collections/llm/recipes/llama3_70b.py @0189a3b38, its values as Megatron-LM's flags: 32 GPUs; no figures
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 \
    --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5 \
    --context-parallel-size 2 --sequence-parallel --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size 512 --bf16 --use-distributed-optimizer
