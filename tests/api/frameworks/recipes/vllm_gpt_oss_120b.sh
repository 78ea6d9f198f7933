# Source: vllm-project/recipes OpenAI/GPT-OSS.md @8959cf641; model: gpt-oss-120b; devices: 8; GPU: MI355X
vllm serve openai/gpt-oss-120b --tensor-parallel-size=8 --attention-backend ROCM_AITER_UNIFIED_ATTN \
  -cc.pass_config.fuse_rope_kvcache=True -cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 \
  --block-size=64
