"""transformers: a ``DistributedConfig`` as JSON, beside the ``TrainingArguments`` of the run.

``DistributedConfig.from_dict`` takes its own keys of the file, and ``HfArgumentParser.parse_json_file`` with
``allow_extra_keys`` those of ``TrainingArguments``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from api.frameworks.configurations.documents import (
    Notes,
    Section,
    check_sayable,
    divisors,
    known_keys,
    read_json,
    shown,
    unknown_keys,
)
from api.frameworks.configurations.training_script import (
    CHECKPOINTING_MODES,
    OPTIMIZERS,
    SCRIPT_SAYS,
    read_script,
    script_arguments,
    script_reasons,
)
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.frameworks import FSDP2, with_compile
from cost_model.configuration.implementation import Implementation
from cost_model.configuration.parallelism import TrainingDtype

VERSION = "5.24.0"
TITLE = f"transformers {VERSION}"

SIZES = {
    "dp_replicate_size": "replicate",
    "fsdp_size": "shard",
    "tp_size": "tensor",
    "pp_size": "pipeline",
}
"""Size in ``DistributedConfig`` -> field of `Launch`; their product is the number of processes."""

KEPT = {"model.layers.*": "keep_full_weight"}
"""``fsdp_plan`` of layers whose parameters are not gathered again in backward."""

DTYPES: tuple[TrainingDtype, ...] = ("bf16", "fp16", "fp32")

_MARKS = ("tp_size", "fsdp_size", "dp_replicate_size", "tp_plan", "pp_size", "ep_size", "distributed_config")
_PLANS = ("tp_plan", "ep_plan", "fsdp_plan")


def recognises(text: str) -> bool:
    """Return whether a text looks like the JSON of a ``DistributedConfig``."""
    return text.lstrip().startswith("{") and any(re.search(rf'"{mark}"\s*:', text) for mark in _MARKS)


def read(text: str, devices: int) -> Reading:
    """Return what a ``DistributedConfig`` and ``TrainingArguments`` in one JSON say for a number of devices.

    Raises:
        JobError: the text is no JSON.
    """
    values = dict(read_json(text, "transformers"))
    nested = values.pop("distributed_config", None)
    if isinstance(nested, Mapping):
        values |= nested
    notes = Notes()
    notes.faults.extend(unknown_keys(values, known_keys("transformers"), TITLE))
    root = Section(values, notes)
    launch = _launch(root, devices)
    return notes.reading(
        launch,
        version=str(values["transformers_version"]) if "transformers_version" in root else None,
    )


def _launch(root: Section, devices: int) -> Launch:
    plans = {name: _plan(root, name) for name in _PLANS}
    sizes = _sizes(root, devices)
    expert = _experts(root, sizes)
    if root.values.get("enable_expert_parallel") is True and "ep_size" not in root and plans["tp_plan"] is None:
        plans["tp_plan"] = {}
    if sizes["tensor"] > 1 and plans["tp_plan"] == {}:
        root.notes.unpriced.append("tp_plan {}: dense layers are priced as split by tp_size")
    script = read_script(root, sizes["replicate"] * sizes["shard"], usual=8, why="the default")
    offload = root.switch("fsdp_cpu_offload", False)
    root.leave("fsdp_cpu_offload", because="what is held on the host is not priced")
    root.leave("enable_sequence_parallel", because=f"{TITLE} does not run it")
    root.leave("ep_implementation", because="experts exchange tokens by all-to-all", unless=("auto", "all_to_all"))
    root.leave("use_liger_kernel", because="kernels are priced as those of eager PyTorch")
    root.leave("load_in_4bit", "load_in_8bit", because="parameters are priced unquantized")
    root.leave("use_peft", because="all parameters are priced as trained")
    root.leave("activation_offloading", because="what is held on the host is not priced")
    for key in ("deepspeed", "parallelism_config"):
        root.leave(key, because="read that file as a configuration of its own", unless=({}, ""))
    return Launch(
        replicate=sizes["replicate"],
        shard=sizes["shard"],
        tensor=sizes["tensor"],
        pipeline=sizes["pipeline"],
        zero=3 if sizes["shard"] > 1 else 0,
        expert=expert,
        micro_batch=script.micro_batch,
        batch=script.batch,
        seq=script.seq,
        checkpointing=script.checkpointing,
        dtype=_dtype(root),
        optimizer=script.optimizer,
        compiled=root.switch("torch_compile", False),
        reshard_after_forward=sizes["shard"] == 1 or not _keeps(plans["fsdp_plan"]),
        offload=offload,
        tp_plan=plans["tp_plan"],
    )


def _plan(root: Section, name: str) -> dict[str, str] | None:
    """Return a plan of styles; None: the model's own."""
    value = root.values.get(name)
    if value is None or (name == "tp_plan" and value == "auto"):
        return None
    if isinstance(value, Mapping) and all(isinstance(style, str) for style in value.values()):
        return {str(key): style for key, style in value.items()}
    usual = '"auto", ' if name == "tp_plan" else ""
    root.notes.faults.append(f"{name} {shown(value)} is not {usual}a mapping of modules to styles, or null")
    return None


