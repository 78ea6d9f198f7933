"""Published configurations of frameworks, with what their sources say of the runs; each file names its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "api" / "frameworks" / "recipes"

LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 32000,
}  # fmt: skip
LLAMA_2_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_70B = {**LLAMA_2_70B, "vocab_size": 128256}
GPT_3 = {"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96, "vocab_size": 50257, "n_positions": 2048}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
QWEN3_235B_A22B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip
GLM_4_5_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 46,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "vocab_size": 151552,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 36, "num_local_experts": 128,
    "num_experts_per_tok": 4, "vocab_size": 201088,
}  # fmt: skip
GLM_4_7 = {
    **GLM_4_5_AIR, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "n_routed_experts": 160, "first_k_dense_replace": 3,
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 62, "num_local_experts": 256,
    "num_experts_per_tok": 8, "vocab_size": 200064,
}  # fmt: skip


def _meta_h100(nodes: int) -> dict[str, Any]:
    """Return nodes of the H100s of torchtitan's published runs: 96 GB of HBM2e, 500 W (benchmarks/published/rows)."""
    device = {
        "name": "h100-sxm-80gb",
        "peak_flops": {"bf16": 8.129e14, "fp16": 8.129e14, "fp8": 1.6258e15, "fp32": 5.507e13, "tf32": 4.065e14},
        "memory_bandwidth_bytes_per_s": 2.4e12,
        "memory_bytes": round(94.99 * 2**30),
    }
    return {"nodes": nodes, "devices_per_node": 8, "device": device}


