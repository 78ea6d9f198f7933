"""Configurations with four faults and more: what several reports got wrong, in one file."""

from __future__ import annotations

from support.reported_faults import QWEN25_3B, Fault, Report, ds, gpt2
from support.reported_faults_hugging_face import config
from support.reported_faults_megatron import CP, PP, TP

TOGETHER = (
    Report(
        "deepspeedai/Megatron-DeepSpeed#474",
        "unknown keys",
        "megatron",
        gpt2(24, 1024, 16),
        "1x4xa100-sxm-80gb",
        f"""pretrain_gpt.py {TP} 2 {PP} 2 --distributed-backend nccl \\
            --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \\
            --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --fp16 \\
            --data-impl mmap --split 949,50,1 --checkpoint-activations \\
            --deepspeed --deepspeed_config ds_config_z3.config --zero-stage 3 --deepspeed-activation-checkpointing""",
        (
            Fault("--data-impl", "is not an argument"),
            Fault("--checkpoint-activations", "no longer", "--recompute-granularity full"),
            Fault("--deepspeed is", "not an argument"),
            Fault("--deepspeed_config is", "not an argument"),
            Fault("--zero-stage", "is not an argument"),
            Fault("--deepspeed-activation-checkpointing", "is not an argument"),
        ),
    ),
    Report(
        "NVIDIA/Megatron-LM#5768 (rule)",
        "troubleshooting",
        "megatron",
        gpt2(24, 1600, 25),
        "2x8xa100-sxm-80gb",
        f"pretrain_gpt.py {TP} 2 {CP} 2 --expert-model-parallel-size 8 --num-layers 24 --seq-length 1022 "
        "--num-layers-per-virtual-pipeline-stage 2 --micro-batch-size 4 --global-batch-size 24 --bf16 --fp16",
        (
            Fault(f"{TP} 2", "25 heads", "1"),
            Fault(f"{CP} 2", "1,022 tokens", "1"),
            Fault("--expert-model-parallel-size 8", "--num-experts"),
            Fault("--expert-model-parallel-size 8", "the model has none", "1"),
            Fault("--num-layers-per-virtual-pipeline-stage 2", PP, "2"),
            Fault("--global-batch-size 24", "--micro-batch-size 4 x 4 data-parallel ranks", "32"),
            Fault("--fp16", "--bf16"),
        ),
    ),
    Report(
        "pytorch/torchtitan#27 #592 #640 #932",
        "torchtitan",
        "torchtitan",
        "llama-3.1-8b",
        "4x8xh100-sxm-80gb",
        "[training]\nlocal_batch_size = 3\nglobal_batch_size = 16\nseq_len = 8194\nenable_sequence_parallel = true\n"
        "[parallelism]\ndata_parallel_shard_degree = 8\ncontext_parallel_degree = 2\ntensor_parallel_degree = 16\n",
        (
            Fault("training.enable_sequence_parallel", "is not a key", "parallelism.enable_sequence_parallel"),
            Fault("parallelism.data_parallel_shard_degree 8", "32 devices", "-1"),
            Fault("training.global_batch_size 16", "training.local_batch_size 3", "15"),
            Fault("parallelism.tensor_parallel_degree 16", "8 key-value heads", "8"),
            Fault("parallelism.context_parallel_degree 2", "8,194 tokens", "1"),
        ),
    ),
    Report(
        "Roblox/FAI-RL#72, deepspeedai/DeepSpeed#7259 #2721, DeepSpeedExamples#200",
        "DeepSpeed",
        "deepspeed",
        QWEN25_3B,
        "1x8xh100-sxm-80gb",
        ds(
            train_batch_size=16,
            train_micro_batch_size_per_gpu=1,
            gradient_accumulation_steps=4,
            zero_optimization={
                "stage": 2,
                "stage3_param_persitence_threshold": 1e5,
                "aio": {"block_size": 262144},
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
            },
            fp16={"enabled": True},
            tensor_parallel={"autotp_size": 4},
        ),
        (
            Fault("train_batch_size 16", "2 data-parallel ranks", "8"),
            Fault("zero_optimization.stage3_param_persitence_threshold", "is not a key"),
            Fault("zero_optimization.aio", "is not a key"),
            Fault("zero_optimization.offload_param.device nvme", "needs", "zero_optimization.stage 3"),
            Fault("fp16.enabled and bf16.enabled", "both true"),
            Fault("tensor_parallel.autotp_size: 4", "2 key-value heads", "2"),
        ),
    ),
    Report(
        "huggingface/accelerate#3804, zai-org/CogVideo#502",
        "accelerate",
        "accelerate",
        "qwen3-8b",
        "1x8xh100-sxm-80gb",
        config("FSDP", 1, {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "cp": 1}, lr_scheduler="constant"),
        (
            Fault("lr_scheduler", "is not a key"),
            Fault("num_processes 1", "8 devices", "8"),
            Fault("parallelism_config_dp_replicate_size 2", "8 of the cluster", "4"),
            Fault("parallelism_config_dp_shard_size 1", "FSDP", "2"),
        ),
        seq=4096,
    ),
)