def _keeps(plan: Mapping[str, str] | None) -> bool:
    return any(key.endswith("layers.*") and style == "keep_full_weight" for key, style in (plan or {}).items())


def _sizes(root: Section, devices: int) -> dict[str, int]:
    """Return the degrees; the size of tensor parallelism follows from the others where only a plan is given."""
    sizes = {field: root.number(key, 1) for key, field in SIZES.items()}
    faults = root.notes.faults
    others = sizes["replicate"] * sizes["shard"] * sizes["pipeline"]
    if "tp_size" not in root and root.values.get("tp_plan") is not None:
        if devices % others:
            faults.append(
                f"dp_replicate_size x fsdp_size x pp_size is {others}, which does not divide {devices} devices "
                f"({divisors(devices)} would do)"
            )
        else:
            sizes["tensor"] = devices // others
    total = others * sizes["tensor"]
    if total == 1 and devices > 1:
        root.notes.assumed.append(f"no sizes: the Trainer runs data parallelism on {devices} devices")
        sizes["replicate"] = devices
    elif total != devices:
        said = " x ".join(f"{key} {sizes[field]}" for key, field in SIZES.items() if sizes[field] > 1)
        rest = total // sizes["shard"]
        advice = f"fsdp_size {devices // rest}" if devices % rest == 0 else f"a product of {devices}"
        faults.append(f"{said} is {total} processes, not the cluster's {devices} devices: {advice} would do")
    if sizes["pipeline"] > 1 and sizes["replicate"] * sizes["shard"] > 1:
        faults.append(
            f"pp_size {sizes['pipeline']} does not run with fsdp_size or dp_replicate_size above 1: 1 would do"
        )
    if sizes["pipeline"] > 1:
        root.notes.unpriced.append("pp_size: the schedule of transformers is priced as 1F1B")
    return sizes


def _experts(root: Section, sizes: Mapping[str, int]) -> int:
    """Return the ranks that experts are spread over."""
    tensor, width = sizes["tensor"], sizes["shard"] * sizes["tensor"]
    usual = 1
    if root.switch("enable_expert_parallel", False) and "ep_size" not in root:
        usual = tensor
        root.notes.assumed.append(f"enable_expert_parallel: ep_size {tensor} and tp_plan {{}}, which replace it")
    expert = root.number("ep_size", usual)
    legal = [size for size in range(1, width + 1) if size % tensor == 0 and width % size == 0]
    if expert > 1 and expert not in legal:
        advice = " or ".join(map(str, legal))
        root.notes.faults.append(
            f"ep_size {expert} is not a multiple of tp_size {tensor} that divides fsdp_size x tp_size {width}: "
            f"{advice} would do"
        )
        return 1
    return expert


def _dtype(root: Section) -> TrainingDtype:
    is_bf16, is_fp16 = root.switch("bf16", False), root.switch("fp16", False)
    if is_bf16 and is_fp16:
        root.notes.faults.append("fp16 and bf16 are both true: one of them would do")
    if is_bf16 or root.switch("fsdp_mixed_precision", False):
        return "bf16"
    if is_fp16:
        return "fp16"
    if "bf16" in root:
        return "fp32"
    root.notes.assumed.append("bf16 true: neither bf16 nor fp16 is given")
    return "bf16"


