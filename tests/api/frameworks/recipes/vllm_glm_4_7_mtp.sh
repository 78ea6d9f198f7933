# Source: vllm-project/recipes GLM/GLM.md @8959cf641; model: GLM-4.7; devices: 4; GPU: any
vllm serve zai-org/GLM-4.7-FP8 \
  --tensor-parallel-size 4 \
  --speculative-config.method mtp \
  --speculative-config.num_speculative_tokens 1 \
  --tool-call-parser glm47 \
  --reasoning-parser glm45 \
  --enable-auto-tool-choice
