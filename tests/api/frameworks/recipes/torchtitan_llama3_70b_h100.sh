# Source: pytorch/torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md @b5bcd76: 256 H100 (96 GB), 597.3 tokens/s and GPU in bf16; flags of 0.3
CONFIG=llama3_70b MODULE=llama3 ./run_train.sh \
    --training.local_batch_size 16 --compile.enable
