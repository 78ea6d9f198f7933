"""Reports on vLLM, as in `support.reported_faults`."""

from __future__ import annotations

from support.reported_faults import Fault, Report, dense, gpt2

LLAMA_30B = dense(60, 6656, 52, 52, 17920, 32000)
LLAMA_7B = dense(32, 4096, 32, 32, 11008, 32000)
PHI3_MEDIUM = dense(40, 5120, 40, 10, 17920, 32064)


TP = "--tensor-parallel-size"
VLLM = (
    Report(
        "vllm-project/vllm#2652",
        "heads",
        "vllm",
        LLAMA_30B,
        "1x8xa100-sxm-80gb",
        "vllm serve WizardLM-33B-V1.0-Uncensored --tensor-parallel-size 8 --max-model-len 2048",
        (Fault(f"{TP} 8", "52 heads", "4"),),
    ),
    Report(
        "vllm-project/vllm#11797",
        "heads",
        "vllm",
        dense(28, 3584, 28, 4, 18944, 152064),
        "1x8xh100-sxm-80gb",
        "vllm serve Qwen/Qwen2-7B -tp 8 --max-model-len 8192",
        (Fault(f"{TP} 8", "28 heads", "4"),),
    ),
    Report(
        "vllm-project/vllm#1705",
        "heads",
        "vllm",
        gpt2(48, 1600, 25),
        "1x2xa100-sxm-80gb",
        "vllm serve gpt2-xl --tensor-parallel-size 2 --max-model-len 1024",
        (Fault(f"{TP} 2", "25 heads", "1"),),
    ),
    Report(
        "vllm-project/vllm#4232",
        "heads",
        "vllm",
        dense(64, 5120, 40, 8, 27392, 152064),
        "1x6xa100-sxm-80gb",
        "vllm serve Qwen/Qwen1.5-32B --tensor-parallel-size 6 --max-model-len 4096",
        (Fault(f"{TP} 6", "40 heads", "2"), Fault(f"{TP} 6", "width 27,392", "2")),
    ),
    Report(
        "vllm-project/vllm#5951",
        "key-value heads",
        "vllm",
        PHI3_MEDIUM,
        "1x4xa100-sxm-80gb",
        "vllm serve microsoft/Phi-3-medium-4k-instruct --tensor-parallel-size 4 --max-model-len 4096 --dtype float16",
        (Fault(f"{TP} 4", "10 key-value heads", "2"),),
    ),
    Report(
        "vllm-project/vllm#1399",
        "vocabulary",
        "vllm",
        PHI3_MEDIUM,
        "1x5xa100-sxm-80gb",
        "vllm serve microsoft/Phi-3-medium-4k-instruct --tensor-parallel-size 5 --max-model-len 4096",
        (Fault(f"{TP} 5", "vocabulary of 32,064", "1"),),
    ),
    Report(
        "vllm-project/vllm#31474",
        "vocabulary",
        "vllm",
        dense(92, 5120, 96, 8, 12288, 151552),
        "1x6xh100-sxm-80gb",
        "vllm serve zai-org/GLM-4.7-FP8 --tensor-parallel-size 6 --max-model-len 8192",
        (Fault(f"{TP} 6", "8 key-value heads", "2"), Fault(f"{TP} 6", "vocabulary of 151,552", "2")),
    ),
    Report(
        "vllm-project/vllm#52435",
        "experts",
        "vllm",
        "deepseek-v3",
        "1x3xh200-sxm-141gb",
        "vllm serve deepseek --data-parallel-size 3 --enable-expert-parallel --max-model-len 8192 --block-size 256",
        (Fault("--enable-expert-parallel", "256 experts"),),
    ),
    Report(
        "vllm-project/vllm#18538",
        "unknown key",
        "vllm",
        "qwen3-8b",
        "1x1xh100-sxm-80gb",
        "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --enable-reasoning --reasoning-parser deepseek_r1",
        (Fault("--enable-reasoning", "is not a flag"),),
    ),
    Report(
        "vllm-project/vllm#596",
        "degrees",
        "vllm",
        dense(80, 8192, 64, 8, 28672, 32000),
        "1x8xa100-sxm-80gb",
        "vllm serve meta-llama/Llama-2-70b-hf --tensor-parallel-size 5 --max-model-len 4096",
        (
            Fault(f"{TP} 5", "8 devices", f"{TP} 8"),
            Fault(f"{TP} 5", "64 heads", "4"),
            Fault(f"{TP} 5", "width 28,672", "4"),
        ),
    ),
    Report(
        "vllm-project/vllm#15217",
        "degrees",
        "vllm",
        "deepseek-v3",
        "1x1xh100-sxm-80gb",
        "vllm serve DeepSeek-V3 --tensor-parallel-size 1 --pipeline-parallel-size 2 --max-model-len 4096",
        (Fault("--pipeline-parallel-size 2", "1 device", "1"),),
    ),
    Report(
        "vllm-project/vllm#6601",
        "degrees",
        "vllm",
        LLAMA_7B,
        "1x3xa100-sxm-80gb",
        "vllm serve model --pipeline-parallel-size 3 --tensor_parallel_size 3 --max-model-len 4096",
        (
            Fault(f"{TP} 3 x --pipeline-parallel-size 3", "3 devices", f"{TP} 1"),
            Fault(f"{TP} 3", "32 heads", "1"),
            Fault(f"{TP} 3", "width 11,008", "1"),
            Fault(f"{TP} 3", "vocabulary of 32,000", "1"),
        ),
    ),
)
