"""torch: a training script, or the dict of a ``parallelize_module``, as Python text. It is parsed, never run.

What is read are calls of torch's parallelism by their names (``init_device_mesh``, ``parallelize_module``,
``fully_shard``, ``DistributedDataParallel``), and constants. What a script computes is not known, and is said.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from api.frameworks.configurations.documents import Notes, check_sayable, divisors
from api.frameworks.configurations.python_text import Script
from api.frameworks.launch import Framework, Launch, Reading, flag
from cost_model.configuration.frameworks import FSDP2, with_compile
from cost_model.configuration.implementation import Implementation
from cost_model.configuration.parallelism import Checkpointing, TrainingDtype
from planner.errors import JobError

VERSION = "2.13"
TITLE = f"torch {VERSION}"

STYLES = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")
_PREPARES = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
_FSDP = ("fully_shard", "FullyShardedDataParallel", "FSDP")
_DDP = ("DistributedDataParallel", "DDP", "replicate")
_PIPELINES = ("PipelineStage", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")
_CHECKPOINTS = ("checkpoint_wrapper", "apply_activation_checkpointing", "gradient_checkpointing_enable", "checkpoint")
_SELECTIVE = ("create_selective_checkpoint_contexts",)
_OFFLOADS = ("CPUOffloadPolicy", "CPUOffload")

OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "Adafactor": "adafactor",
    "AdamW8bit": "adamw-8bit",
}
"""Class -> optimizer of a job. For writing, the first name of each holds."""

DTYPES: Mapping[str, TrainingDtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16"}
_TEXTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_BATCH = re.compile(r"BATCH|(?i:global_batch(_size)?)")
_MICRO_BATCH = re.compile(r"((micro|local|per_device(_train)?|train)_?)?batch_size|micro_?batch|mbs", re.IGNORECASE)
_SEQ = re.compile(r"seq(_?len(gth)?)?|max_(seq_)?length|sequence_length", re.IGNORECASE)
_STEPS = re.compile(r"micro_?batches|(grad(ient)?_)?accum(ulation)?_steps", re.IGNORECASE)

_MARK = re.compile(rf"\b({'|'.join((*STYLES, 'parallelize_module', *_FSDP[:2], *_DDP[:1]))})\(")


def recognises(text: str) -> bool:
    """Return whether a text looks like Python with calls of torch's parallelism."""
    return _MARK.search(text) is not None


def read(text: str, devices: int) -> Reading:
    """Return what a script, or the dict of a ``parallelize_module``, says for a number of devices.

    Raises:
        JobError: the text is no Python, or has a pipeline.
    """
    script, notes = Script.parse(text, TITLE), Notes()
    pipelines = [name for name in _PIPELINES if script.calls(name)]
    if pipelines:
        raise JobError(
            f"a pipeline of a script ({pipelines[0]}) is not read.",
            what_to_do="Say the degrees as flags of torchtitan, and check these.",
            field="configuration",
        )
    axes = _axes(script, devices, notes)
    launch = _with_steps(script, _degrees(script, axes, notes), notes)
    if script.defaults:
        notes.assumed.append("options of the script: their defaults")
    return notes.reading(launch, styles=_styles(script))


def _styles(script: Script) -> dict[str, str]:
    """Return key -> name of a style, of all dicts that hold styles."""
    found: dict[str, str] = {}
    for pairs in script.mappings():
        named = {key: script.name_of(value) for key, value in pairs}
        if any(name in STYLES or name in _PREPARES for name in named.values()):
            found |= {key: name for key, name in named.items() if name}
    return found


def _axes(script: Script, devices: int, notes: Notes) -> dict[str, int]:
    """Return the axes of the device mesh; those of unknown size follow from the number of devices."""
    said = _said_axes(script)
    if said is None:
        notes.assumed.append(f"no mesh with sizes is said: one axis of all {devices} devices")
        return {"": devices}
    unknown = [name for name, size in said.items() if size is None]
    known = math.prod(size for size in said.values() if size is not None)
    if unknown and devices % known == 0:
        rest = devices // known
        notes.assumed.append(f"mesh axis {unknown[0]} of {rest}: its size is computed")
        notes.assumed += [f"mesh axis {name} of 1: its size is computed" for name in unknown[1:]]
        return {name: size or (rest if name == unknown[0] else 1) for name, size in said.items()}
    if unknown or known != devices:
        text = " x ".join(f"{name} {size or '?'}" for name, size in said.items())
        advice = divisors(devices) if unknown else f"a product of {devices}"
        notes.faults.append(f"the mesh {text} is not the cluster's {devices} devices: {advice} would do")
    return {name: size or 1 for name, size in said.items()}


