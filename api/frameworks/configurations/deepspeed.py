"""DeepSpeed: the JSON that ``deepspeed.initialize`` and the Trainer of transformers take."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from api.frameworks.configurations.deepspeed_reading import OPTIMIZERS, SCRIPT, TITLE, VERSION, read_section, unknown
from api.frameworks.configurations.documents import Notes, Section, check_sayable, read_json, shown
from api.frameworks.configurations.training_script import (
    CHECKPOINTING,
    CHECKPOINTING_MODES,
    LENGTHS,
    SCRIPT_SAYS,
    accumulation_steps,
    script_arguments,
    script_reasons,
)
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.frameworks import FSDP2, with_compile
from cost_model.configuration.implementation import AllocatorOptions, DataParallelOptions, Implementation, StateOptions

REUSE_NUMEL = 1e9
"""Number of parameters: the default of ``stage3_max_reuse_distance`` (runtime/zero/config.py)."""

DTYPES = ("bf16", "fp16", "fp32")

_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "tensor_parallel")


def recognises(text: str) -> bool:
    """Return whether a text looks like DeepSpeed's JSON."""
    return text.lstrip().startswith("{") and any(re.search(rf'"{mark}"\s*:', text) for mark in _MARKS)


def read(text: str, devices: int) -> Reading:
    """Return what DeepSpeed's JSON says for a number of devices.

    Raises:
        JobError: the text is no JSON.
    """
    values = read_json(text, "DeepSpeed")
    notes = Notes()
    notes.faults.extend(unknown(values))
    version = re.search(r"DeepSpeed (\d+\.\d+\.\d+)", str(values.get("_comment", "")))
    launch = read_section(Section(values, notes, automatic=True), devices)
    return notes.reading(
        launch,
        version=version[1] if version else None,
    )


def write(launch: Launch, model: str) -> str:
    """Return DeepSpeed's JSON. ``_comment`` names the version; DeepSpeed ignores keys that it does not know.

    Raises:
        JobError: DeepSpeed cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, _reasons(launch))
    document: dict[str, Any] = {"_comment": f"{TITLE}: {model} on {launch.ranks} devices, written by shardplan"}
    script = script_arguments(launch, CHECKPOINTING, LENGTHS[0])
    if script:
        document[SCRIPT] = script
    steps = accumulation_steps(launch)
    if launch.batch is not None:
        document["train_batch_size"] = launch.batch
    document |= {"train_micro_batch_size_per_gpu": launch.micro_batch, "gradient_accumulation_steps": steps}
    if launch.dtype != "fp32":
        document[launch.dtype] = {"enabled": True}
    document["zero_optimization"] = _zero(launch)
    if launch.tensor > 1:
        document["tensor_parallel"] = {"autotp_size": launch.tensor}
    if launch.context > 1:
        document["sequence_parallel_size"] = launch.context
    if launch.expert > 1 or launch.expert_tensor > 1:
        document["expert_parallel"] = {
            "enabled": True,
            "autoep_size": launch.expert,
            "expert_tensor_parallel_size": launch.expert_tensor,
        }
    if launch.optimizer != "adamw":
        document["optimizer"] = _optimizer_section(launch)
    if launch.compiled:
        document["compile"] = {"deepcompile": True}
    return json.dumps(document, indent=2) + "\n"


def _zero(launch: Launch) -> dict[str, Any]:
    if launch.zero == 0:
        return {"stage": 0}
    section: dict[str, Any] = {"stage": launch.zero, "overlap_comm": True, "contiguous_gradients": True}
    if launch.offload:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if launch.zero == 3:
        section["stage3_gather_16bit_weights_on_model_save"] = True
    return section


def _optimizer_section(launch: Launch) -> dict[str, Any]:
    name = next(name for name, optimizer in OPTIMIZERS.items() if optimizer == launch.optimizer)
    return {"type": name, "params": {"adam_w_mode": False} if name == "Adam" else {}}


def _reasons(launch: Launch) -> list[str]:
    width = launch.expert * launch.expert_tensor
    checks = {
        f"replicas of {launch.shard} shards": launch.zero > 0 and launch.replicate > 1,
        "shards of ZeRO stage 0": launch.zero == 0 and launch.shard > 1,
        "tensor with context parallelism": launch.tensor > 1 and launch.context > 1,
        f"experts on {width} of {launch.ranks} devices": launch.ranks % width > 0,
        "experts split with stage 3": launch.zero == 3 and launch.expert_tensor > 1,
        "offloading without ZeRO": launch.offload and launch.zero == 0,
        f"the dtype {launch.dtype}": launch.dtype not in DTYPES,
        f"the optimizer {launch.optimizer}": launch.optimizer not in OPTIMIZERS.values(),
    }
    return [*(reason for reason, holds in checks.items() if holds), *script_reasons(launch)]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how DeepSpeed runs a model of transformers, as far as the price depends on it.

    Parameters and gradients are in 16 bits, master weights and states in 32 (``stage_1_and_2.py``, ``stage3.py``).
    Stages 2 and 3 reduce gradients after each micro-batch; stage 0 reduces all of them after backward.
    """
    is_16_bits = launch.dtype != "fp32"
    result = replace(
        FSDP2,
        data_parallel=DataParallelOptions(
            overlaps=launch.zero > 0,
            reduces_each_micro_batch=launch.zero >= 2,
            reduce_nbytes=2 if is_16_bits else 4,
            root_holds_ends=False,
            max_reuse_numel=REUSE_NUMEL,
        ),
        state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, master_nbytes=4) if is_16_bits else StateOptions(),
        allocator=AllocatorOptions(),
    )
    return with_compile(result) if launch.compiled else result


