"""What the YAML of ``accelerate config`` says, with every fault and every key that is not priced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.frameworks.configurations.documents import Section, divisors, known_keys, shown, unknown_keys
from api.frameworks.configurations.training_script import Script, read_script
from api.frameworks.launch import Launch
from cost_model.configuration.parallelism import TrainingDtype

VERSION = "1.15.0"
TITLE = f"accelerate {VERSION}"

DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON")
"""``distributed_type`` of plain data parallelism, by the kind of device."""

PRECISIONS: Mapping[str, TrainingDtype] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

DEGREES = {"dp_replicate": "replicate", "dp_shard": "shard", "cp": "context", "sp": "context", "tp": "tensor"}
"""``parallelism_config_NAME_size`` -> field of `Launch`."""

_PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
"""Section -> start of its keys, which may be left out (commands/launch.py, ``_validate_launch_command``)."""

_IN_DEEPSPEED_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
"""Keys that are ignored beside ``deepspeed_config_file`` (``_deepspeed_config_checks`` in utils/dataclasses.py)."""


def unknown(values: Mapping[str, Any]) -> list[str]:
    """Return the faults of the keys that accelerate does not know."""
    return list(unknown_keys(values, known_keys("accelerate"), TITLE))


def with_prefixes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with the full names of its sections' keys."""
    result = dict(values)
    for name, prefix in _PREFIXES.items():
        section = result.get(name)
        if isinstance(section, Mapping):
            start = prefix.rstrip("_") + "_"
            result[name] = {
                str(key) if str(key).startswith(prefix) else start + str(key): value for key, value in section.items()
            }
    return result


