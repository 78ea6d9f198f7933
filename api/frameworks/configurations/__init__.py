"""The configurations of each framework: how they are read and written, and what they can say.

torchtitan's flags and TOML        torchtitan.TORCHTITAN
Megatron-LM's arguments            megatron.MEGATRON_LM
Megatron-Bridge's overrides        bridge.MEGATRON_BRIDGE
accelerate's YAML                  accelerate.ACCELERATE
DeepSpeed's JSON                   deepspeed.DEEPSPEED
transformers' DistributedConfig    transformers.TRANSFORMERS
vLLM's command line                vllm.VLLM
"""
