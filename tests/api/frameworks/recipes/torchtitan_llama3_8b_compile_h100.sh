# Source: pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @820504e20, table 3: 128 H100 (96 GB), 6,514 tokens/s and GPU, 62.0 GiB; flags of 0.3
CONFIG=llama3_8b MODULE=llama3 ./run_train.sh \
    --training.local_batch_size 2 --compile.enable activation-checkpoint:selective
