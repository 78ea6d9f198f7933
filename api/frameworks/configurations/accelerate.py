"""accelerate: the YAML that ``accelerate launch --config_file`` takes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml

from api.frameworks.configurations import deepspeed
from api.frameworks.configurations.accelerate_reading import (
    PRECISIONS,
    TITLE,
    VERSION,
    read_document,
    unknown,
    with_prefixes,
)
from api.frameworks.configurations.documents import Notes, Section, check_sayable, read_yaml, shown
from api.frameworks.configurations.training_script import (
    CHECKPOINTING,
    CHECKPOINTING_MODES,
    OPTIMIZERS,
    SCRIPT_SAYS,
    STEPS,
    accumulation_steps,
    script_arguments,
    script_reasons,
)
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.frameworks import FSDP2, with_compile
from cost_model.configuration.implementation import Implementation

_MARKS = re.compile(
    r"^\s*(distributed_type|compute_environment|fsdp_config|parallelism_config|main_training_function)\s*:",
    re.MULTILINE,
)
_ARGUMENT = re.compile(r"^#   ([a-z_]+: [\w.-]+)$", re.MULTILINE)
_SIZE = "parallelism_config.parallelism_config_{}_size"


def recognises(text: str) -> bool:
    """Return whether a text looks like the YAML of ``accelerate config``."""
    return not text.lstrip().startswith("{") and _MARKS.search(text) is not None


def read(text: str, devices: int) -> Reading:
    """Return what accelerate's YAML says for a number of devices.

    Raises:
        JobError: the text is no YAML.
    """
    values = with_prefixes(read_yaml(text, "accelerate"))
    notes = Notes()
    notes.faults.extend(unknown(values))
    launch = read_document(Section(values, notes), Section(_arguments(text), notes), devices)
    version = re.search(r"^#.*\baccelerate (\d+\.\d+\.\d+)", text, re.MULTILINE)
    return notes.reading(
        launch,
        version=version[1] if version else None,
    )


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of the training script that the comments of a written file name."""
    lines = "\n".join(match[1] for match in _ARGUMENT.finditer(text))
    return dict(read_yaml(lines, "arguments of the training script")) if lines else {}


def write(launch: Launch, model: str) -> str:
    """Return accelerate's YAML.

    Raises:
        JobError: accelerate cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, _reasons(launch))
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(launch),
        "num_processes": launch.ranks,
        "mixed_precision": next(name for name, dtype in PRECISIONS.items() if dtype == launch.dtype),
    }
    if _kind(launch) == "FSDP":
        document["fsdp_config"] = _fsdp(launch)
        document["parallelism_config"] = _parallelism(launch)
    elif _kind(launch) == "DEEPSPEED":
        document["deepspeed_config"] = _deepspeed(launch)
    elif launch.tensor > 1:
        document["parallelism_config"] = _parallelism(launch)
    if launch.compiled:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    lines = [
        f"# {TITLE}: {model} on {launch.ranks} devices, written by shardplan.",
        "# For several nodes add num_machines, machine_rank, main_process_ip and main_process_port.",
    ]
    if launch.tensor > 1:
        lines.append(f'# The script loads the model with tp_plan="auto" and tp_size={launch.tensor}.')
    lines.append("# Arguments of the training script, such as TrainingArguments:")
    lines.extend(f"#   {name}: {shown(value)}" for name, value in _script(launch).items())
    return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False)])


def _kind(launch: Launch) -> str:
    if launch.zero == 3:
        return "FSDP"
    if launch.zero:
        return "DEEPSPEED"
    return "MULTI_GPU" if launch.ranks > 1 else "NO"


def _fsdp(launch: Launch) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": launch.reshard_after_forward,
        "fsdp_activation_checkpointing": launch.checkpointing == "full",
        "fsdp_offload_params": launch.offload,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _parallelism(launch: Launch) -> dict[str, int]:
    return {
        "parallelism_config_dp_replicate_size": launch.replicate,
        "parallelism_config_dp_shard_size": launch.shard,
        "parallelism_config_cp_size": launch.context,
        "parallelism_config_tp_size": launch.tensor,
    }


def _deepspeed(launch: Launch) -> dict[str, Any]:
    steps = {} if launch.batch is None else {STEPS: accumulation_steps(launch)}
    offload = "cpu" if launch.offload else "none"
    return {"zero_stage": launch.zero, **steps, "offload_optimizer_device": offload}


def _script(launch: Launch) -> dict[str, int | bool | str]:
    """Return the arguments of the script; FSDP checkpoints by accelerate's own key."""
    arguments = script_arguments(launch)
    if _kind(launch) == "FSDP":
        arguments.pop(CHECKPOINTING, None)
    return arguments


