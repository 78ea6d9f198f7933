# Source: NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh @core_v0.16.1: at least 128 GPUs; no figures
torchrun --nproc_per_node 8 --nnodes 128 pretrain_gpt.py --num-layers 96 --hidden-size 12288 \
    --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --fp16 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