def _says_batch(launch: Launch) -> tuple[str, ...]:
    steps = accumulation_steps(launch)
    total = () if launch.batch is None else (f"train_batch_size: {launch.batch}",)
    return (*total, f"gradient_accumulation_steps: {steps}")


def _says_dtype(launch: Launch) -> tuple[str, ...]:
    return tuple(f"{name}.enabled: {shown(launch.dtype == name)}" for name in ("bf16", "fp16"))


def _says_optimizer(launch: Launch) -> tuple[str, ...]:
    if launch.optimizer not in OPTIMIZERS.values():
        return ()
    section = _optimizer_section(launch)
    return (f"optimizer.type: {section['type']}", *(f"optimizer.params.{key}: false" for key in section["params"]))


def _says_experts(launch: Launch) -> tuple[str, ...]:
    return (
        f"expert_parallel.enabled: {shown(launch.expert * launch.expert_tensor > 1)}",
        f"expert_parallel.autoep_size: {launch.expert}",
    )


SAYS = {
    "replicate": lambda launch: (),
    "shard": lambda launch: (),
    "zero": flag("zero_optimization.stage: {}", "zero"),
    "tensor": flag("tensor_parallel.autotp_size: {}", "tensor"),
    "context": flag("sequence_parallel_size: {}", "context"),
    "expert": _says_experts,
    "expert_tensor": flag("expert_parallel.expert_tensor_parallel_size: {}", "expert_tensor"),
    "micro_batch": flag("train_micro_batch_size_per_gpu: {}", "micro_batch"),
    "batch": _says_batch,
    "seq": SCRIPT_SAYS["seq"],
    "checkpointing": SCRIPT_SAYS["checkpointing"],
    "dtype": _says_dtype,
    "optimizer": _says_optimizer,
    "compiled": flag("compile.deepcompile: {}", "compiled"),
    "offload": lambda launch: (f"zero_optimization.offload_optimizer.device: {'cpu' if launch.offload else 'none'}",),
}

LIMITS = {
    "dtype": DTYPES,
    "checkpointing": CHECKPOINTING_MODES,
    "optimizer": tuple(OPTIMIZERS.values()),
}

DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed",
    version=VERSION,
    file="ds_config.json",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    implementation=implementation,
    key_value_heads="divided",
    vocabulary="uneven",
    planners=("ddp", "fsdp"),
    limits=LIMITS,
)
