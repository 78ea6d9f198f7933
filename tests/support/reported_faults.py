"""Faulty configurations as users of the frameworks reported them: degrees and sizes, and the source of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

Model = str | Mapping[str, Any]
"""A preset, or ``{"hf_config": {...}}``."""


class Fault(NamedTuple):
    """A fault that has to be found.

    Attributes:
        key: what the framework calls it, with its value.
        about: what it contradicts.
        legal: a value that has to be listed; "" where there is none to list.
    """

    key: str
    about: str
    legal: str = ""


class Report(NamedTuple):
    """A configuration, and all of its faults.

    Attributes:
        source: owner/repository#number of the issue or pull request, with "(rule)" where it gives a rule or a key and
            the degrees here are chosen. Sizes of batches and sequences that it lacks are chosen too.
        kind: what is wrong.
        text: the configuration.
        seq: tokens of a sequence where the configuration does not say them.
    """

    source: str
    kind: str
    framework: str
    model: Model
    cluster: str
    text: str
    faults: tuple[Fault, ...]
    seq: int | None = None


def dense(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Model:
    """Return a model of Llama's architecture."""
    return {
        "hf_config": {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": ffn,
            "vocab_size": vocab,
        }
    }


def gpt2(layers: int, hidden: int, heads: int) -> Model:
    """Return a model of GPT-2's architecture."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}
    return {"hf_config": {"model_type": "gpt2", **sizes}}


def sparse(layers: int, hidden: int, heads: int, kv_heads: int, experts: int, ffn: int, vocab: int) -> Model:
    """Return a model of Qwen3-MoE's architecture."""
    return {
        "hf_config": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128,
            "intermediate_size": 3 * hidden,
            "moe_intermediate_size": ffn,
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "vocab_size": vocab,
        }
    }


QWEN25_3B = dense(36, 2048, 16, 2, 11008, 151936)
TITAN_DEBUG = dense(8, 256, 16, 16, 768, 2048)


TITAN_TP, TITAN_PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
SHARD, CP = "parallelism.data_parallel_shard_degree", "parallelism.context_parallel_degree"
TORCHTITAN = (
    Report(
        "pytorch/torchtitan#932",
        "key-value heads",
        "torchtitan",
        "llama-3.1-8b",
        "2x8xh100-sxm-80gb",
        "[training]\nbatch_size = 1\nseq_len = 8192\ntensor_parallel_degree = 16\n",
        (Fault(f"{TITAN_TP} 16", "8 key-value heads", "8"),),
    ),
    Report(
        "pytorch/torchtitan#1184",
        "degrees",
        "torchtitan",
        "llama-3.1-8b",
        "1x8xh100-sxm-80gb",
        "[training]\nlocal_batch_size = 1\nseq_len = 8192\n"
        "[parallelism]\ndata_parallel_shard_degree = 8\ncontext_parallel_degree = 8\n",
        (Fault(f"{SHARD} 8 x {CP} 8", "8 devices", "-1"),),
    ),
    Report(
        "pytorch/torchtitan#27",
        "degrees",
        "torchtitan",
        "llama-3.1-8b",
        "1x8xa100-sxm-80gb",
        "[training]\nbatch_size = 3\nseq_len = 2048\ntensor_parallel_degree = 2\npipeline_parallel_degree = 3\n",
        (Fault(f"{TITAN_TP} 2 x {TITAN_PP} 3", "8 devices", "4"),),
    ),
    Report(
        "pytorch/torchtitan#686",
        "sequence by tensor ranks",
        "torchtitan",
        TITAN_DEBUG,
        "1x2xh100-sxm-80gb",
        "[training]\nlocal_batch_size = 1\nseq_len = 3\n[parallelism]\ntensor_parallel_degree = 2\n",
        (Fault(f"{TITAN_TP} 2", "3 tokens", "1"),),
    ),
    Report(
        "pytorch/torchtitan#592 (rule)",
        "sequence by context ranks",
        "torchtitan",
        "llama-3.1-8b",
        "1x8xh100-sxm-80gb",
        "[training]\nbatch_size = 1\nseq_len = 8196\n[experimental]\ncontext_parallel_degree = 4\n",
        (Fault(f"{CP} 4", "8,196 tokens", "2"),),
    ),
    Report(
        "pytorch/pytorch#126600",
        "batch",
        "torchtitan",
        TITAN_DEBUG,
        "1x3xh100-sxm-80gb",
        "[training]\nbatch_size = 8\nseq_len = 2048\n[experimental]\npipeline_parallel_degree = 3\n",
        (Fault("parallelism.pipeline_parallel_microbatches 3", "local_batch_size 8", "4"),),
    ),
    Report(
        "pytorch/torchtitan#4258 (rule)",
        "experts",
        "torchtitan",
        "mixtral-8x7b",
        "2x8xh100-sxm-80gb",
        "--training.seq_len 4096 --training.local_batch_size 1 --training.disable_cuda_graphs "
        "--parallelism.expert_parallel_degree 16",
        (Fault("parallelism.expert_parallel_degree 16", "8 experts", "8"),),
    ),
    Report(
        "pytorch/torchtitan#640 (rule)",
        "unknown key",
        "torchtitan",
        "llama-3.1-8b",
        "1x8xh100-sxm-80gb",
        "[training]\nlocal_batch_size = 1\nseq_len = 8192\nenable_sequence_parallel = false\n"
        "[parallelism]\ntensor_parallel_degree = 8\n",
        (Fault("training.enable_sequence_parallel", "is not a key", "parallelism.enable_sequence_parallel"),),
    ),
)


