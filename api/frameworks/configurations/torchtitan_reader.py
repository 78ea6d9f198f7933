"""Reads torchtitan's configurations: command lines of 0.3, and TOML files of the releases before."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from api.frameworks.configurations.documents import Notes, Section, closest, divisors, known_keys
from api.frameworks.configurations.flags import TORCHRUN_FLAG, read_flags, read_variables
from api.frameworks.configurations.torchtitan_keys import OFF, RENAMED, UNPRICED
from api.frameworks.configurations.torchtitan_recipes import Recipe, recipes
from api.frameworks.launch import Launch, Reading
from cost_model.configuration.divisibility import alternatives
from cost_model.configuration.parallelism import Checkpointing, Schedule, TrainingDtype
from planner.errors import JobError

SCHEDULES: Mapping[str, tuple[Schedule, int]] = {
    "1F1B": ("1f1b", 1),
    "GPipe": ("gpipe", 1),
    "Interleaved1F1B": ("1f1b", 2),
    "LoopedBFS": ("gpipe", 2),
    "InterleavedZeroBubble": ("zero-bubble", 2),
    "ZBVZeroBubble": ("zero-bubble", 2),
    "DualPipeV": ("zero-bubble", 2),
}
"""Schedule -> (`Launch.schedule`, stages per rank where layers per stage are not said)."""

MODES: Mapping[str, Checkpointing] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "memory-budget": "selective",
    "memory_budget": "selective",
}
RESHARD = {"default": None, "always": True, "never": False}

_ENDS = ("first", "last")
_POLICY = re.compile(r"\bactivation[-_]checkpoint:([\w-]+)")


def recognises(text: str) -> bool:
    """Return whether a text looks like torchtitan's flags or TOML."""
    if re.search(r"torchtitan\.train\b|run_train\.sh|--(parallelism|training|activation[-_]checkpoint)\.\w", text):
        return True
    section = r"^\s*\[(training|parallelism|activation_checkpoint|experimental)\]\s*(#.*)?$"
    return re.search(section, text, re.MULTILINE) is not None


def read(text: str, devices: int) -> Reading:
    """Return what a command line or a TOML file says for a number of devices.

    Raises:
        JobError: the text is no valid TOML, although it has its sections.
    """
    notes = Notes()
    is_toml = re.search(r"^\s*\[[A-Za-z_.]+\]\s*(#.*)?$", text, re.MULTILINE) is not None
    given = dict(_toml(text) if is_toml else _flags(text))
    if not is_toml and not given:
        raise JobError("the text has no flag of torchtitan.", what_to_do="Give its command line, or its TOML file.")
    _unknown(given, notes)
    _translate(given, notes)
    recipe = _recipe(given, notes)
    root = Section({**(recipe.values if recipe else {}), **given}, notes)
    launch = _launch(root, devices, is_toml=is_toml, recipe=recipe)
    for key, why in UNPRICED.items():
        root.leave(key, because=why, unless=OFF)
    if str(root.values.get("training.dtype", "float32")) == "bfloat16":
        notes.unpriced.append("training.dtype bfloat16: parameters and states are priced in 32 bits")
    version = re.search(r"torchtitan[ =]+v?(\d+\.\d+(?:\.\d+)?)", text)
    return notes.reading(
        launch,
        sizes=recipe.sizes if recipe else {},
        version=version[1] if version else None,
    )


def _toml(text: str) -> Iterator[tuple[str, Any]]:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
        raise JobError(f"The torchtitan file is not valid TOML: {error}.", what_to_do="Correct the file.") from error
    yield from _leaves(document, "")


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield name, value


