"""What DeepSpeed's JSON says: `read_section`, with every fault and every key that is not priced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.frameworks.configurations.documents import Section, divisors, known_keys, unknown_keys
from api.frameworks.configurations.training_script import CHECKPOINTING, MICRO_BATCH, read_script
from api.frameworks.launch import Launch
from cost_model.configuration.parallelism import TrainingDtype

VERSION = "0.19.8"
TITLE = f"DeepSpeed {VERSION}"

REMOVED = {
    "nebula": "checkpoints are plain torch.save",
    "compression_training": "the compression library is gone",
    "amp": "fp16, bf16 or torch_autocast would do",
    "quantize_training": "mixture-of-quantization is gone",
    "sparse_gradients": "embeddings with sparse=True need no key",
    "eigenvalue": "mixture-of-quantization is gone",
    "sparse_attention": "sparse attention is gone",
    "elasticity": "train_batch_size and train_micro_batch_size_per_gpu would do",
    "graph_harvesting": "CUDA graphs of the optimizer are gone",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning would do",
    "progressive_layer_drop": "layer dropping is gone",
    "zero_optimization.mics_shard_size": "zero_optimization.zero_hpz_partition_size would do",
    "zero_optimization.mics_hierarchical_params_gather": "zero_optimization.zero_hpz_partition_size would do",
    "zero_optimization.zeropp_loco_param": "zero_optimization.zero_quantized_gradients alone would do",
}
"""Key that DeepSpeed refuses since its feature was removed (runtime/config.py) -> advice."""

SCRIPT = "_training_script"
"""Key of the arguments of the training script, which DeepSpeed ignores."""

OPTIMIZERS = {"Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad", "Muon": "muon"}
"""``optimizer.type`` -> optimizer of a job; Adam is AdamW unless ``adam_w_mode`` is false."""


def read_section(root: Section, devices: int) -> Launch:
    """Return the launch that a DeepSpeed configuration says; what is wrong goes to the notes of ``root``."""
    zero = _stage(root)
    stage = zero.number("stage", 0, least=0)
    if stage > 3:
        root.notes.faults.append(f"zero_optimization.stage {stage} is not 0, 1, 2 or 3")
        stage = 3
    tensor, context, data = _degrees(root, devices)
    expert, expert_tensor = _experts(root, stage, devices)
    micro_batch, batch = _batches(root, data, devices)
    offload = _offload(zero, stage)
    script = read_script(
        Section({MICRO_BATCH: micro_batch, **_script(root)}, root.notes, SCRIPT), data, usual=1, why=""
    )
    _leave(root, zero, stage)
    return Launch(
        replicate=1 if stage else data,
        shard=data if stage else 1,
        zero=stage,
        tensor=tensor,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        micro_batch=micro_batch,
        batch=batch,
        seq=script.seq,
        checkpointing=script.checkpointing,
        dtype=_dtype(root, stage),
        optimizer=_optimizer(root),
        compiled=root.section("compile").switch("deepcompile", False),
        offload=offload,
    )


def unknown(values: Mapping[str, Any]) -> list[str]:
    """Return the faults of the keys that DeepSpeed does not know, or no longer."""
    zero = values.get("zero_optimization")
    names = {*values, *(f"zero_optimization.{key}" for key in (zero if isinstance(zero, Mapping) else {}))}
    removed = [f"{key} was removed from DeepSpeed: {REMOVED[key]}" for key in REMOVED if key in names]
    known = known_keys("deepspeed") | frozenset(REMOVED) | {f"{key}.*" for key in REMOVED}
    return [*removed, *unknown_keys(values, known, TITLE)]


def _stage(root: Section) -> Section:
    """Return the section ``zero_optimization``, of which old files have a boolean: stage 1."""
    value = root.values.get("zero_optimization")
    if isinstance(value, bool):
        return Section({"stage": int(value)}, root.notes, "zero_optimization", automatic=True)
    return root.section("zero_optimization")


def _script(root: Section) -> Mapping[str, Any]:
    """Return the arguments of the training script that a written file names; DeepSpeed ignores the key."""
    values = root.values.get(SCRIPT)
    return values if isinstance(values, Mapping) else {}


def _degrees(root: Section, devices: int) -> tuple[int, int, int]:
    """Return the degrees of tensor, context (Ulysses) and data parallelism."""
    tensor = max(1, root.section("tensor_parallel").number("autotp_size", 0, least=0))
    context = root.number("sequence_parallel_size", 1)
    if tensor > 1 and context > 1:
        root.notes.faults.append(
            f"sequence_parallel_size {context} does not run with tensor_parallel.autotp_size {tensor}: 1 would do"
        )
        context = 1
    for key, degree in (("tensor_parallel.autotp_size", tensor), ("sequence_parallel_size", context)):
        if devices % degree:
            root.notes.faults.append(f"{key} {degree} does not divide {devices} devices ({divisors(devices)} would do)")
    if context > 1:
        root.notes.ulysses = f"sequence_parallel_size: {context}"
        root.notes.unpriced.append("sequence_parallel_size: all-to-alls of Ulysses are priced as ring attention")
    return tensor, context, max(1, devices // (tensor * context))


def _experts(root: Section, stage: int, devices: int) -> tuple[int, int]:
    """Return the ranks that experts are spread over, and those that split each expert."""
    section = root.section("expert_parallel")
    expert, split = section.number("autoep_size", 1), section.number("expert_tensor_parallel_size", 1)
    if not section.switch("enabled", False):
        return 1, 1
    if stage == 3 and split > 1:
        root.notes.faults.append(
            f"expert_parallel.expert_tensor_parallel_size {split} does not run with stage 3: 1 would do"
        )
        split = 1
    if devices % (expert * split):
        root.notes.faults.append(
            f"expert_parallel.autoep_size {expert} x expert_tensor_parallel_size {split} does not divide {devices} "
            f"devices (a product of {divisors(devices)} would do)"
        )
        return 1, 1
    return expert, split


def _batches(root: Section, data: int, devices: int) -> tuple[int, int | None]:
    """Return the micro-batch and the global batch; what is missing follows from the rest, as in DeepSpeed."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (root.number(key, 1) if root.given(key) else None for key in keys)
    ranks = f"{data} {'devices' if data == devices else 'data-parallel ranks'}"
    if total is None and micro is None:
        if all(key in root for key in keys[:2]):
            root.notes.assumed.append(f"{keys[1]} auto: 1 is taken")
        elif keys[0] not in root and keys[1] not in root:
            root.notes.faults.append(f"{keys[0]} or {keys[1]} has to be given: 1 for {keys[1]} would do")
        else:
            root.notes.assumed.append(f"{keys[0] if keys[0] in root else keys[1]} auto: 1 for {keys[1]} is taken")
    if steps is None and keys[2] in root and (total is None or micro is None):
        root.notes.assumed.append(f"{keys[2]} auto: 1 is taken")
    if total is None:
        micro, steps = micro or 1, steps or 1
        return micro, None if steps == 1 else micro * steps * data
    if micro is None:
        steps = steps or 1
        micro = max(1, total // (steps * data))
        product = f"{keys[2]} {steps} x {ranks}"
    elif steps is None:
        steps = max(1, total // (micro * data))
        product = f"{keys[1]} {micro} x {ranks}"
    else:
        product = ""
    expected = micro * steps * data
    if total != expected and product:
        root.notes.faults.append(f"{keys[0]} {total} is not a multiple of {product}: {expected} would do")
    elif total != expected:
        product = f"{keys[1]} {micro} x {keys[2]} {steps} x {ranks}"
        root.notes.faults.append(f"{keys[0]} {total} is not {product}: {expected} would do")
    return micro, expected


def _dtype(root: Section, stage: int) -> TrainingDtype:
    bf16, fp16 = root.section("bf16" if "bf16" in root else "bfloat16"), root.section("fp16")
    enabled = {section.name("enabled"): section.values.get("enabled", False) for section in (bf16, fp16)}
    if "auto" in enabled.values() and True not in enabled.values():
        key = next(key for key, value in enabled.items() if value == "auto")
        root.notes.assumed.append(f"{key} auto: true is taken")
        return "bf16" if key.startswith("b") else "fp16"
    is_bf16, is_fp16 = bf16.switch("enabled", False), fp16.switch("enabled", False)
    if is_bf16 and is_fp16:
        root.notes.faults.append("fp16.enabled and bf16.enabled are both true: one of them would do")
    _check_master_weights(bf16, stage)
    _check_master_weights(fp16, stage)
    autocast = root.section("torch_autocast")
    if not is_bf16 and not is_fp16 and autocast.switch("enabled", False):
        autocast.leave("enabled", because="parameters are priced in the dtype of autocast")
        return "fp16" if str(autocast.values.get("dtype", "bfloat16")) in ("fp16", "float16") else "bf16"
    return "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32"


def _check_master_weights(section: Section, stage: int) -> None:
    name = f"{section.path.replace('bfloat16', 'bf16')}_master_weights_and_grads"
    for key in (name, "bf16_optimizer_states"):
        if section.switch(key, False) and stage == 0:
            section.notes.faults.append(f"{section.name(key)} needs zero_optimization.stage 1, 2 or 3")
        section.leave(key, because="master weights and states are priced in 32 bits")
    if section.switch("bf16_optimizer_states", False) and stage and not section.switch(name, False):
        section.notes.faults.append(f"{section.name('bf16_optimizer_states')} needs {section.name(name)} true")


def _optimizer(root: Section) -> str:
    section = root.section("optimizer")
    if "type" not in section:
        return "adamw"
    written = str(section.values["type"])
    name = {known.lower(): known for known in OPTIMIZERS}.get(written.lower())
    if name is None:
        root.notes.unpriced.append(f"optimizer.type {written}: its states are priced as those of AdamW")
        return "adamw"
    if name == "Adam" and section.section("params").switch("adam_w_mode", True):
        return "adamw"
    return OPTIMIZERS[name]


def _offload(zero: Section, stage: int) -> bool:
    offload = any(zero.switch(key, False) for key in ("cpu_offload", "cpu_offload_param"))
    for key, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        section = zero.section(key)
        device = section.choice("device", {"none": "", "cpu": "cpu", "nvme": "nvme"}, "none")
        if device and stage not in stages:
            zero.notes.faults.append(
                f"{section.name('device')} {device} needs {zero.name('stage')} {' or '.join(map(str, stages))}"
            )
        elif device:
            offload = True
            zero.notes.unpriced.append(f"{section.name('device')} {device}: what is held on the host is not priced")
    return offload


def _leave(root: Section, zero: Section, stage: int) -> None:
    """Note the keys whose effects are not priced."""
    zero.leave("zero_hpz_partition_size", because="the second copy of parameters in each node is not priced")
    zero.leave("zero_quantized_weights", "zero_quantized_gradients", because="bytes are priced unquantized")
    zero.leave("zenflow", because="asynchronous updates are not priced")
    if stage and not zero.switch("overlap_comm", stage == 3):
        root.notes.unpriced.append(f"{zero.name('overlap_comm')} is not true: reductions are priced as overlapped")
    root.leave("communication_data_type", because="gradients are reduced in the dtype of compute", unless=("auto",))
    data_types = root.section("data_types")
    data_types.leave("grad_accum_dtype", because="gradients accumulate in the dtype of compute")
    root.leave("weight_quantization", because="weights are priced unquantized", unless=({},))
    checkpointing = root.section("activation_checkpointing")
    checkpointing.leave("partition_activations", "cpu_checkpointing", because="checkpoints are priced whole on device")
    if checkpointing.values and CHECKPOINTING not in _script(root):
        root.notes.assumed.append(
            "activation_checkpointing sets options only; the model's code turns it on: none taken"
        )
    compiled = root.section("compile")
    compiled.leave("offload_activation", "offload_opt_states", "offload_parameters", because="offloading is not priced")