def read_document(root: Section, script: Section, devices: int) -> Launch:
    """Return the launch that an accelerate configuration says; what is wrong goes to the notes of ``root``.

    Args:
        root: the document.
        script: the arguments of the training script, as far as they are known.
        devices: number of devices.
    """
    notes = root.notes
    kinds = {name: name for name in ("NO", *DEVICES, "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "XLA")}
    if "distributed_type" not in root:
        notes.faults.append("distributed_type has to be given: FSDP, MULTI_GPU, DEEPSPEED or NO would do")
    if root.values.get("distributed_type") is False:  # NO without quotes, which accelerate takes
        root = Section({**root.values, "distributed_type": "NO"}, notes)
    kind = root.choice("distributed_type", kinds, "NO" if devices == 1 else "MULTI_GPU")
    _check_processes(root, kind, devices)
    if kind in ("MULTI_CPU", "XLA", "MEGATRON_LM"):
        notes.unpriced.append(f"distributed_type {kind}: read as data parallelism of eager PyTorch")
        kind = "MULTI_GPU"
    dtype, compiled = _dtype(root), _compiled(root)
    if kind == "DEEPSPEED":
        return _deepspeed(root, script, devices, dtype, compiled)
    fsdp = root.section("fsdp_config") if kind == "FSDP" else Section({}, notes, "fsdp_config")
    return _torch(root, script, fsdp, kind, devices, dtype, compiled)


def _check_processes(root: Section, kind: str, devices: int) -> None:
    faults, assumed = root.notes.faults, root.notes.assumed
    root.choice("compute_environment", {name: name for name in ("LOCAL_MACHINE",)}, "LOCAL_MACHINE")
    processes = root.values.get("num_processes")
    if processes in (None, -1) and kind != "NO":
        assumed.append(f"num_processes {devices}: the cluster's, to be given as --num_processes")
    elif kind == "NO" and devices > 1:
        faults.append(f"distributed_type NO runs 1 process, and the cluster has {devices} devices: MULTI_GPU would do")
    elif kind != "NO" and root.number("num_processes", devices) != devices:
        faults.append(f"num_processes {shown(processes)} is not the cluster's {devices} devices: {devices} would do")
    machines = root.number("num_machines", 1)
    if devices % machines:
        faults.append(f"num_machines {machines} does not divide {devices} devices ({divisors(devices)} would do)")
    if root.switch("use_cpu", False):
        faults.append("use_cpu true leaves the cluster's devices unused: false would do")


def _dtype(root: Section) -> TrainingDtype:
    if root.values.get("mixed_precision") is False:
        root.notes.faults.append("mixed_precision no is false in YAML, which accelerate does not take: 'no' would do")
        return "fp32"
    usual = "fp16" if root.switch("fp16", False) else "no"
    if "mixed_precision" not in root and "fp16" not in root:
        root.notes.assumed.append("mixed_precision 'no': the default")
    return root.choice("mixed_precision", PRECISIONS, usual)


def _compiled(root: Section) -> bool:
    section = root.section("dynamo_config")
    backend = str(section.values.get("dynamo_backend") or root.values.get("dynamo_backend") or "NO").upper()
    if backend not in ("NO", "INDUCTOR", "EAGER", "AOT_EAGER"):
        root.notes.unpriced.append(f"dynamo_config.dynamo_backend {backend}: priced as INDUCTOR")
    return backend not in ("NO", "EAGER", "AOT_EAGER")


def _script(section: Section, data: int, steps: int | None = None) -> Script:
    why = "the training script says it, not this file"
    return read_script(section, data, usual=1, why=why, steps=steps)


def _deepspeed(root: Section, script: Section, devices: int, dtype: TrainingDtype, compiled: bool) -> Launch:
    section = root.section("deepspeed_config")
    if "deepspeed_config_file" in section:
        file = section.values["deepspeed_config_file"]
        for key in (name for name in _IN_DEEPSPEED_FILE if name in section):
            root.notes.faults.append(f"{section.name(key)} is ignored beside deepspeed_config_file: give it in {file}")
        root.notes.assumed.append(f"deepspeed_config_file {file}: ZeRO stage 2 is taken; read that file as DeepSpeed's")
    stage = section.number("zero_stage", 2, least=0)
    if stage > 3:
        root.notes.faults.append(f"{section.name('zero_stage')} {stage} is not 0, 1, 2 or 3")
        stage = 3
    key = "gradient_accumulation_steps"
    steps = section.number(key, 1) if key in section and section.values[key] != "auto" else None
    offload = False
    for key in ("offload_optimizer_device", "offload_param_device"):
        device = section.choice(key, {"none": "", "cpu": "cpu", "nvme": "nvme"}, "none")
        offload = offload or bool(device)
        if device and (stage < 3 if "param" in key else stage == 0):
            needed = "3" if "param" in key else "1, 2 or 3"
            root.notes.faults.append(f"{section.name(key)} {device} needs deepspeed_config.zero_stage {needed}")
        section.leave(key, because="what is held on the host is not priced")
    context = _sequence_ranks(root, devices)
    data = devices // context
    if stage == 3:
        root.notes.unpriced.append(f"{section.name('zero_stage')} 3: priced as FSDP2")
    said = _script(script, data, steps)
    return Launch(
        replicate=1 if stage else data,
        shard=data if stage else 1,
        zero=stage,
        context=context,
        micro_batch=said.micro_batch,
        batch=said.batch,
        seq=said.seq,
        checkpointing=said.checkpointing,
        optimizer=said.optimizer,
        dtype=dtype,
        compiled=compiled,
        offload=offload,
    )


def _sequence_ranks(root: Section, devices: int) -> int:
    """Return the ranks of Ulysses, the only parallelism that runs beside DeepSpeed's."""
    sizes = _sizes(root.section("parallelism_config"))
    for name in ("tp", "cp"):
        if sizes[name] > 1:
            key = f"parallelism_config.parallelism_config_{name}_size"
            root.notes.faults.append(f"{key} {sizes[name]} does not run with distributed_type DEEPSPEED: FSDP would do")
    if devices % sizes["sp"]:
        key = "parallelism_config.parallelism_config_sp_size"
        root.notes.faults.append(
            f"{key} {sizes['sp']} does not divide {devices} devices ({divisors(devices)} would do)"
        )
        return 1
    if sizes["sp"] > 1:
        root.notes.ulysses = f"parallelism_config.parallelism_config_sp_size: {sizes['sp']}"
        root.notes.unpriced.append("parallelism_config_sp_size: all-to-alls of Ulysses are priced as ring attention")
    return sizes["sp"]


def _sizes(section: Section) -> dict[str, int]:
    return {name: section.number(f"parallelism_config_{name}_size", 1) for name in DEGREES}


def _torch(
    root: Section, script: Section, fsdp: Section, kind: str, devices: int, dtype: TrainingDtype, compiled: bool
) -> Launch:
    """Return the launch of DDP, FSDP1 or FSDP2, with what `ParallelismConfig` adds."""
    is_fsdp = kind == "FSDP"
    version = fsdp.number("fsdp_version", 1)
    if is_fsdp and version not in (1, 2):
        root.notes.faults.append(f"fsdp_config.fsdp_version {version} is not 1 or 2")
        version = 2
    reshards, replicate = _resharding(root, fsdp, version, devices) if is_fsdp else (True, devices)
    sizes = {"replicate": replicate, "shard": devices // replicate, "context": 1, "tensor": 1}
    if root.section("parallelism_config").values:
        sizes = _parallelism(root, is_fsdp and version == 2, is_fsdp, devices)
    is_sharded = is_fsdp and sizes["shard"] * sizes["context"] > 1
    offload = is_fsdp and fsdp.switch("fsdp_offload_params", False)
    fsdp.leave("fsdp_offload_params", because="what is held on the host is not priced", unless=(False, "false"))
    if is_fsdp:
        _check_fsdp(fsdp, version)
    said = _script(script, sizes["replicate"] * sizes["shard"])
    checkpoints = is_fsdp and fsdp.switch("fsdp_activation_checkpointing", False)
    return Launch(
        replicate=sizes["replicate"],
        shard=sizes["shard"],
        context=sizes["context"],
        tensor=sizes["tensor"],
        zero=3 if is_sharded else 0,
        micro_batch=said.micro_batch,
        batch=said.batch,
        seq=said.seq,
        checkpointing="full" if checkpoints else said.checkpointing,
        optimizer=said.optimizer,
        dtype=dtype,
        compiled=compiled,
        reshard_after_forward=reshards or not is_sharded,
        offload=offload,
    )


def _resharding(root: Section, fsdp: Section, version: int, devices: int) -> tuple[bool, int]:
    """Return whether parameters are resharded after forward, and the replicas that FSDP1's strategy makes."""
    key = "fsdp_reshard_after_forward"
    if version == 2:
        return fsdp.switch(key, True), 1
    if "fsdp_sharding_strategy" not in fsdp and str(fsdp.values.get(key, "")).upper() in STRATEGIES:
        strategy = str(fsdp.values[key]).upper()
    else:
        numbered = {str(number): name for number, name in enumerate(STRATEGIES, start=1)}
        names = {name: name for name in STRATEGIES}
        strategy = fsdp.choice("fsdp_sharding_strategy", {**names, **numbered}, "FULL_SHARD")
    machines = root.number("num_machines", 1)
    machines = machines if devices % machines == 0 else 1
    replicas = {"NO_SHARD": devices, "HYBRID_SHARD": machines, "HYBRID_SHARD_ZERO2": machines}
    return strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"), replicas.get(strategy, 1)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""``fsdp_sharding_strategy`` of FSDP1, numbered from 1."""


def _parallelism(root: Section, is_fsdp2: bool, is_fsdp: bool, devices: int) -> dict[str, int]:
    """Return the degrees that ``parallelism_config`` says, after what accelerate's ParallelismConfig checks."""
    section, faults = root.section("parallelism_config"), root.notes.faults
    sizes = _sizes(section)
    keys = {name: f"parallelism_config_{name}_size" for name in DEGREES}
    said = " x ".join(f"{keys[name]} {size}" for name, size in sizes.items() if size > 1) or "parallelism_config"
    total = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["sp"] * sizes["tp"]
    if total == 1:
        sizes["dp_replicate"] = devices
    elif total != devices:
        others = total // sizes["dp_shard"]
        advice = f"{keys['dp_shard']} {devices // others}" if devices % others == 0 else f"a product of {devices}"
        faults.append(f"{said} is {total} processes, not the {devices} of the cluster: {advice} would do")
    if is_fsdp and not is_fsdp2 and total > 1:
        faults.append("parallelism_config needs fsdp_config.fsdp_version 2")
    if (sizes["tp"] > 1 or sizes["cp"] > 1) and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        faults.append(
            f"{keys['dp_replicate']} {sizes['dp_replicate']} does not run with {keys['tp']} or {keys['cp']} above 1 "
            f"where {keys['dp_shard']} is 1: {keys['dp_shard']} {sizes['dp_replicate']} and {keys['dp_replicate']} 1 "
            "would do"
        )
    elif is_fsdp2 and sizes["dp_shard"] == 1 and sizes["cp"] == 1:
        faults.append(f"{keys['dp_shard']} 1 leaves FSDP nothing to shard over: 2 or more would do, or no FSDP")
    if not is_fsdp and (sizes["dp_shard"] > 1 or sizes["cp"] > 1):
        faults.append(
            f"{keys['dp_shard']} or {keys['cp']} above 1 needs distributed_type FSDP with fsdp_config.fsdp_version 2"
        )
    if sizes["sp"] > 1:
        faults.append(f"{keys['sp']} {sizes['sp']} needs distributed_type DEEPSPEED: {keys['cp']} would do with FSDP")
    return {
        "replicate": sizes["dp_replicate"],
        "shard": sizes["dp_shard"],
        "context": sizes["cp"],
        "tensor": sizes["tp"],
    }


def _check_fsdp(fsdp: Section, version: int) -> None:
    faults = fsdp.notes.faults
    policies = {name: name for name in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")}
    policy = fsdp.choice("fsdp_auto_wrap_policy", policies, "NO_WRAP")
    if policy != "TRANSFORMER_BASED_WRAP":
        fsdp.notes.unpriced.append(f"{fsdp.name('fsdp_auto_wrap_policy')} {policy}: priced as one group for each layer")
    if fsdp.switch("fsdp_cpu_ram_efficient_loading", True) and not fsdp.switch("fsdp_sync_module_states", True):
        faults.append(
            f"{fsdp.name('fsdp_sync_module_states')} false does not run with fsdp_cpu_ram_efficient_loading true: true "
            "would do"
        )
    if fsdp.switch("fsdp_activation_checkpointing_offload", False):
        key = fsdp.name("fsdp_activation_checkpointing_offload")
        if not fsdp.switch("fsdp_activation_checkpointing", False):
            faults.append(f"{key} true needs fsdp_activation_checkpointing true")
        if version == 1:
            faults.append(f"{key} true needs fsdp_version 2")
        fsdp.notes.unpriced.append(f"{key}: what is held on the host is not priced")
