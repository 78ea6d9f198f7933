"""torchtitan: its command line, and the TOML files of its releases before 0.3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from api.frameworks.configurations.documents import check_sayable
from api.frameworks.configurations.torchtitan_reader import read, recognises
from api.frameworks.configurations.torchtitan_recipes import Recipe, recipe_of
from api.frameworks.launch import Framework, Launch, flag
from cost_model.configuration.frameworks import FSDP2, with_compile
from cost_model.configuration.implementation import EAGER_LOGIT_NBYTES, Implementation, LossOptions, PipelineOptions

VERSION = "0.3.0"
TITLE = f"torchtitan {VERSION}"

LOSS_PARALLEL_LOGIT_NBYTES = 16.0
"""Bytes per logit where the vocabulary is split: log-softmax, two float32 tensors of its gradient, and their sum
(_nll_loss_and_log_softmax_backward in torch's distributed/tensor/parallel/loss.py)."""

_GRAPHS = "--training.disable_cuda_graphs"
_SUFFIXES = {"fp8": "_float8", "fp4": "_nvfp4"}

DEVICES_PER_NODE = 8


def write(launch: Launch, model: str) -> str:
    """Return a script that runs torchtitan. Its config is one of torchtitan's own where the model is.

    Raises:
        JobError: torchtitan cannot say the launch.
    """
    recipe = recipe_of(model)
    check_sayable(launch, TITLE, SAYS, _reasons(launch, recipe))
    lines = ["#!/bin/bash", f"# {TITLE}: {model} on {launch.ranks} devices, written by shardplan."]
    module, config = ("MODULE", "CONFIG") if recipe is None else (recipe.module, recipe.name)
    if recipe is None:
        lines.append("# Put your package for MODULE, and for CONFIG the function of its config_registry.py that gives")
        lines.append(f"# {model}: torchtitan has no configuration of it.")
    own_dtype = recipe.values.get("dtype", launch.dtype if launch.dtype == "fp32" else "bf16") if recipe else "bf16"
    if launch.dtype != own_dtype and (recipe is not None or launch.dtype in _SUFFIXES):
        config += _SUFFIXES.get(launch.dtype, "_bf16")
        lines.append(
            f"# {config} has to be a function of config_registry.py whose model_registry has the converters of"
        )
        lines.append(f"# {launch.dtype} linears (torchtitan/components/quantization); no flag of torchtitan sets them.")
    nodes = max(1, launch.ranks // DEVICES_PER_NODE)
    lines += [
        f"NNODES=${{NNODES:-{nodes}}}",
        f"NGPU=${{NGPU:-{launch.ranks // nodes}}}",
        'export PYTORCH_ALLOC_CONF="expandable_segments:True"',
        "torchrun --nnodes $NNODES --nproc_per_node $NGPU --rdzv_backend c10d \\",
        '    --rdzv_endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" \\',
        f"    -m torchtitan.train --module {module} --config {config} \\",
    ]
    flags = [text for text in _flags(launch, recipe) if text.startswith("--")]
    lines += [f"    {text} \\" for text in flags]
    return "\n".join([*lines, f"    {_says_checkpointing(launch)[0]}"]) + "\n"


def _flags(launch: Launch, recipe: Recipe | None) -> list[str]:
    """Return the flags of a launch, each once."""
    texts: dict[str, None] = {}
    for say in SAYS.values():
        texts.update(dict.fromkeys(say(launch)))
    if recipe is not None and launch.virtual_stages > 2:
        texts[_layers_per_stage(launch, recipe)] = None
    if not launch.compiled and recipe is not None and "compile.enable_async_tensor_parallel" in recipe.values:
        texts["--compile.no-enable-async-tensor-parallel"] = None
    return list(texts)


def _layers_per_stage(launch: Launch, recipe: Recipe) -> str:
    """Return the flag that makes more than two stages per rank; "": no whole number of layers does."""
    layers, stages = int(recipe.values.get("layers", 0)) + 2, launch.pipeline * launch.virtual_stages
    each = -(-layers // stages)
    name = "--parallelism.pipeline_parallel_layers_per_stage"
    return f"{name} {each}" if -(-layers // each) == stages else ""


def _reasons(launch: Launch, recipe: Recipe | None) -> list[str]:
    """Return why torchtitan cannot say a launch."""
    sharded = launch.shard * launch.context > 1
    per_rank = launch.global_batch // max(1, launch.data)
    stages = launch.virtual_stages
    checks = {
        f"ZeRO stage {launch.zero}": launch.zero != (3 if sharded else 0),
        f"{stages} stages per rank": stages > 2 and (recipe is None or not _layers_per_stage(launch, recipe)),
        "stages per rank without a pipeline": stages > 1 and launch.pipeline == 1,
        "a zero-bubble schedule of one stage per rank": launch.schedule == "zero-bubble" and stages == 1,
        f"the schedule {launch.schedule}": launch.schedule == "interleaved",
        f"a batch of {launch.global_batch} in micro-batches of {launch.micro_batch}": launch.global_batch % launch.data
        > 0
        or per_rank % launch.micro_batch > 0,
        f"the checkpointing {launch.checkpointing}": launch.checkpointing == "attention",
        f"the dtype {launch.dtype}": launch.dtype == "fp16",
        f"the optimizer {launch.optimizer}": launch.optimizer != "adamw",
        "the length of a sequence, which is not said": launch.seq is None,
    }
    return [reason for reason, holds in checks.items() if holds]


def implementation(launch: Launch, arch: str) -> Implementation:
    """Return how torchtitan 0.3 runs a launch, as far as the price depends on it.

    - The loss is computed in 8 chunks (components/loss.py, ChunkedLossWrapper); tensor ranks split the logits.
    - Embedding and head are FSDP groups of their own (distributed/fsdp.py). Its pipeline asks for no outputs.
    - The step is a CUDA graph unless there is a pipeline, or experts are exchanged (trainer.py,
      _validate_cuda_graphs); then gradients stay allocated between steps (zero_grad).
    - Attention is FlexAttention, compiled (models/llama3/__init__.py, model_registry), and context parallelism
      all-gathers keys and values (distributed/context_parallel/api.py): no ring, as in the releases before. Its kernel
      is priced as FlashAttention-2.
    - 8-bit linears have rowwise scales (components/quantization/float8.py).
    """
    base = with_compile(FSDP2) if launch.compiled else FSDP2
    graphed = launch.pipeline == 1 and launch.expert == 1
    kernels = replace(base.kernels, attention="flash2")
    if graphed:
        kernels = replace(kernels, host_ops_per_layer=0, expert_host_ops=0)
    low = base.low_precision
    return replace(
        base,
        kernels=kernels,
        low_precision=replace(low, cast_nbytes=8.0, rescale_nbytes=4.0) if launch.dtype == "fp8" else low,
        experts=replace(base.experts, router_nbytes=4),
        data_parallel=replace(
            base.data_parallel, root_holds_ends=False, reshard_after_forward=launch.reshard_after_forward
        ),
        state=replace(base.state, gradients_persist=graphed),
        loss=_loss(launch, base.loss),
        saving=replace(base.saving, selective_all_to_all=True),
        allocator=replace(base.allocator, expandable_segments=True),
        pipeline=PipelineOptions(preallocates_receives=launch.pipeline > 1),
    )


def _loss(launch: Launch, loss: LossOptions) -> LossOptions:
    """Return the loss: compiled with the model, its logits and their gradient are in 16 bits."""
    if launch.compiled:
        loss = replace(loss, traffic_nbytes=8.0, logit_nbytes=4.0, logit_hole_nbytes=0.0)
    if launch.tensor > 1 and loss.logit_nbytes == EAGER_LOGIT_NBYTES:
        loss = replace(loss, logit_nbytes=LOSS_PARALLEL_LOGIT_NBYTES)
    return replace(loss, chunks=8, input_nbytes=10.0)


def _nothing(launch: Launch) -> tuple[str, ...]:
    return ()


def _switch(name: str, on: bool) -> str:
    section, _, key = name.rpartition(".")
    return f"--{name}" if on else f"--{section}.no-{key.replace('_', '-')}"


def _says_degree(name: str, key: str) -> Callable[[Launch], tuple[str, ...]]:
    """Return how a data-parallel degree is said; with a pipeline, the local batch follows from it."""
    say = flag(f"--parallelism.data_parallel_{key}_degree {{}}", name)
    return lambda launch: (*say(launch), *(_says_batch(launch) if launch.pipeline > 1 else ()))


def _says_pipeline(launch: Launch) -> tuple[str, ...]:
    """Return the degree, and what depends on whether there is a pipeline: batches, and the default of resharding."""
    degree = f"--parallelism.pipeline_parallel_degree {launch.pipeline}"
    piped = (_GRAPHS, *_says_schedule(launch)) if launch.pipeline > 1 else ()
    return (degree, *piped, *_says_batch(launch), *_says_reshard(launch))


def _says_schedule(launch: Launch) -> tuple[str, ...]:
    name = {
        ("gpipe", False): "GPipe",
        ("gpipe", True): "LoopedBFS",
        ("1f1b", True): "Interleaved1F1B",
        ("interleaved", True): "Interleaved1F1B",
        ("zero-bubble", True): "InterleavedZeroBubble",
    }.get((launch.schedule, launch.virtual_stages > 1), "1F1B")
    return (f"--parallelism.pipeline_parallel_schedule {name}",)


def _says_expert(launch: Launch) -> tuple[str, ...]:
    degree = f"--parallelism.expert_parallel_degree {launch.expert}"
    return (degree, _GRAPHS) if launch.expert > 1 else (degree,)


def _says_batch(launch: Launch) -> tuple[str, ...]:
    """Return the batches; a pipeline splits its local batch into micro-batches, and runs once a step."""
    total = f"--training.global_batch_size {-1 if launch.batch is None else launch.batch}"
    if launch.pipeline == 1:
        return f"--training.local_batch_size {launch.micro_batch}", total
    local = launch.global_batch // max(1, launch.data)
    size = f"--parallelism.pipeline_parallel_microbatch_size {launch.micro_batch}"
    return f"--training.local_batch_size {local}", size, total


def _says_checkpointing(launch: Launch) -> tuple[str, ...]:
    return (f"activation-checkpoint:{launch.checkpointing}",)


def _says_dtype(launch: Launch) -> tuple[str, ...]:
    if launch.dtype in _SUFFIXES:
        return (f"a --config whose converters are of {launch.dtype} (torchtitan/components/quantization)",)
    name = "float32" if launch.dtype == "fp32" else "bfloat16"
    return (f"--training.mixed_precision_param {name}",)


def _says_compiled(launch: Launch) -> tuple[str, ...]:
    enable = _switch("compile.enable", launch.compiled)
    return (enable, "--compile.components model,loss") if launch.compiled else (enable,)


def _says_reshard(launch: Launch) -> tuple[str, ...]:
    default = launch.pipeline == 1
    words = {True: "always", False: "never"}
    word = "default" if launch.reshard_after_forward == default else words[launch.reshard_after_forward]
    return (f"--parallelism.fsdp_reshard_after_forward {word}",)


SAYS: Mapping[str, Callable[[Launch], tuple[str, ...]]] = {
    "replicate": _says_degree("replicate", "replicate"),
    "shard": _says_degree("shard", "shard"),
    "zero": _nothing,
    "tensor": flag("--parallelism.tensor_parallel_degree {}", "tensor"),
    "sequence_parallel": lambda launch: (
        _switch("parallelism.enable_sequence_parallel", launch.sequence_parallel or launch.tensor == 1),
    ),
    "pipeline": _says_pipeline,
    "virtual_stages": _says_schedule,
    "schedule": _says_schedule,
    "context": flag("--parallelism.context_parallel_degree {}", "context"),
    "expert": _says_expert,
    "expert_tensor": _nothing,
    "micro_batch": _says_batch,
    "batch": _says_batch,
    "seq": flag("--training.seq_len {}", "seq"),
    "checkpointing": _says_checkpointing,
    "dtype": _says_dtype,
    "compiled": _says_compiled,
    "reshard_after_forward": _says_reshard,
    "offload": lambda launch: (_switch("training.enable_cpu_offload", launch.offload),),
}

TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    version=VERSION,
    file="torchtitan.sh",
    recognises=recognises,
    read=read,
    write=write,
    says=SAYS,
    limits={
        "zero": (0, 3),
        "virtual_stages": (1, 2),
        "schedule": ("1f1b", "gpipe", "zero-bubble"),
        "checkpointing": ("none", "selective", "full"),
        "dtype": ("bf16", "fp32", "fp8", "fp4"),
    },
    implementation=implementation,
    key_value_heads="divided",
    vocabulary="uneven",
    stages="free",
    planners=("ddp", "fsdp", "hsdp", "fsdp-tp", "tp"),
)
"""torchtitan."""
