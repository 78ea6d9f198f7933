"""Reports on accelerate and transformers, as in `support.reported_faults`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml
from support.reported_faults import Fault, Report, sparse

QWEN3_VL_30B = sparse(48, 2048, 32, 4, 128, 768, 151936)
GPT_OSS_120B: Mapping[str, Any] = {
    "hf_config": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    }
}

DEGREE = "parallelism_config_{}_size"


def config(kind: str, processes: int, degrees: Mapping[str, int] | None = None, **keys: Any) -> str:
    """Return accelerate's YAML of FSDP2, DDP or DeepSpeed."""
    values: dict[str, Any] = {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": processes, **keys}
    if kind == "FSDP":
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if degrees:
        values["parallelism_config"] = {DEGREE.format(name): degree for name, degree in degrees.items()}
    return yaml.safe_dump(values)


ACCELERATE = (
    Report(
        "huggingface/accelerate#3798",
        "degrees",
        "accelerate",
        "qwen3-8b",
        "1x2xh100-sxm-80gb",
        config("FSDP", 2, {"dp_replicate": 1, "dp_shard": 1, "tp": 2, "cp": 1}, num_machines=1),
        (Fault("parallelism_config_dp_shard_size 1", "FSDP", "2"),),
        seq=4096,
    ),
    Report(
        "NVIDIA/Model-Optimizer#1302",
        "degrees",
        "accelerate",
        "qwen3-8b",
        "2x4xh100-sxm-80gb",
        config("FSDP", 8, {"dp_shard": 4}, num_machines=2),
        (Fault("parallelism_config_dp_shard_size 4", "8 of the cluster", "8"),),
        seq=4096,
    ),
    Report(
        "huggingface/accelerate#3876 (rule)",
        "DDP with tensor parallelism",
        "accelerate",
        "llama-3.1-8b",
        "1x4xh100-sxm-80gb",
        config("MULTI_GPU", 4, {"dp_replicate": 2, "tp": 2}),
        (Fault("parallelism_config_dp_replicate_size 2", "parallelism_config_tp_size", "2"),),
        seq=4096,
    ),
    Report(
        "huggingface/trl#3994 (rule)",
        "sequence by context ranks",
        "accelerate",
        "qwen3-8b",
        "1x2xh100-sxm-80gb",
        config("FSDP", 2, {"cp": 2}),
        (Fault("parallelism_config_cp_size: 2", "16,382 tokens", "1"),),
        seq=16382,
    ),
    Report(
        "zai-org/CogVideo#502 (rule)",
        "unknown key",
        "accelerate",
        "qwen3-8b",
        "1x1xa100-sxm-80gb",
        config("NO", 1, lr_scheduler="constant"),
        (Fault("lr_scheduler", "is not a key"),),
        seq=4096,
    ),
    Report(
        "DAMO-NLP-SG/LongPO#5",
        "heads",
        "accelerate",
        {
            "hf_config": {
                "model_type": "qwen2",
                "num_hidden_layers": 28,
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "intermediate_size": 18944,
                "vocab_size": 152064,
            }
        },
        "1x8xa100-sxm-80gb",
        config("DEEPSPEED", 8, {"sp": 8}, deepspeed_config={"zero_stage": 3}),
        (Fault("parallelism_config_sp_size: 8", "28 heads", "4"),),
        seq=131072,
    ),
)

USUAL = {"per_device_train_batch_size": 1, "bf16": True, "max_length": 4096}
TRANSFORMERS = (
    Report(
        "huggingface/transformers#48307",
        "key-value heads",
        "transformers",
        QWEN3_VL_30B,
        "1x8xh100-sxm-80gb",
        json.dumps({"tp_size": 8, **USUAL}),
        (Fault("tp_size: 8", "4 key-value heads", "4"),),
    ),
    Report(
        "huggingface/transformers#40953",
        "key-value heads",
        "transformers",
        GPT_OSS_120B,
        "2x8xh100-sxm-80gb",
        json.dumps({"tp_plan": "auto", **USUAL}),
        (Fault("tp_size: 16", "8 key-value heads", "8"),),
    ),
    Report(
        "huggingface/transformers#46990 (rule)",
        "degrees",
        "transformers",
        "qwen3-8b",
        "1x8xh100-sxm-80gb",
        json.dumps({"tp_size": 2, "fsdp_size": 2, **USUAL}),
        (Fault("fsdp_size 2 x tp_size 2", "8 devices", "fsdp_size 4"),),
    ),
    Report(
        "huggingface/transformers#48155 (rule)",
        "ZeRO-3 with a pipeline",
        "transformers",
        "qwen3-8b",
        "1x8xh100-sxm-80gb",
        json.dumps({"pp_size": 2, "fsdp_size": 4, **USUAL}),
        (Fault("pp_size 2", "fsdp_size", "1"),),
    ),
    Report(
        "huggingface/transformers#48792 (rule)",
        "experts",
        "transformers",
        QWEN3_VL_30B,
        "1x8xh100-sxm-80gb",
        json.dumps({"tp_size": 4, "fsdp_size": 2, "ep_size": 2, **USUAL}),
        (Fault("ep_size 2", "tp_size 4", "8"),),
    ),
)
