"""Megatron-LM: the arguments of its ``pretrain_gpt.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from api.frameworks.configurations.documents import Notes, Section, check_sayable, closest, known_keys
from api.frameworks.configurations.flags import TORCHRUN_FLAG, read_flags
from api.frameworks.configurations.megatron_reader import (
    OPTIMIZERS,
    STRATEGIES,
    Settings,
    launch_of,
    sizes_of,
    stages_of,
)
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.frameworks import MEGATRON
from cost_model.configuration.implementation import Implementation
from planner.errors import JobError

VERSION = "0.16.1"
TITLE = f"Megatron-LM core_v{VERSION}"

REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-granularity full",
    "--warmup": "--lr-warmup-fraction",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--activations-checkpoint-granularity": "--recompute-granularity",
}
"""Argument that Megatron-LM refuses now -> the one to take instead."""

SWITCH = re.compile(
    r"--(sequence-parallel|use-distributed-optimizer|use-megatron-fsdp|use-torch-fsdp2|bf16|fp16|tp-comm-overlap"
    r"|overlap-\w+-\w+|recompute-activations|optimizer-cpu-offload|grad-reduce-in-bf16|account-for-[\w-]+"
    r"|torch-fsdp2-no-reshard-after-forward)"
)
"""An argument without a value."""

DEVICES_PER_NODE = 8


def key_of(name: str) -> str:
    """Return the argument that says a setting."""
    return f"--{name.replace('_', '-')}"


def recognises(text: str) -> bool:
    """Return whether a text has arguments of Megatron-LM."""
    return re.search(r"pretrain_gpt\.py|--(tensor|pipeline|expert)-model-parallel-size\b", text) is not None


def read(text: str, devices: int) -> Reading:
    """Return what a script or a list of arguments says for a number of devices.

    Raises:
        JobError: the text has no argument.
    """
    given = {
        key: ("true" if value is None or SWITCH.fullmatch(key) else value)
        for key, value in read_flags(text)
        if key.startswith("--") and not TORCHRUN_FLAG.fullmatch(key)
    }
    if not given:
        raise JobError("the text has no argument of Megatron-LM.", what_to_do="Give its script, or its arguments.")
    notes = Notes()
    known = known_keys("megatron")
    for key in given:
        if key in REPLACED:
            notes.faults.append(f"{key} is no longer an argument: {REPLACED[key]} would do")
        elif key not in known:
            notes.faults.append(f"{key} is not an argument of Megatron-LM{closest(key, known)}")
    settings = Settings(Section(given, notes), key_of)
    launch = launch_of(settings, devices)
    if settings.on("tp_comm_overlap"):
        notes.unpriced.append("--tp-comm-overlap: collectives of tensor parallelism are priced as exposed")
    version = re.search(r"Megatron-LM (?:core_)?v?(\d+\.\d+\.\d+)", text)
    return notes.reading(
        launch,
        sizes=sizes_of(settings),
        stages=stages_of(settings),
        version=version[1] if version else None,
    )


def write(launch: Launch, model: str) -> str:
    """Return a script that runs ``pretrain_gpt.py`` with the arguments of a launch, and $MODEL_ARGS.

    Raises:
        JobError: Megatron-LM cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, reasons(launch))
    nodes = max(1, launch.ranks // DEVICES_PER_NODE)
    # FSDP does not run with one connection; tensor and context parallelism before Blackwell need one.
    connections = 8 if launch.zero > 1 else 1
    flags: dict[str, None] = {}
    for say in SAYS.values():
        flags.update(dict.fromkeys(say(launch)))
    lines = [
        "#!/bin/bash",
        f"# {TITLE}: {model} on {launch.ranks} devices, written by shardplan.",
        f"# Set MODEL_ARGS to the arguments of {model} (--num-layers, --hidden-size, ...), DATA_ARGS to those of the",
        "# data and the tokenizer, and TRAINING_ARGS to those of the learning rate, checkpoints and logs.",
        f"export CUDA_DEVICE_MAX_CONNECTIONS={connections}",
        f"NNODES=${{NNODES:-{nodes}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{launch.ranks // nodes}}}",
        "torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE --node-rank ${NODE_RANK:-0} \\",
        "    --master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-6000} \\",
        "    pretrain_gpt.py $MODEL_ARGS $DATA_ARGS $TRAINING_ARGS \\",
        *(f"    {text} \\" for text in flags if text.startswith("--")),
    ]
    lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def reasons(launch: Launch) -> list[str]:
    """Return why Megatron cannot say a launch, as clauses."""
    together = launch.data * launch.micro_batch
    checks = {
        "shards of ZeRO stage 0": launch.zero == 0 and launch.shard > 1,
        f"a batch of {launch.global_batch}, no multiple of {together}": launch.global_batch % together > 0,
        "sequence parallelism without tensor parallelism": launch.sequence_parallel and launch.tensor == 1,
        "virtual stages without a pipeline": launch.virtual_stages > 1 and launch.pipeline == 1,
        f"the checkpointing {launch.checkpointing}": launch.checkpointing == "selective",
        f"the optimizer {launch.optimizer}": launch.optimizer not in OPTIMIZERS.values(),
    }
    return [reason for reason, holds in checks.items() if holds]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how Megatron-LM runs a launch by its defaults, as far as the price depends on it.

    Gradients are accumulated and reduced in 32 bits unless --grad-reduce-in-bf16 (arguments.py, validate_args).
    Collectives of tensor parallelism are exposed unless --tp-comm-overlap. Before Hopper, attention is
    FlashAttention-2.
    """
    is_16_bits = launch.dtype != "fp32"
    kernels = MEGATRON.kernels
    return replace(
        MEGATRON,
        kernels=replace(kernels, attention="cudnn" if arch.startswith(("sm9", "sm10", "sm12")) else "flash2"),
        tensor_parallel=replace(MEGATRON.tensor_parallel, async_tp=False),
        data_parallel=replace(MEGATRON.data_parallel, reduce_nbytes=4, root_holds_ends=False),
        state=replace(
            MEGATRON.state,
            parameter_nbytes=2 if is_16_bits else 4,
            gradient_nbytes=4,
            master_nbytes=4 if is_16_bits else 0,
        ),
    )


def nothing(launch: Launch) -> tuple[str, ...]:
    """Return no text: the value follows from others."""
    return ()


def _says_zero(launch: Launch) -> tuple[str, ...]:
    if launch.zero == 0:
        return ("--overlap-grad-reduce",)
    overlap = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    if launch.zero == 1:
        return overlap
    strategy = next(name for name, zero in STRATEGIES.items() if zero == launch.zero)
    fsdp = ("--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}", "--ckpt-format fsdp_dtensor")
    return (*overlap, *fsdp, "--no-gradient-accumulation-fusion")


def _says_replicas(launch: Launch) -> tuple[str, ...]:
    """Return how replicas of shards are said; without shards, the data-parallel ranks follow from the devices."""
    return (f"--num-distributed-optimizer-instances {launch.replicate}",) if launch.zero else ()


def _says_checkpointing(launch: Launch) -> tuple[str, ...]:
    full = ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
    texts = {"full": full, "attention": ("--recompute-granularity selective",)}
    return texts.get(launch.checkpointing, ("no --recompute-granularity",))


def _says_dtype(launch: Launch) -> tuple[str, ...]:
    texts = {
        "fp16": ("--fp16",),
        "fp8": ("--bf16", "--fp8-format hybrid"),
        "fp4": ("--bf16", "--fp4-format e2m1"),
        "fp32": ("neither --bf16 nor --fp16",),
    }
    return texts.get(launch.dtype, ("--bf16",))


def _says_optimizer(launch: Launch) -> tuple[str, ...]:
    return (f"--optimizer {next(name for name, own in OPTIMIZERS.items() if own == launch.optimizer)}",)


def _says_virtual(launch: Launch) -> tuple[str, ...]:
    if launch.virtual_stages == 1:
        return ("no --num-virtual-stages-per-pipeline-rank",)
    return (f"--num-virtual-stages-per-pipeline-rank {launch.virtual_stages}",)


def _says_batch(launch: Launch) -> tuple[str, ...]:
    return (f"--global-batch-size {launch.batch}" if launch.batch is not None else "no --global-batch-size",)


SAYS: Mapping[str, Callable[[Launch], tuple[str, ...]]] = {
    "tensor": flag("--tensor-model-parallel-size {}", "tensor"),
    "sequence_parallel": lambda launch: (
        "--sequence-parallel" if launch.sequence_parallel else "no --sequence-parallel",
    ),
    "pipeline": flag("--pipeline-model-parallel-size {}", "pipeline"),
    "virtual_stages": _says_virtual,
    "context": flag("--context-parallel-size {}", "context"),
    "expert": flag("--expert-model-parallel-size {}", "expert"),
    "expert_tensor": flag("--expert-tensor-parallel-size {}", "expert_tensor"),
    "zero": _says_zero,
    "replicate": _says_replicas,
    "shard": nothing,
    "micro_batch": flag("--micro-batch-size {}", "micro_batch"),
    "batch": _says_batch,
    "seq": lambda launch: (f"--seq-length {launch.seq}" if launch.seq is not None else "no --seq-length",),
    "checkpointing": _says_checkpointing,
    "dtype": _says_dtype,
    "optimizer": _says_optimizer,
    "compiled": nothing,
    "offload": lambda launch: (
        ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
        if launch.offload
        else ("no --optimizer-cpu-offload",)
    ),
}

MEGATRON_LM = Framework(
    name="megatron",
    title="Megatron-LM",
    version=VERSION,
    file="megatron.sh",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    limits={"checkpointing": ("none", "attention", "full"), "compiled": (True,)},
    implementation=implementation,
    key_value_heads="copied",
    vocabulary="padded",
    experts_need_sequence_parallel=True,
    planners=("ddp", "fsdp", "hsdp", "fsdp-tp", "tp"),
)
"""Megatron-LM with Megatron-Core's models."""