def write(launch: Launch, model: str) -> str:
    """Return a ``DistributedConfig`` with ``TrainingArguments`` as JSON.

    Raises:
        JobError: transformers cannot say the launch.
    """
    check_sayable(launch, TITLE, SAYS, _reasons(launch))
    is_sharded = launch.shard > 1
    document: dict[str, Any] = {
        "transformers_version": VERSION,
        "_comment": f"{model} on {launch.ranks} devices, written by shardplan",
        **{key: getattr(launch, field) for key, field in SIZES.items()},
        "ep_size": launch.expert,
        "fsdp_mixed_precision": launch.data > 1 and launch.dtype == "bf16",
        "fsdp_cpu_offload": launch.offload,
    }
    if is_sharded and not launch.reshard_after_forward:
        document["fsdp_plan"] = KEPT
    if launch.tp_plan is not None:
        document["tp_plan"] = dict(launch.tp_plan)
    document |= script_arguments(launch)
    document |= {"bf16": launch.dtype == "bf16", "fp16": launch.dtype == "fp16", "torch_compile": launch.compiled}
    return json.dumps(document, indent=2) + "\n"


def _reasons(launch: Launch) -> list[str]:
    width = launch.shard * launch.tensor
    checks = {
        f"ZeRO stage {launch.zero} of {launch.shard} shards": (launch.zero != (3 if launch.shard > 1 else 0)),
        "pipelines with data parallelism": launch.pipeline > 1 and launch.data > 1,
        f"experts on {launch.expert} ranks": launch.expert > 1
        and (launch.expert % launch.tensor > 0 or width % launch.expert > 0),
        "reshard_after_forward false without FSDP": launch.shard == 1 and not launch.reshard_after_forward,
        "offloading without FSDP": launch.shard == 1 and launch.offload,
        f"the dtype {launch.dtype}": launch.dtype not in DTYPES,
        f"the optimizer {launch.optimizer}": launch.optimizer not in OPTIMIZERS.values(),
    }
    return [*(reason for reason, holds in checks.items() if holds), *script_reasons(launch)]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how transformers' Trainer runs a model that is sharded at load time, as far as the price depends on it.

    Parameters and states are in float32, and ``fsdp_mixed_precision`` gathers in bf16 and reduces in float32
    (distributed/fsdp.py). Gradients are reduced with the last micro-batch, with replicas across them only
    (``_defer_fsdp_gradient_reduction`` in trainer.py). Logits are all-gathered over tensor parallelism, and upcast to
    float32 in the loss (loss/loss_utils.py).
    """
    result = replace(
        FSDP2,
        data_parallel=replace(
            FSDP2.data_parallel,
            reshard_after_forward=launch.reshard_after_forward,
            root_holds_ends=False,
            defers_reduction=launch.zero == 3 and launch.replicate == 1,
        ),
        loss=replace(FSDP2.loss, vocabulary_parallel=False),
    )
    return with_compile(result) if launch.compiled else result


def _says_kept(launch: Launch) -> tuple[str, ...]:
    style = "free_full_weight" if launch.reshard_after_forward else "keep_full_weight"
    return (f'fsdp_plan: {{"model.layers.*": "{style}"}}',)


def _says_dtype(launch: Launch) -> tuple[str, ...]:
    return tuple(f"{name}: {shown(launch.dtype == name)}" for name in ("bf16", "fp16"))


def _says_plan(launch: Launch) -> tuple[str, ...]:
    return (f"tp_plan: {shown('auto' if launch.tp_plan is None else dict(launch.tp_plan))}",)


SAYS = {
    "replicate": flag("dp_replicate_size: {}", "replicate"),
    "shard": flag("fsdp_size: {}", "shard"),
    "zero": lambda launch: (),
    "tensor": flag("tp_size: {}", "tensor"),
    "pipeline": flag("pp_size: {}", "pipeline"),
    "expert": flag("ep_size: {}", "expert"),
    "dtype": _says_dtype,
    "compiled": flag("torch_compile: {}", "compiled"),
    "reshard_after_forward": _says_kept,
    "offload": flag("fsdp_cpu_offload: {}", "offload"),
    "tp_plan": _says_plan,
    **SCRIPT_SAYS,
}

LIMITS = {
    "zero": (0, 3),
    "dtype": DTYPES,
    "checkpointing": CHECKPOINTING_MODES,
    "optimizer": tuple(dict.fromkeys(OPTIMIZERS.values())),
}

TRANSFORMERS = Framework(
    name="transformers",
    title="transformers",
    version=VERSION,
    file="distributed_config.json",
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
