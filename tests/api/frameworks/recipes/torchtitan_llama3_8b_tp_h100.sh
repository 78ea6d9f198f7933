# Source: pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md @b5bcd76: 64 H100 (96 GB), 4378 tokens/s and GPU in bf16; flags of 0.3
CONFIG=llama3_8b MODULE=llama3 ./run_train.sh \
    --parallelism.tensor_parallel_degree 8 --training.local_batch_size 12 --compile.enable
