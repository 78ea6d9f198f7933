"""Megatron-Bridge: overrides of a recipe, on the command line of run_recipe.py, as Python assignments, or as YAML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from api.frameworks.configurations.documents import Notes, Section, check_sayable, closest, known_keys, read_yaml
from api.frameworks.configurations.megatron import DEVICES_PER_NODE, nothing, reasons
from api.frameworks.configurations.megatron import implementation as megatron_implementation
from api.frameworks.configurations.megatron_reader import (
    OPTIMIZERS,
    STRATEGIES,
    Settings,
    launch_of,
    sizes_of,
    stages_of,
)
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.implementation import Implementation
from cost_model.configuration.parallelism import TrainingDtype
from planner.errors import JobError

VERSION = "0.3.1"
TITLE = f"Megatron-Bridge {VERSION}"

KEYS = {
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "rampup_batch_size": "train.rampup_batch_size",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "num_experts": "model.num_moe_experts",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "data_parallel_sharding_strategy": "ddp.data_parallel_sharding_strategy",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "fsdp_double_buffer": "ddp.fsdp_double_buffer",
    "nccl_ub": "ddp.nccl_ub",
    "use_torch_fsdp2": "dist.use_torch_fsdp2",
    "ckpt_format": "checkpoint.ckpt_format",
    "optimizer": "optimizer.optimizer",
    "optimizer_cpu_offload": "optimizer.optimizer_cpu_offload",
    "use_precision_aware_optimizer": "optimizer.use_precision_aware_optimizer",
    "tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "bf16": "mixed_precision.bf16",
    "fp16": "mixed_precision.fp16",
    "fp8_format": "mixed_precision.fp8",
    "fp4_format": "mixed_precision.fp4",
    "fp8_param_gather": "mixed_precision.fp8_param_gather",
    "fp4_param_gather": "mixed_precision.fp4_param_gather",
}
"""Setting of Megatron-Core -> the key that says it; "model." and the setting's name where it is not here."""

SECTIONS = (
    "model|train|validation|ddp|dist|optimizer|scheduler|comm_overlap|mixed_precision|checkpoint|logger|dataset|"
    "tokenizer|profiling|rng|peft|ft|straggler|nvrx_straggler|inprocess_restart|rerun_state_machine|tensor_inspect"
)

PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}
"""Dtype -> ``mixed_precision``."""

RENAMED = {
    "model.decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "model.decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
}
"""Megatron-LM's name of a setting -> Bridge's, where they differ."""

_VALUE = r"(\"[^\"\n]*\"|'[^'\n]*'|\[[^\]]*\]|[^\s\\,;()]+(?:\(\))?)"
_ASSIGNED = re.compile(rf"^\s*(?:cfg|config|recipe)\.([a-z]\w*(?:\.\w+)*)\s*=(?!=)\s*{_VALUE}", re.MULTILINE)
_OVERRIDE = re.compile(rf"(?<![\w.$/-])\+{{0,2}}((?:[a-z]\w*\.\w[\w.]*)|mixed_precision)=(?!=){_VALUE}")
_SPACED = re.compile(rf"^\s*((?:{SECTIONS})\.\w[\w.]*|mixed_precision)\s+=\s+{_VALUE}", re.MULTILINE)
_RECIPE = re.compile(r"(?:--recipe(?:_name)?[ =]+|def )(\w+_config)\b")
_YAML = re.compile(r"^(model|train|ddp|dist|mixed_precision)\s*:\s*(#.*)?$", re.MULTILINE)


def key_of(name: str) -> str:
    """Return the key that says a setting."""
    return KEYS.get(name, f"model.{name}")


def recognises(text: str) -> bool:
    """Return whether a text has overrides of Megatron-Bridge."""
    if re.search(r"\b(model|train|ddp)\.\w+\s*=", text):
        return True
    return re.search(r"^model\s*:", text, re.MULTILINE) is not None and "model_parallel_size" in text


