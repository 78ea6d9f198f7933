"""Reports on Megatron-LM and Megatron-Bridge, as in `support.reported_faults`."""

from __future__ import annotations

from support.reported_faults import Fault, Report, dense, gpt2, sparse

LLAMA_70B_MHA = dense(80, 8192, 64, 64, 22016, 32000)
QWEN3_RERANKER_4B = dense(36, 2560, 32, 8, 9728, 151669)
QWEN35_35B = sparse(40, 2048, 16, 2, 256, 512, 248320)
QWEN35_397B = sparse(60, 4096, 32, 2, 512, 1024, 248320)

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
BATCH = "--micro-batch-size 1 --global-batch-size 16 --bf16"
MEGATRON = (
    Report(
        "NVIDIA/Megatron-LM#468",
        "layers by virtual stages",
        "megatron",
        LLAMA_70B_MHA,
        "2x8xa100-sxm-80gb",
        f"pretrain_gpt.py {PP} 16 --num-layers 80 --num-layers-per-virtual-pipeline-stage 2 --seq-length 4096 {BATCH}",
        (Fault("--num-layers-per-virtual-pipeline-stage 2", "5 layers", "5"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#381",
        "layers by stages",
        "megatron",
        gpt2(7, 1024, 16),
        "1x2xa100-sxm-80gb",
        f"pretrain_gpt.py {PP} 2 --num-layers 7 --seq-length 1024 {BATCH}",
        (Fault(f"{PP} 2", "7 layers", "1"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#1304",
        "layers by stages",
        "megatron",
        gpt2(30, 1024, 16),
        "1x4xa100-sxm-80gb",
        f"pretrain_gpt.py {PP} 4 --num-layers 30 --seq-length 1024 {BATCH}",
        (Fault(f"{PP} 4", "30 layers", "2"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#1669",
        "sequence by context ranks",
        "megatron",
        gpt2(24, 1024, 16),
        "1x2xh100-sxm-80gb",
        f"pretrain_gpt.py {CP} 2 --seq-length 7 {BATCH}",
        (Fault(f"{CP} 2", "7 tokens", "1"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#743",
        "sequence by tensor ranks",
        "megatron",
        "llama-3.1-8b",
        "1x8xa100-sxm-80gb",
        f"pretrain_gpt.py {TP} 4 --sequence-parallel --seq-length 50341 {BATCH}",
        (Fault(f"{TP} 4", "50,341 tokens", "1"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#394",
        "unknown key",
        "megatron",
        "llama-3.1-8b",
        "1x8xa100-sxm-80gb",
        f"pretrain_gpt.py {TP} 8 --seq-length 2048 {BATCH} --activations-checkpoint-method uniform",
        (Fault("--activations-checkpoint-method", "no longer an argument", "--recompute-method"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#1455 (rule)",
        "ZeRO-3 with a pipeline",
        "megatron",
        dense(16, 2048, 32, 32, 8192, 128256),
        "1x2xa100-sxm-80gb",
        f"pretrain_gpt.py {PP} 2 --use-torch-fsdp2 --num-layers 16 --hidden-size 2048 --seq-length 8192 {BATCH}",
        (Fault("--use-torch-fsdp2", PP),),
    ),
    Report(
        "NVIDIA/Megatron-LM#845",
        "sizes of another model",
        "megatron",
        "llama-3.1-8b",
        "1x2xa100-sxm-80gb",
        "pretrain_gpt.py --num-layers 2 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
        "--num-query-groups 8 --group-query-attention --vocab-size 128000 --seq-length 512 "
        "--micro-batch-size 1 --global-batch-size 2 --fp16",
        (Fault("--num-layers 2", "32"), Fault("--vocab-size 128,000", "128,256")),
    ),
    Report(
        "NVIDIA/Megatron-LM#823 (rule)",
        "degrees",
        "megatron",
        "llama-3.1-8b",
        "1x8xa100-sxm-80gb",
        f"pretrain_gpt.py {TP} 4 {PP} 4 --seq-length 2048 {BATCH}",
        (Fault(f"{TP} 4 x {PP} 4", "8 devices", "2"),),
    ),
    Report(
        "NVIDIA/Megatron-LM#5768 (rule, 3 ranks)",
        "degrees",
        "megatron",
        gpt2(24, 1600, 25),
        "2x8xa100-sxm-80gb",
        f"pretrain_gpt.py {TP} 3 {CP} 2 --num-layers 24 --seq-length 1022 --micro-batch-size 1 --bf16",
        (
            Fault(f"{TP} 3 x {CP} 2", "16 devices", "8"),
            Fault(f"{TP} 3", "25 heads", "1"),
            Fault(f"{TP} 3", "width 6,400", "4"),
            Fault(f"{CP} 2", "1,022 tokens", "1"),
        ),
    ),
)

BRIDGE_TP, BRIDGE_PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
EP = "model.expert_model_parallel_size"
BRIDGE = (
    Report(
        "NVIDIA/cloudai#415",
        "batch",
        "megatron-bridge",
        "llama-3.1-8b",
        "2x8xh100-sxm-80gb",
        f"{BRIDGE_TP}=4 {BRIDGE_PP}=1 model.context_parallel_size=1 model.seq_length=8192 "
        "train.micro_batch_size=5 train.global_batch_size=64",
        (Fault("train.global_batch_size 64", "train.micro_batch_size 5 x 4 data-parallel ranks", "80"),),
    ),
    Report(
        "NVIDIA-NeMo/Speech#11480",
        "degrees",
        "megatron-bridge",
        "llama-3.1-8b",
        "1x1xh100-sxm-80gb",
        "run_recipe.py --recipe llama3_8b_pretrain_config",
        (Fault("model.context_parallel_size 2", "1 device", "1"),),
    ),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#5884",
        "layers by stages",
        "megatron-bridge",
        QWEN35_397B,
        "8x8xh100-sxm-80gb",
        f"{BRIDGE_TP}=2 {BRIDGE_PP}=8 {EP}=4 model.expert_tensor_parallel_size=1 model.sequence_parallel=true "
        "model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=64",
        (Fault(f"{BRIDGE_PP}=8", "60 layers", "4"),),
    ),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#5754",
        "experts",
        "megatron-bridge",
        QWEN35_35B,
        "1x8xh100-sxm-80gb",
        f"{BRIDGE_TP}=4 {BRIDGE_PP}=2 {EP}=4 model.sequence_parallel=true model.seq_length=4096 "
        "train.micro_batch_size=1 train.global_batch_size=8",
        (Fault(f"{EP} 4 x model.expert_tensor_parallel_size 4", "4 ranks", "1"),),
    ),
    Report(
        "NVIDIA-NeMo/Megatron-Bridge#1331",
        "vocabulary",
        "megatron-bridge",
        QWEN3_RERANKER_4B,
        "1x4xh100-sxm-80gb",
        f"{BRIDGE_TP}=4 model.seq_length=4096 train.micro_batch_size=1 train.global_batch_size=8",
        (Fault(f"{BRIDGE_TP}=4", "vocabulary of 151,669", "1"),),
    ),
    Report(
        "NVIDIA/NeMo-Framework-Launcher#309 (rule)",
        "sequence parallelism of experts",
        "megatron-bridge",
        "mixtral-8x7b",
        "2x8xh100-sxm-80gb",
        f"{BRIDGE_TP}=2 {EP}=4 model.expert_tensor_parallel_size=1 model.seq_length=4096 "
        "train.micro_batch_size=1 train.global_batch_size=16",
        (Fault(f"{BRIDGE_TP}=2", "model.sequence_parallel"),),
    ),
    Report(
        "THUDM/slime#1486 (rule)",
        "unknown key",
        "megatron-bridge",
        "llama-3.1-8b",
        "1x8xh100-sxm-80gb",
        f"{BRIDGE_PP}=2 model.decoder_first_pipeline_num_layers=15 model.seq_length=4096 "
        "train.micro_batch_size=1 train.global_batch_size=8",
        (Fault("model.decoder_first_pipeline_num_layers", "is not a key", "model.num_layers_in_first_pipeline_stage"),),
    ),
)