def _said_axes(script: Script) -> dict[str, int | None] | None:
    for call in script.calls("init_device_mesh"):
        sizes = script.items(script.argument(call, 1, "mesh_shape"))
        labels = script.value(script.argument(call, 2, "mesh_dim_names"))
        if sizes is None:
            continue
        names = labels if isinstance(labels, tuple) and len(labels) == len(sizes) else range(len(sizes))
        axes = [f"dim {name}" if isinstance(name, int) else str(name) for name in names]
        return {axis: _size(script.value(size)) for axis, size in zip(axes, sizes, strict=True)}
    said = script.constants.get("MESH")
    if isinstance(said, dict) and said and all(_size(size) for size in said.values()):
        return {str(name): size for name, size in said.items()}
    return None


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**31 else None


def _degrees(script: Script, axes: Mapping[str, int], notes: Notes) -> Launch:
    """Return a launch with the degrees of the mesh's axes by what uses them."""
    calls = {
        "tensor": script.calls("parallelize_module"),
        "shard": script.calls(*_FSDP),
        "context": script.calls("context_parallel"),
    }
    uses = {name: [_mesh_axes(script, call, name) for call in found] for name, found in calls.items()}
    left = dict(axes)
    roles: dict[str, list[str]] = {"tensor": [], "context": [], "shard": [], "replicate": []}
    if calls["tensor"] or script.calls(*STYLES):
        roles["tensor"] = _claimed(left, uses["tensor"], ("tp", "tensor", "model"), last=not calls["shard"])
    if calls["context"]:
        roles["context"] = _claimed(left, uses["context"], ("cp", "context"), last=False)
    if calls["shard"]:
        named = [axis for axis in next((found for found in uses["shard"] if found), ()) if axis in left]
        sharding = named or list(left)
        roles["shard"], roles["replicate"] = sharding[-1:], sharding[:-1]
        left = {axis: size for axis, size in left.items() if axis not in sharding}
    if not script.calls(*_DDP) and not roles["shard"]:
        unused = [f"mesh axis {axis} of {size}" for axis, size in left.items() if size > 1]
        notes.assumed += [f"{text}: no call uses it, priced as data parallelism" for text in unused]
    roles["replicate"] += list(left)
    sizes = {role: math.prod(axes[axis] for axis in names) for role, names in roles.items()}
    if script.calls("FullyShardedDataParallel", "FSDP"):
        notes.unpriced.append("FullyShardedDataParallel: priced as fully_shard")
    if script.calls("loss_parallel"):
        notes.unpriced.append("loss_parallel: the loss is priced on gathered logits")
    gathered = [script.keyword(call, "reshard_after_forward") for call in calls["shard"]]
    return Launch(
        replicate=sizes["replicate"],
        shard=sizes["shard"],
        zero=3 if sizes["shard"] > 1 else 0,
        tensor=sizes["tensor"],
        context=sizes["context"],
        sequence_parallel=sizes["tensor"] > 1 and _splits_sequence(script),
        reshard_after_forward=sizes["shard"] == 1 or False not in [script.value(value) for value in gathered if value],
    )


def _splits_sequence(script: Script) -> bool:
    """Return whether norms, or results of row-wise layers, are split over the sequence, which is dim 1."""
    results = [script.keyword(call, "output_layouts") for call in script.calls("RowwiseParallel")]
    shards = [layout for layout in results if isinstance(layout, ast.Call) and script.name_of(layout) == "Shard"]
    dims = [script.value(script.argument(layout, 0, "dim")) for layout in shards]
    return bool(script.calls("SequenceParallel")) or 1 in dims


def _claimed(left: dict[str, int], uses: list[tuple[str, ...]], usual: tuple[str, ...], *, last: bool) -> list[str]:
    """Return, and take from ``left``, the axes that calls name; else one with a usual name, the only or last one."""
    named = [axis for axis in next((found for found in uses if found), ()) if axis in left]
    if not named:
        named = [axis for axis in left if axis in usual] or (list(left)[-1:] if last or len(left) > 1 else [])
    for axis in named:
        del left[axis]
    return named


