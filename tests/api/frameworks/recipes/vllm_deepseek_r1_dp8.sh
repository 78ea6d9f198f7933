# Source: vllm-project/recipes DeepSeek/DeepSeek-V3.md @8959cf641; model: DeepSeek-R1; devices: 8; GPU: H200
vllm serve deepseek-ai/DeepSeek-R1-0528 \
  --trust-remote-code \
  --data-parallel-size 8 \
  --enable-expert-parallel