def _reasons(launch: Launch) -> list[str]:
    is_alone = launch.context == launch.tensor == 1
    checks = {
        "ZeRO stage 3 over 1 rank": launch.zero == 3 and launch.shard * launch.context == 1,
        "replicas of 1 shard with tensor or context parallelism": (
            not is_alone and launch.replicate > 1 and launch.shard == 1
        ),
        "shards of ZeRO stage 0": launch.zero == 0 and launch.shard > 1,
        "context parallelism without FSDP": launch.zero != 3 and launch.context > 1,
        f"replicas or tensor parallelism with ZeRO stage {launch.zero}": (
            launch.zero in (1, 2) and (launch.replicate > 1 or not is_alone)
        ),
        "offloading without ZeRO": launch.offload and launch.zero == 0,
        "reshard_after_forward false without FSDP": launch.zero != 3 and not launch.reshard_after_forward,
        f"the dtype {launch.dtype}": launch.dtype not in PRECISIONS.values(),
        f"the optimizer {launch.optimizer}": launch.optimizer not in OPTIMIZERS.values(),
    }
    return [*(reason for reason, holds in checks.items() if holds), *script_reasons(launch)]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how accelerate runs a model of transformers, as far as the price depends on it.

    FSDP2 with mixed precision holds parameters and states in float32, and gathers and reduces in 16 bits
    (``fsdp2_prepare_model`` in utils/fsdp_utils.py, ``set_mixed_precision`` in utils/dataclasses.py). The embedding is
    an FSDP group of its own, as are the final norm and the head together (``fsdp2_prepare_model``). Gradients are
    reduced with the last micro-batch (``no_sync`` in accelerator.py). Logits are all-gathered over tensor parallelism
    and upcast to float32 in transformers' loss. ZeRO stages 1 and 2 are DeepSpeed's.
    """
    if launch.zero in (1, 2):
        return deepspeed.implementation(launch, arch)
    is_reduced_in_16_bits = launch.zero == 3 and launch.dtype != "fp32"
    result = replace(
        FSDP2,
        data_parallel=replace(
            FSDP2.data_parallel,
            reduce_nbytes=2 if is_reduced_in_16_bits else 4,
            reshard_after_forward=launch.reshard_after_forward,
            root_holds_ends=False,
            defers_reduction=launch.zero == 3,
        ),
        loss=replace(FSDP2.loss, vocabulary_parallel=False),
    )
    return with_compile(result) if launch.compiled else result


def _says_zero(launch: Launch) -> tuple[str, ...]:
    kind = _kind(launch)
    more = {
        "FSDP": ("fsdp_config.fsdp_version: 2",),
        "DEEPSPEED": (f"deepspeed_config.zero_stage: {launch.zero}",),
    }
    return (f"distributed_type: {kind}", *more.get(kind, ()))


def _says_replicate(launch: Launch) -> tuple[str, ...]:
    return (f"{_SIZE.format('dp_replicate')}: {launch.replicate}",) if _kind(launch) == "FSDP" else ()


def _says_shard(launch: Launch) -> tuple[str, ...]:
    return (f"{_SIZE.format('dp_shard')}: {launch.shard}",) if _kind(launch) == "FSDP" else ()


def _says_offload(launch: Launch) -> tuple[str, ...]:
    if _kind(launch) == "FSDP":
        return (f"fsdp_config.fsdp_offload_params: {shown(launch.offload)}",)
    return (f"deepspeed_config.offload_optimizer_device: {'cpu' if launch.offload else 'none'}",)


def _says_dtype(launch: Launch) -> tuple[str, ...]:
    name = next((name for name, dtype in PRECISIONS.items() if dtype == launch.dtype), launch.dtype)
    return (f"mixed_precision: {shown(name) if name != 'no' else repr(name)}",)


def _says_checkpointing(launch: Launch) -> tuple[str, ...]:
    if _kind(launch) != "FSDP":
        return SCRIPT_SAYS["checkpointing"](launch)
    return (f"fsdp_config.fsdp_activation_checkpointing: {shown(launch.checkpointing == 'full')}",)


def _says_compiled(launch: Launch) -> tuple[str, ...]:
    return (f"dynamo_config.dynamo_backend: {'INDUCTOR' if launch.compiled else 'NO'}",)


SAYS = {
    "replicate": _says_replicate,
    "shard": _says_shard,
    "zero": _says_zero,
    "tensor": flag(_SIZE.format("tp") + ": {}", "tensor"),
    "context": flag(_SIZE.format("cp") + ": {}", "context"),
    "micro_batch": SCRIPT_SAYS["micro_batch"],
    "batch": SCRIPT_SAYS["batch"],
    "seq": SCRIPT_SAYS["seq"],
    "checkpointing": _says_checkpointing,
    "optimizer": SCRIPT_SAYS["optimizer"],
    "dtype": _says_dtype,
    "compiled": _says_compiled,
    "reshard_after_forward": flag("fsdp_config.fsdp_reshard_after_forward: {}", "reshard_after_forward"),
    "offload": _says_offload,
}

LIMITS = {
    "dtype": tuple(PRECISIONS.values()),
    "checkpointing": CHECKPOINTING_MODES,
    "optimizer": tuple(dict.fromkeys(OPTIMIZERS.values())),
}

ACCELERATE = Framework(
    name="accelerate",
    title="accelerate",
    version=VERSION,
    file="accelerate.yaml",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    implementation=implementation,
    key_value_heads="divided",
    vocabulary="uneven",
    planners=("ddp", "fsdp", "hsdp"),
    limits=LIMITS,
)
