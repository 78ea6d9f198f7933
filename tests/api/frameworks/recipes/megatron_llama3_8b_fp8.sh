# Source: NVIDIA/Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh @core_v0.16.1: 8 H100; no figures
GPUS_PER_NODE=8
NUM_NODES=1
TP_SIZE=1
CP_SIZE=1
DTYPE="fp8"
SEQ_LENGTH=8192
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length $SEQ_LENGTH
    --max-position-embeddings 8192
    --swiglu
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --lr 0.00015      # not a degree
    --bf16
    --grad-reduce-in-bf16
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size 4
    --sequence-parallel
)
PARALLEL_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \
    ${PARALLEL_ARGS[@]} --mock-data --vocab-size 128256