def _flags(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a command line; MODULE and CONFIG are those of run_train.sh."""
    for name, value in read_variables(text).items():
        if name in ("MODULE", "CONFIG") and "run_train.sh" in text:
            yield name.lower(), value
    policies = _POLICY.findall("\n".join(line.partition("#")[0] for line in text.splitlines()))
    if policies:
        yield "activation_checkpoint.mode", policies[-1]
    for flag, words_of_flag in read_flags(text):
        if not flag.startswith("--") or (TORCHRUN_FLAG.fullmatch(flag) and "." not in flag and flag != "--module"):
            continue
        section, _, key = flag[2:].replace("-", "_").rpartition(".")
        words = [word for word in (words_of_flag or "").split(" ") if word and not _POLICY.fullmatch(word)]
        no = key.startswith("no_") and f"{section}.{key[3:]}" in known_keys("torchtitan")
        name = ".".join(part for part in (section, key[3:] if no else key) if part)
        yield name, "false" if no else (" ".join(words) or "true")


def _unknown(given: Mapping[str, Any], notes: Notes) -> None:
    today = known_keys("torchtitan")
    known = today | known_keys("torchtitan_older")
    for key in given:
        if key not in known and not any(key.startswith(name[:-1]) for name in today if name.endswith(".*")):
            notes.faults.append(f"{key} is not a key of torchtitan{closest(key, today)}")


def _translate(given: dict[str, Any], notes: Notes) -> None:
    """Rename the keys of older releases. Before 2025-04, a pipeline had as many micro-batches as ranks by default."""
    degree, count = "experimental.pipeline_parallel_degree", "experimental.pipeline_parallel_microbatches"
    if degree in given and count not in given:
        given["parallelism.pipeline_parallel_microbatches"] = given[degree]
    renamed = [(old, new) for old, new in RENAMED.items() if old in given and new not in given]
    for old, new in renamed:
        given[new] = given.pop(old)
    if renamed:
        names = ", ".join(f"{old} is {new} now" for old, new in renamed)
        notes.assumed.append(f"keys of an older release: {names}")


def _recipe(given: Mapping[str, Any], notes: Notes) -> Recipe | None:
    """Return the recipe that --config names, or of which a TOML file names the flavor: of that, only the sizes."""
    known = recipes()
    if "config" in given:
        recipe = known.get(str(given["config"]))
        if recipe is None:
            notes.assumed.append(
                f"--config {given['config']} is not known: what it sets is taken to be torchtitan's defaults"
            )
        elif "module" in given and str(given["module"]).rpartition(".")[2] != recipe.module:
            notes.faults.append(f"--module {given['module']} has no config {recipe.name}; {recipe.module} has it")
        return recipe
    flavor = f"{given.get('model.name', '')}_{given.get('model.flavor', '')}".lower().replace("-", "_")
    found = known.get(flavor.replace(".", "_"))
    sizes = {*(found.sizes if found else ()), "experts"}
    return Recipe(found.name, found.module, {k: v for k, v in found.values.items() if k in sizes}) if found else None


def _launch(root: Section, devices: int, *, is_toml: bool, recipe: Recipe | None) -> Launch:
    replicate, shard, context, tensor, pipeline = _degrees(root, devices)
    sequence = tensor > 1 and root.switch("parallelism.enable_sequence_parallel", True)
    seq = _default(root, "training.seq_len", 2048)
    schedule, virtual = _pipeline(root, pipeline, recipe)
    micro_batch, batch = _batches(root, replicate * shard, pipeline, is_toml=is_toml)
    expert, expert_tensor = _experts(root, shard * context * tensor, tensor)
    if not is_toml:
        _graphs(root, pipeline, expert)
    reshard = root.choice("parallelism.fsdp_reshard_after_forward", RESHARD, "default")
    compiled, checkpointing = _compiled(root), _checkpointing(root)
    return Launch(
        replicate=replicate,
        shard=shard,
        zero=3 if shard * context > 1 else 0,
        tensor=tensor,
        sequence_parallel=sequence,
        pipeline=pipeline,
        virtual_stages=virtual,
        schedule=schedule,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        micro_batch=micro_batch,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        dtype=_dtype(root),
        optimizer="adam" if str(root.values.get("optimizer.name", "")).lower() == "adam" else "adamw",
        compiled=compiled,
        reshard_after_forward=pipeline == 1 if reshard is None else reshard,
        offload=root.switch("training.enable_cpu_offload", False),
    )


def _default(root: Section, key: str, default: int) -> int:
    if key not in root:
        root.notes.assumed.append(f"{key} {default}: the default")
    return root.number(key, default)


def _degrees(root: Section, devices: int) -> tuple[int, int, int, int, int]:
    """Return the degrees of replicas, shards, context, tensor and pipeline parallelism: of ``devices`` in all."""
    names = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
    keys = {f"parallelism.{name}_degree": root.number(f"parallelism.{name}_degree", 1) for name in names}
    key = "parallelism.data_parallel_shard_degree"
    value = root.values.get(key, -1)
    shard = -1 if str(value) == "-1" else root.number(key, -1)
    rest, others = 1, []
    for name, degree in keys.items():
        rest *= degree
        if degree > 1:
            others.append(f"{name} {degree}")
    product = " x ".join(others)
    if devices % rest:
        root.notes.faults.append(
            f"{product} is {rest}, which does not divide {devices} devices ({divisors(devices)} would do)"
        )
    elif shard != -1 and rest * shard != devices:
        both = " x ".join([f"{key} {shard}", *others])
        root.notes.faults.append(
            f"{both} is {rest * shard}, and there are {devices} devices ({key} {devices // rest} or -1 would do)"
        )
    replicate, context, tensor, pipeline = keys.values()
    return replicate, max(1, devices // rest), context, tensor, pipeline


def _pipeline(root: Section, pipeline: int, recipe: Recipe | None) -> tuple[Schedule, int]:
    """Return the schedule and the stages per rank."""
    key, per_stage = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_layers_per_stage"
    schedule, stages = root.choice(key, SCHEDULES, "1F1B")
    if pipeline == 1:
        if per_stage in root:
            root.notes.faults.append(f"{per_stage} needs parallelism.pipeline_parallel_degree of 2 or more")
        return "1f1b", 1
    if per_stage not in root:
        return schedule, stages
    if recipe is None or "layers" not in recipe.values:
        root.notes.assumed.append(f"{per_stage}: {stages} stages per rank, as the model's layers are not said")
        return schedule, stages
    less = sum(root.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, least=0) for end in _ENDS)
    layers = int(recipe.values["layers"]) + less
    found = -(-layers // root.number(per_stage, 1))
    if found % pipeline or (stages == 1) != (found == pipeline):
        legal = [each for each in range(1, layers + 1) if _stages_fit(-(-layers // each), pipeline, stages)]
        needs = f"{pipeline}" if stages == 1 else f"a multiple of {pipeline}, at least {2 * pipeline}"
        root.notes.faults.append(
            f"{per_stage} {root.values[per_stage]} gives {found} stages, and {key} {root.values.get(key, '1F1B')} on "
            f"{pipeline} ranks needs {needs} ({alternatives(legal) if legal else 'no value'} would do)"
        )
        return schedule, stages
    return schedule, found // pipeline


def _stages_fit(found: int, pipeline: int, stages: int) -> bool:
    return found == pipeline if stages == 1 else found % pipeline == 0 and found >= 2 * pipeline


def _batches(root: Section, data: int, pipeline: int, *, is_toml: bool) -> tuple[int, int | None]:
    """Return the sequences of a micro-batch and of the global batch."""
    key, total = "training.local_batch_size", "training.global_batch_size"
    local = _default(root, key, 8)
    micro_batch = local if pipeline == 1 else _pipeline_micro_batch(root, local, pipeline, is_toml=is_toml)
    together = local * data
    value = root.values.get(total, -1)
    if str(value) == "-1":
        return micro_batch, None if micro_batch == local else together
    batch = root.number(total, together)
    if batch % together:
        near = " or ".join(
            str(each) for each in (batch // together * together, (batch // together + 1) * together) if each
        )
        root.notes.faults.append(
            f"{total} {batch} is no multiple of {key} {local} x {data} data-parallel ranks ({near} would do)"
        )
        return micro_batch, together
    if pipeline > 1 and batch > together:
        root.notes.unpriced.append(f"{total}: the pipeline drains {batch // together} times a step")
    return micro_batch, batch


def _pipeline_micro_batch(root: Section, local: int, pipeline: int, *, is_toml: bool) -> int:
    size, count = "parallelism.pipeline_parallel_microbatch_size", "parallelism.pipeline_parallel_microbatches"
    if is_toml and count in root:
        number = root.number(count, pipeline)
        if local % number:
            root.notes.faults.append(
                f"{count} {number} does not divide training.local_batch_size {local} ({divisors(local)} would do)"
            )
        return max(1, local // number)
    micro_batch = root.number(size, 1)
    if local % micro_batch:
        root.notes.faults.append(
            f"{size} {micro_batch} does not divide training.local_batch_size {local} ({divisors(local)} would do)"
        )
        return 1
    return micro_batch


def _experts(root: Section, ranks: int, tensor: int) -> tuple[int, int]:
    """Return the ranks that experts are spread over, and those that split each expert.

    Without expert parallelism tensor parallelism splits experts; with it, since 0.3, it does not.
    """
    key, split = "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"
    expert = root.number(key, 1)
    if expert == 1:
        return 1, tensor if "experts" in root.values or split in root else 1
    width = root.number(split, 1)
    if width not in (1, tensor):
        root.notes.faults.append(f"{split} {width} is neither 1 nor parallelism.tensor_parallel_degree {tensor}")
        width = 1
    if ranks % (expert * width):
        root.notes.faults.append(
            f"{key} {expert} does not divide {ranks} ranks of data shards, context and tensor parallelism "
            f"({divisors(ranks // width)} would do)"
        )
        return 1, 1
    return expert, width


def _graphs(root: Section, pipeline: int, expert: int) -> None:
    """Note what does not run as a CUDA graph, which a step of 0.3 is unless that is disabled."""
    key = "training.disable_cuda_graphs"
    if root.switch(key, False):
        return
    if pipeline > 1:
        root.notes.faults.append(f"parallelism.pipeline_parallel_degree {pipeline} needs --{key}")
    if expert > 1 and not str(root.values.get("config", "")).endswith(("hybridep", "minimal_async_ep")):
        root.notes.faults.append(f"parallelism.expert_parallel_degree {expert} needs --{key}")


def _compiled(root: Section) -> bool:
    enabled = root.switch("compile.enable", False)
    components = root.values.get("compile.components", "model,loss")
    has_model = "model" in (components if isinstance(components, list) else re.split(r"[ ,]+", str(components)))
    if not (enabled and has_model) and root.switch("compile.enable_async_tensor_parallel", False):
        root.notes.faults.append("compile.enable_async_tensor_parallel needs compile.enable with the component model")
    return enabled and has_model


def _checkpointing(root: Section) -> Checkpointing:
    key, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode = str(root.values.get(key, "selective")).lower()
    checkpointing = root.choice(key, MODES, "selective")
    if mode in ("memory-budget", "memory_budget"):
        root.notes.unpriced.append(f"{key} {mode}: priced as selective")
        if not _compiled(root):
            root.notes.faults.append(f"{key} {mode} needs compile.enable with the component model")
    every = str(root.values.get(option, "op"))
    if mode == "selective" and every == "1":
        return "full"
    if mode == "selective" and every != "op":
        root.notes.unpriced.append(f"{option} {every}: priced as op")
    return checkpointing


def _dtype(root: Section) -> TrainingDtype:
    values = root.values
    if "dtype" in values:
        return "fp4" if values["dtype"] == "fp4" else "fp8"
    config = str(values.get("config", ""))
    converters = str(values.get("model.converters", ""))
    older = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.fp8_linear")
    if config.endswith("nvfp4"):
        return "fp4"
    if config.endswith(("float8", "mxfp8")) or "float8" in converters or "mx" in converters:
        return "fp8"
    if any(str(values.get(key, "false")).lower() not in ("false", "") for key in older):
        return "fp8"
    return "fp32" if str(values.get("training.mixed_precision_param", "bfloat16")) == "float32" else "bf16"