def read(text: str, devices: int) -> Reading:
    """Return what overrides say for a number of devices, on top of the recipe that the text names.

    Raises:
        JobError: the text has no override, or is no valid YAML.
    """
    notes = Notes()
    recipe = _RECIPE.search(text)
    given = {key: value for key, value in _overrides(text) if value not in ("None", "null", None)}
    cleared = {key for key, value in _overrides(text) if value in ("None", "null", None)} - set(given)
    if not given and recipe is None:
        raise JobError("the text has no override of Megatron-Bridge.", what_to_do="Give a recipe, or its overrides.")
    known = known_keys("bridge")
    for key in given:
        if key not in known and f"{key.partition('.')[0]}.*" not in known:
            advice = f" ({RENAMED[key]} is)" if key in RENAMED else closest(key, known)
            notes.faults.append(f"{key} is not a key of Megatron-Bridge{advice}")
    base = _recipe(recipe[1] if recipe else None, notes)
    values: dict[str, Any] = {key: value for key, value in {**base, **given}.items() if key not in cleared}
    fsdp = ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp")
    if any(str(values.get(key, False)).lower() == "true" for key in fsdp):
        values["ddp.use_megatron_fsdp"] = "true"
    settings = Settings(Section(values, notes), key_of, lacks_sequence_parallel=False)
    launch = replace(launch_of(settings, devices), dtype=_dtype(values))
    if str(values.get("comm_overlap.tp_comm_overlap", True)).lower() == "false" and launch.tensor > 1:
        notes.unpriced.append(
            "comm_overlap.tp_comm_overlap: collectives of tensor parallelism are priced as overlapped"
        )
    if str(values.get("ddp.grad_reduce_in_fp32", True)).lower() == "false":
        notes.unpriced.append("ddp.grad_reduce_in_fp32: gradients are priced in 32 bits")
    version = re.search(r"Megatron-Bridge v?(\d+\.\d+\.\d+)", text)
    return notes.reading(
        launch,
        sizes=sizes_of(settings),
        stages=stages_of(settings),
        version=version[1] if version else None,
    )


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of the overrides in a text."""
    if _YAML.search(text):
        yield from _leaves(read_yaml(text, "Megatron-Bridge"), "")
        return
    plain = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    for pattern in (_ASSIGNED, _SPACED, _OVERRIDE):
        for key, value in pattern.findall(plain):
            if pattern is _OVERRIDE and key.partition(".")[0] in ("cfg", "config", "recipe", "os", "self"):
                continue
            yield key, value.strip("\"'")


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield name, value


def recipes() -> dict[str, dict[str, str]]:
    """Return the pre-training recipes of Megatron-Bridge by name: key -> value."""
    result = {}
    for line in sorted(known_keys("bridge_recipes")):
        name, *pairs = line.split(" ")
        result[name] = dict(pair.split("=", 1) for pair in pairs)
    return result


def recipe_of(model: str) -> str | None:
    """Return the name of the recipe of a model, such as "meta-llama/Llama-3.1-70B"; None: there is none."""
    name = re.sub(r"[^a-z0-9.]+", "_", model.lower().rpartition("/")[2])
    name = re.sub(r"_(instruct|base|hf)$", "", re.sub(r"^(meta_)?llama_?(\d)(?:[._]([123]))?_", r"llama\2\3_", name))
    known = recipes()
    found = (f"{each}_pretrain_config" for each in (name, name.replace(".", ""), name.replace(".", "p")))
    return next((each for each in found if each in known), None)


def _recipe(name: str | None, notes: Notes) -> dict[str, str]:
    known = recipes()
    if name is None:
        notes.assumed.append("no recipe is named: settings without an override are Megatron-Core's defaults")
        return {"ddp.overlap_grad_reduce": "true"}
    if name not in known:
        notes.assumed.append(f"{name} is not known: settings without an override are Megatron-Core's defaults")
    return known.get(name, {"ddp.overlap_grad_reduce": "true"})


def _dtype(values: Mapping[str, Any]) -> TrainingDtype:
    name = str(values.get("mixed_precision", "bf16_mixed"))
    said = {key for key in ("fp8", "fp4", "fp16") if str(values.get(f"mixed_precision.{key}", False)) not in _OFF}
    if "fp4" in name or "fp4" in said:
        return "fp4"
    if "fp8" in name or "fp8" in said:
        return "fp8"
    return "fp16" if name.startswith("fp16") or "fp16" in said else "bf16"


_OFF = ("False", "false", "None", "null")


def write(launch: Launch, model: str) -> str:
    """Return a script that runs a recipe with overrides: the model's own recipe where there is one.

    Raises:
        JobError: Megatron-Bridge cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, [*reasons(launch), *_reasons(launch)])
    recipe = recipe_of(model)
    lines = ["#!/bin/bash", f"# {TITLE}: {model} on {launch.ranks} devices, written by shardplan."]
    if recipe is None:
        lines.append(
            f"# Put your recipe of {model} for RECIPE: Megatron-Bridge has no pre-training recipe of this name."
        )
    nodes = max(1, launch.ranks // DEVICES_PER_NODE)
    texts: dict[str, None] = {}
    for say in SAYS.values():
        texts.update(dict.fromkeys(say(launch)))
    lines += [
        f"NNODES=${{NNODES:-{nodes}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{launch.ranks // nodes}}}",
        "torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE --node-rank ${NODE_RANK:-0} \\",
        "    --master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-6000} \\",
        f"    scripts/training/run_recipe.py --recipe {recipe or 'RECIPE'} \\",
        *(f"    {text} \\" for text in texts),
    ]
    lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


def _reasons(launch: Launch) -> list[str]:
    return ["the dtype fp32"] if launch.dtype not in PRECISIONS else []


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how Megatron-Bridge runs a launch: as Megatron-LM, with collectives of tensor parallelism overlapped.

    Its recipes set ``comm_overlap.tp_comm_overlap`` (recipes/llama/llama3.py), and gradients in 32 bits (bf16_mixed).
    """
    base = megatron_implementation(launch, arch)
    return replace(base, tensor_parallel=replace(base.tensor_parallel, async_tp=launch.sequence_parallel))


def _says_zero(launch: Launch) -> tuple[str, ...]:
    sharded = "true" if launch.zero else "false"
    fsdp = "true" if launch.zero > 1 else "false"
    strategy = next(name for name, zero in STRATEGIES.items() if zero == (launch.zero if launch.zero > 1 else 0))
    checkpoint = ("checkpoint.ckpt_format=fsdp_dtensor",) if launch.zero > 1 else ()
    return (
        f"ddp.use_distributed_optimizer={sharded}",
        "ddp.overlap_grad_reduce=true",
        f"ddp.overlap_param_gather={sharded}",
        f"ddp.use_megatron_fsdp={fsdp}",
        f"ddp.data_parallel_sharding_strategy={strategy}",
        *checkpoint,
    )


def _says_checkpointing(launch: Launch) -> tuple[str, ...]:
    values = {"full": ("full", "uniform", "1"), "attention": ("selective", "null", "null")}
    granularity, method, count = values.get(launch.checkpointing, ("null", "null", "null"))
    modules = ('model.recompute_modules=["core_attn"]',) if launch.checkpointing == "attention" else ()
    return (
        f"model.recompute_granularity={granularity}",
        f"model.recompute_method={method}",
        f"model.recompute_num_layers={count}",
        *modules,
    )


def _or_null(text: str, name: str) -> Callable[[Launch], tuple[str, ...]]:
    """Return how a field is said where the default, null, stands for None and 1."""

    def say(launch: Launch) -> tuple[str, ...]:
        value = getattr(launch, name)
        return (text.format("null" if value in (None, 1) else value),)

    return say


def _says_batch(launch: Launch) -> tuple[str, ...]:
    return (f"train.global_batch_size={launch.global_batch}",)


def _says_offload(launch: Launch) -> tuple[str, ...]:
    on = str(launch.offload).lower()
    precise = ("optimizer.use_precision_aware_optimizer=true",) if launch.offload else ()
    return (f"optimizer.optimizer_cpu_offload={on}", *precise)


SAYS: Mapping[str, Callable[[Launch], tuple[str, ...]]] = {
    "tensor": flag("model.tensor_model_parallel_size={}", "tensor"),
    "sequence_parallel": flag("model.sequence_parallel={}", "sequence_parallel"),
    "pipeline": flag("model.pipeline_model_parallel_size={}", "pipeline"),
    "virtual_stages": _or_null("model.virtual_pipeline_model_parallel_size={}", "virtual_stages"),
    "context": flag("model.context_parallel_size={}", "context"),
    "expert": flag("model.expert_model_parallel_size={}", "expert"),
    "expert_tensor": flag("model.expert_tensor_parallel_size={}", "expert_tensor"),
    "zero": _says_zero,
    "replicate": lambda launch: (f"ddp.num_distributed_optimizer_instances={launch.replicate if launch.zero else 1}",),
    "shard": nothing,
    "micro_batch": flag("train.micro_batch_size={}", "micro_batch"),
    "batch": _says_batch,
    "seq": lambda launch: (
        () if launch.seq is None else (f"model.seq_length={launch.seq}", f"dataset.sequence_length={launch.seq}")
    ),
    "checkpointing": _says_checkpointing,
    "dtype": lambda launch: (f"mixed_precision={PRECISIONS.get(launch.dtype, 'bf16_mixed')}",),
    "optimizer": lambda launch: (
        f"optimizer.optimizer={next((name for name, own in OPTIMIZERS.items() if own == launch.optimizer), 'adam')}",
    ),
    "compiled": nothing,
    "offload": _says_offload,
}

MEGATRON_BRIDGE = Framework(
    name="megatron-bridge",
    title="Megatron-Bridge",
    version=VERSION,
    file="megatron-bridge.sh",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    limits={
        "checkpointing": ("none", "attention", "full"),
        "compiled": (True,),
        "dtype": tuple(PRECISIONS),
    },
    implementation=implementation,
    key_value_heads="copied",
    vocabulary="divided",
    experts_need_sequence_parallel=True,
    planners=("ddp", "fsdp", "hsdp", "fsdp-tp", "tp"),
)
"""Megatron-Bridge."""