GB300 = {
    "devices_per_node": 64,
    "device": {"like": "gb200-nvl72-186gb", "name": "gb300", "memory_bytes": 288_000_000_000},
}
"""Its run, at 5,003 tokens per second and device, offloads activations, which the recipe's text does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A configuration, the model and the devices that it is for, and what was measured.

    Attributes:
        file: in `FOLDER`.
        ran: whether the source says that it ran, and so fits.
        tokens_per_s: measured tokens per second and device; None: not stated.
    """

    file: str
    framework: str
    model: str | dict[str, Any]
    cluster: str | dict[str, Any]
    seq: int | None = None
    ran: bool = False
    tokens_per_s: float | None = None

    @property
    def text(self) -> str:
        """The configuration."""
        return (FOLDER / self.file).read_text(encoding="utf-8")

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that `check` takes."""
        return self.model if isinstance(self.model, str) else {"hf_config": self.model}


def _of(framework: str, *rows: tuple[Any, ...]) -> list[Recipe]:
    return [
        Recipe(
            framework=framework,
            **dict(zip(("file", "model", "cluster", "seq", "ran", "tokens_per_s"), row, strict=False)),
        )
        for row in rows
    ]


RECIPES = [
    *_of(
        "torchtitan",
        ("torchtitan_llama3_70b.toml", "llama-3.1-70b", "8x8xa100-sxm-80gb"),
        ("torchtitan_llama3_405b.toml", "llama-3.1-405b", "16x8xh100-sxm-80gb"),
        ("torchtitan_llama3_70b_2025.toml", "llama-3.1-70b", "8x8xa100-sxm-80gb"),
        ("torchtitan_llama3_405b_2024.toml", "llama-3.1-405b", _meta_h100(64), None, True, 128.0),
        ("torchtitan_llama3_405b_cp_2024.toml", "llama-3.1-405b", _meta_h100(64), None, True, 47.0),
        ("torchtitan_llama3_8b_h100.sh", "llama-3.1-8b", _meta_h100(1), None, True, 5762.0),
        ("torchtitan_llama3_8b_compile_h100.sh", "llama-3.1-8b", _meta_h100(16), None, True, 6514.0),
        ("torchtitan_llama3_70b_h100.sh", "llama-3.1-70b", _meta_h100(32), None, True, 597.3),
        ("torchtitan_llama3_8b_tp_h100.sh", "llama-3.1-8b", _meta_h100(8), None, True, 4378.0),
    ),
    *_of(
        "megatron",
        ("megatron_llama3_8b_fp8.sh", "llama-3.1-8b", "1x8xh100-sxm-80gb"),
        ("megatron_gpt3_175b.sh", GPT_3, "128x8xa100-sxm-80gb"),
        ("megatron_mixtral_8x7b.sh", "mixtral-8x7b", "4x8xh100-sxm-80gb"),
        ("megatron_fsdp_deepseek_v3.sh", "deepseek-v3", "32x8xh100-sxm-80gb"),
        ("nemo_llama3_8b.sh", "llama-3.1-8b", "1x8xh100-sxm-80gb"),
        ("nemo_llama3_70b.sh", LLAMA_3_70B, "4x8xh100-sxm-80gb"),
        ("nemo_mixtral_8x7b.sh", "mixtral-8x7b", "2x8xh100-sxm-80gb"),
    ),
    *_of(
        "megatron-bridge",
        ("bridge_llama3_70b_recipe.sh", LLAMA_3_70B, "8x8xh100-sxm-80gb"),
        ("bridge_llama3_70b_h100_fp8.sh", LLAMA_3_70B, "8x8xh100-sxm-80gb", None, True, 1621.0),
        ("bridge_llama31_405b_h100_fp8.sh", "llama-3.1-405b", "128x8xh100-sxm-80gb", None, True, 311.0),
        ("bridge_qwen3_30b_a3b_h100_fp8.sh", QWEN3_30B_A3B, "2x8xh100-sxm-80gb", None, True, 5113.0),
        ("bridge_qwen3_235b_a22b_h100_fp8.sh", QWEN3_235B_A22B, "32x8xh100-sxm-80gb", None, True, 1633.0),
        ("bridge_llama3_70b_gb300_fsdp.yaml", LLAMA_3_70B, GB300),
    ),
    *_of(
        "accelerate",
        ("accelerate_cp.yaml", "llama-3.1-8b", "1x8xh100-sxm-80gb", 8192),
        ("accelerate_deepspeed_file.yaml", "qwen3-8b", "1x2xh100-sxm-80gb", 1024),
        ("accelerate_fsdp1.yaml", "gpt2", "1x2xh100-sxm-80gb", 1024),
        ("accelerate_multi_node.yaml", "gpt2", "2x4xh100-sxm-80gb", 1024),
        ("accelerate_tp_hsdp.yaml", "llama-3.1-8b", "1x8xh100-sxm-80gb", 1024),
        ("trl_deepspeed_zero2.yaml", "gpt2", "1x8xa100-sxm-80gb", 1024),
        ("trl_deepspeed_zero3.yaml", "qwen3-8b", "1x8xh100-sxm-80gb", 1024),
        ("trl_fsdp2.yaml", "qwen3-8b", "1x8xh100-sxm-80gb", 1024),
        ("trl_multi_gpu.yaml", "gpt2", "1x8xa100-sxm-80gb", 1024),
        ("trl_ulysses.yaml", "qwen3-8b", "1x4xh100-sxm-80gb", 8192),
    ),
    *_of(
        "deepspeed",
        ("axolotl_zero1.json", "gpt2", "1x8xa100-sxm-80gb", 1024),
        ("axolotl_zero1_torch_compile.json", "gpt2", "1x8xa100-sxm-80gb", 1024),
        ("axolotl_zero3_bf16.json", "llama-3.1-8b", "1x8xh100-sxm-80gb", 4096),
        ("axolotl_zero3_bf16_cpuoffload_all.json", "llama-3.1-8b", "1x8xh100-sxm-80gb", 4096),
        ("deepspeed_autoep_qwen3_5.json", QWEN3_30B_A3B, "1x8xh100-sxm-80gb", 2048),
        ("deepspeed_autotp.json", "llama-3.1-8b", "1x8xh100-sxm-80gb", 2048),
        ("deepspeed_llama_70b.json", LLAMA_2_70B, "4x8xa100-sxm-80gb", 4096),
        ("deepspeed_llama_7b.json", LLAMA_2_7B, "1x8xa100-sxm-80gb", 4096),
        ("transformers_ds_config_zero2.json", "gpt2", "1x8xa100-sxm-80gb", 1024),
        ("transformers_ds_config_zero3.json", "llama-3.1-8b", "1x8xh100-sxm-80gb", 4096),
    ),
    *_of("transformers", ("trl_glm_4_5_air.json", GLM_4_5_AIR, "8x8xh100-sxm-80gb")),
    *_of(
        "vllm",
        ("vllm_deepseek_r1_dp8.sh", "deepseek-v3", "1x8xh200-sxm-141gb", 8192),
        ("vllm_deepseek_r1_tp8.sh", "deepseek-v3", "1x8xh200-sxm-141gb", 8192),
        ("vllm_glm_4_7_mtp.sh", GLM_4_7, "1x4xh200-sxm-141gb", 8192),
        ("vllm_gpt_oss_120b.sh", GPT_OSS_120B, "1x8xmi355x-288gb", 8192),
        ("vllm_minimax_m2.sh", MINIMAX_M2, "1x4xh200-sxm-141gb", 8192),
    ),
]
