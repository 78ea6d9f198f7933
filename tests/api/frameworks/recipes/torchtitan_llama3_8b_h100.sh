# Source: pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md @820504e20, table 1: 8 H100 (96 GB), 5,762 tokens/s and GPU, 82.4 GiB; flags of 0.3
CONFIG=llama3_8b MODULE=llama3 ./run_train.sh \
    --training.local_batch_size 2 --training.global_batch_size 16 activation-checkpoint:selective