def ds(**sections: Any) -> str:
    """Return DeepSpeed's JSON, of sequences of 4,096 tokens in bfloat16 unless said otherwise."""
    usual = {"bf16": {"enabled": True}, "_training_script": {"max_length": 4096}}
    return json.dumps({**usual, **sections})


DEEPSPEED = (
    Report(
        "Roblox/FAI-RL#72",
        "batch",
        "deepspeed",
        "llama-3.1-8b",
        "1x1xh100-sxm-80gb",
        ds(
            train_batch_size=16,
            train_micro_batch_size_per_gpu=1,
            gradient_accumulation_steps=8,
            zero_optimization={"stage": 3},
        ),
        (Fault("train_batch_size 16", "gradient_accumulation_steps 8", "8"),),
    ),
    Report(
        "deepspeedai/DeepSpeed#7298",
        "batch",
        "deepspeed",
        "llama-3.1-8b",
        "2x8xh100-sxm-80gb",
        ds(
            train_batch_size=64,
            train_micro_batch_size_per_gpu=4,
            gradient_accumulation_steps=1,
            zero_optimization={"stage": 2},
            tensor_parallel={"autotp_size": 2},
        ),
        (Fault("train_batch_size 64", "8 data-parallel ranks", "32"),),
    ),
    Report(
        "deepspeedai/DeepSpeed#7259",
        "key-value heads",
        "deepspeed",
        QWEN25_3B,
        "1x8xh100-sxm-80gb",
        ds(train_micro_batch_size_per_gpu=1, tensor_parallel={"autotp_size": 4}, zero_optimization={"stage": 1}),
        (Fault("tensor_parallel.autotp_size: 4", "2 key-value heads", "2"),),
    ),
    Report(
        "deepspeedai/DeepSpeed#7259 (3 ranks)",
        "degrees",
        "deepspeed",
        QWEN25_3B,
        "1x8xh100-sxm-80gb",
        ds(train_micro_batch_size_per_gpu=1, tensor_parallel={"autotp_size": 3}, zero_optimization={"stage": 1}),
        (
            Fault("tensor_parallel.autotp_size 3", "8 devices", "4"),
            Fault("tensor_parallel.autotp_size: 3", "16 heads", "4"),
            Fault("tensor_parallel.autotp_size: 3", "width 11,008", "4"),
        ),
    ),
    Report(
        "deepspeedai/DeepSpeed#2721",
        "unknown key",
        "deepspeed",
        gpt2(28, 4096, 16),
        "1x1xa100-sxm-80gb",
        ds(
            train_micro_batch_size_per_gpu=1,
            zero_optimization={"stage": 3, "aio": {"block_size": 262144, "queue_depth": 32}},
        ),
        (Fault("zero_optimization.aio", "is not a key", "aio"),),
    ),
    Report(
        "deepspeedai/DeepSpeedExamples#200 (rule)",
        "unknown key",
        "deepspeed",
        "bert-large",
        "1x8xa100-sxm-80gb",
        ds(
            train_micro_batch_size_per_gpu=8,
            zero_optimization={"stage": 3, "stage3_param_persitence_threshold": 1e5},
            _training_script={"max_length": 512},
        ),
        (
            Fault(
                "zero_optimization.stage3_param_persitence_threshold",
                "is not a key",
                "zero_optimization.stage3_param_persistence_threshold",
            ),
        ),
    ),
    Report(
        "deepspeedai/DeepSpeed#4674",
        "heads",
        "deepspeed",
        dense(60, 6144, 48, 48, 16384, 32000),
        "8x8xa100-sxm-80gb",
        ds(
            train_micro_batch_size_per_gpu=1,
            sequence_parallel_size=64,
            zero_optimization={"stage": 3},
            _training_script={"max_length": 8192},
        ),
        (Fault("sequence_parallel_size: 64", "48 heads", "16"),),
    ),
)