def _mesh_axes(script: Script, call: ast.Call, use: str) -> tuple[str, ...]:
    """Return the axes that a call names, as in ``mesh["tp"]``; () where it does not say."""
    position = {"tensor": 1, "shard": None, "context": 0}[use]
    keyword = {"tensor": "device_mesh", "shard": "mesh", "context": "mesh"}[use]
    mesh = script.keyword(call, keyword) or script.keyword(call, "device_mesh")
    if mesh is None and position is not None and len(call.args) > position:
        mesh = call.args[position]
    return script.subscripts(mesh)


def _with_steps(script: Script, launch: Launch, notes: Notes) -> Launch:
    """Return ``launch`` with what the script says of a step: its batch, length, dtype, optimizer, recomputation."""
    steps = script.constant(_STEPS)
    micro_batch = next((size for call in script.calls("DataLoader") if (size := _batch_of(script, call))), None)
    micro_batch = micro_batch or script.constant(_MICRO_BATCH)
    batch = script.constant(_BATCH)
    if batch is not None and micro_batch is not None and steps is None:
        steps = max(1, -(-batch // (launch.data * micro_batch)))
    if micro_batch is None and batch is not None:
        together = launch.data * (steps or 1)
        if batch % together:
            parts = f"{steps} micro-batches of {launch.data}" if steps else f"{launch.data}"
            notes.faults.append(f"the batch of {batch} is not split into {parts} ranks: {together} would do")
        micro_batch = max(1, batch // together)
    if micro_batch is None:
        notes.assumed.append("one sequence per rank and micro-batch: the text says no batch")
    size = micro_batch or 1
    return replace(
        launch,
        micro_batch=size,
        batch=None if steps is None else launch.data * size * steps,
        seq=script.constant(_SEQ),
        checkpointing=_checkpointing(script),
        dtype=_dtype(script, notes),
        optimizer=next((short for name, short in OPTIMIZERS.items() if script.calls(name)), "adamw"),
        compiled=any(not _is_of(call, "re") for call in script.calls("compile")),
        offload=bool(script.calls(*_OFFLOADS)),
    )


def _batch_of(script: Script, call: ast.Call) -> int | None:
    size = script.argument(call, 1, "batch_size")
    return None if size is None else _size(script.value(size))


def _is_of(call: ast.Call, module: str) -> bool:
    return isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == module


def _checkpointing(script: Script) -> Checkpointing:
    if script.calls(*_SELECTIVE):
        return "selective"
    return "full" if script.calls(*_CHECKPOINTS) else "none"


def _dtype(script: Script, notes: Notes) -> TrainingDtype:
    for call in script.calls("MixedPrecisionPolicy", "MixedPrecision", "autocast"):
        value = script.keyword(call, "param_dtype") or script.keyword(call, "dtype")
        name = value.attr if isinstance(value, ast.Attribute) else ""
        if name in DTYPES:
            return DTYPES[name]
    notes.assumed.append("bf16 with parameters in float32: no MixedPrecisionPolicy or autocast says the dtype")
    return "bf16"


def write(launch: Launch, model: str) -> str:
    """Return the calls of a script that say ``launch``.

    Raises:
        JobError: calls of torch cannot say it.
    """
    check_sayable(launch, TITLE, SAYS, _reasons(launch))
    axes = {"dp": launch.replicate, "fsdp": launch.shard, "cp": launch.context, "tp": launch.tensor}
    used = {name: size for name, size in axes.items() if size > 1} or {"dp": 1}
    steps = max(1, launch.global_batch // (launch.data * launch.micro_batch))
    names = ", ".join(f'"{name}"' for name in used if name in ("dp", "fsdp"))
    kept = "" if launch.reshard_after_forward else ", reshard_after_forward=False"
    lines = [
        f"# {model} on {launch.ranks} devices with {TITLE}, written by shardplan",
        f"MESH = {used!r}",
        f"MICRO_BATCHES = {steps}",
        f"SEQ = {launch.seq}" if launch.seq is not None else "",
        "mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))",
        'parallelize_module(model, mesh["tp"], styles)' if launch.tensor > 1 else "",
        'context_parallel(mesh["cp"])' if launch.context > 1 else "",
        "norms = SequenceParallel()" if launch.sequence_parallel else "",
        f"fully_shard(block, mesh=mesh[{names}], mp_policy=policy{kept})" if launch.zero == 3 else "",
        "DistributedDataParallel(model)" if launch.zero == 0 and launch.data > 1 else "",
        f"policy = MixedPrecisionPolicy(param_dtype=torch.{_TEXTS[launch.dtype]})",
        *_lines_of(launch),
        f"loader = DataLoader(data, batch_size={launch.micro_batch})",
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _lines_of(launch: Launch) -> Iterator[str]:
    yield f"optimizer = {_says_optimizer(launch)[0]}(parameters)"
    if launch.checkpointing == "selective":
        yield "create_selective_checkpoint_contexts(save_products)"
    if launch.checkpointing != "none":
        yield "checkpoint_wrapper(block)"
    if launch.compiled:
        yield "block.compile()"
    if launch.offload:
        yield "offload = CPUOffloadPolicy()"


def _reasons(launch: Launch) -> list[str]:
    checks = {
        f"ZeRO stage {launch.zero} of {launch.shard} shards": launch.zero != (3 if launch.shard > 1 else 0),
        "reshard_after_forward false without FSDP": launch.shard == 1 and not launch.reshard_after_forward,
        "DDP with tensor parallelism": launch.zero == 0 and launch.data > 1 and launch.tensor > 1,
        f"the dtype {launch.dtype}": launch.dtype not in DTYPES.values(),
        f"the optimizer {launch.optimizer}": launch.optimizer not in OPTIMIZERS.values(),
        f"checkpointing of {launch.checkpointing}": launch.checkpointing not in LIMITS["checkpointing"],
        f"a batch of {launch.global_batch}": launch.global_batch % (launch.data * launch.micro_batch) > 0,
    }
    return [reason for reason, holds in checks.items() if holds]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how torch's own parallelism runs a model, as far as the price depends on it.

    Parameters and states are in float32; FSDP2 gathers in the dtype of compute, and reduces in float32 with each
    micro-batch. Logits are gathered over tensor parallelism.
    """
    result = replace(
        FSDP2,
        data_parallel=replace(
            FSDP2.data_parallel, reshard_after_forward=launch.reshard_after_forward, root_holds_ends=False
        ),
        loss=replace(FSDP2.loss, vocabulary_parallel=False),
    )
    return with_compile(result) if launch.compiled else result


def _says_zero(launch: Launch) -> tuple[str, ...]:
    if launch.data == 1:
        return ()
    return ("fully_shard(block)",) if launch.zero == 3 else ("DistributedDataParallel(model)",)


def _says_optimizer(launch: Launch) -> tuple[str, ...]:
    return (f"torch.optim.{next(name for name, short in OPTIMIZERS.items() if short == launch.optimizer)}",)


def _says_steps(launch: Launch) -> tuple[str, ...]:
    return (f"{max(1, launch.global_batch // (launch.data * launch.micro_batch))} micro-batches a step",)


def _says_checkpointing(launch: Launch) -> tuple[str, ...]:
    texts = {
        "none": "no checkpoint_wrapper",
        "full": "checkpoint_wrapper(block)",
        "selective": "checkpoint_wrapper with create_selective_checkpoint_contexts",
    }
    return (texts.get(launch.checkpointing, launch.checkpointing),)


SAYS = {
    "replicate": flag("mesh axis dp of {}", "replicate"),
    "shard": flag("mesh axis fsdp of {}", "shard"),
    "tensor": flag("mesh axis tp of {}", "tensor"),
    "context": flag("mesh axis cp of {}", "context"),
    "zero": _says_zero,
    "sequence_parallel": lambda launch: (f"{'' if launch.sequence_parallel else 'no '}SequenceParallel() on norms",),
    "micro_batch": flag("batch_size={}", "micro_batch"),
    "batch": _says_steps,
    "seq": lambda launch: () if launch.seq is None else (f"SEQ = {launch.seq}",),
    "checkpointing": _says_checkpointing,
    "dtype": lambda launch: (f"MixedPrecisionPolicy(param_dtype=torch.{_TEXTS.get(launch.dtype, launch.dtype)})",),
    "optimizer": _says_optimizer,
    "compiled": lambda launch: (f"{'' if launch.compiled else 'no '}block.compile()",),
    "reshard_after_forward": lambda launch: (f"reshard_after_forward={launch.reshard_after_forward}",),
    "offload": lambda launch: (f"{'' if launch.offload else 'no '}CPUOffloadPolicy()",),
}

LIMITS = {
    "zero": (0, 3),
    "dtype": tuple(dict.fromkeys(DTYPES.values())),
    "checkpointing": ("none", "full", "selective"),
    "optimizer": tuple(dict.fromkeys(OPTIMIZERS.values())),
}

PYTORCH = Framework(
    name="torch",
    title="torch",
    version=VERSION,
    file="train.py",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    implementation=implementation,
    vocabulary="uneven",
    limits=LIMITS,
)
