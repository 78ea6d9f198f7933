"""The launch that Megatron-Core's settings say, by whatever keys: arguments of Megatron-LM, overrides of Bridge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.frameworks.configurations.documents import Section, divisors
from api.frameworks.launch import Launch
from cost_model.configuration.divisibility import Stages
from cost_model.configuration.parallelism import Checkpointing, TrainingDtype

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""``data_parallel_sharding_strategy`` of Megatron-FSDP -> ZeRO stage."""

OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}
"""``optimizer`` -> optimizer of a job: Megatron's Adam decays weights as AdamW does, and its SGD has momentum."""

SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "kv_heads",
    "ffn_hidden_size": "ffn",
    "vocab_size": "vocab",
    "num_experts": "experts",
}
"""Name of a setting -> field of the model's sizes."""

UNPRICED = {
    "grad_reduce_in_bf16": "gradients are priced in 32 bits",
    "optimizer_cpu_offload": "offloading is not priced",
    "cpu_offloading_num_layers": "activations are priced on the device",
    "fine_grained_activation_offloading": "activations are priced on the device",
    "use_precision_aware_optimizer": "optimizer states are priced in 32 bits",
    "fp8_param_gather": "parameters are priced in 16 bits",
    "fp4_param_gather": "parameters are priced in 16 bits",
    "decoder_first_pipeline_num_layers": "stages are priced as equal",
    "decoder_last_pipeline_num_layers": "stages are priced as equal",
    "num_layers_in_first_pipeline_stage": "stages are priced as equal",
    "num_layers_in_last_pipeline_stage": "stages are priced as equal",
    "pipeline_model_parallel_layout": "stages are priced as equal",
    "cuda_graph_impl": "launches of kernels are priced without CUDA graphs",
    "enable_cuda_graph": "launches of kernels are priced without CUDA graphs",
    "external_cuda_graph": "launches of kernels are priced without CUDA graphs",
    "overlap_moe_expert_parallel_comm": "all-to-alls of experts are priced as exposed",
    "delay_wgrad_compute": "weight gradients are priced with backward",
    "moe_enable_deepep": "priced as plain all-to-all",
    "moe_expert_capacity_factor": "no token is priced as dropped",
    "rampup_batch_size": "priced at the full batch",
    "mtp_num_layers": "layers of multi-token prediction are not priced",
    "use_nccl_ub": "collectives are priced without user buffers",
    "nccl_ub": "collectives are priced without user buffers",
    "fsdp_double_buffer": "its buffers are not priced",
    "distribute_saved_activations": "recomputed inputs are priced whole on each tensor rank",
    "fp32_residual_connection": "residuals are priced in 16 bits",
    "first_last_layers_bf16": "all layers are priced in low precision",
    "use_legacy_models": "priced as Megatron-Core's models",
}
"""Setting -> why its value is not in the price."""

_OFF = (False, "false", "False", "None", "none", "0", 0, "[]", "")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by Megatron's names, whatever the keys are.

    Attributes:
        section: values by key, and the notes.
        key: name of a setting -> the key that says it.
        lacks_sequence_parallel: whether sequence parallelism is left out silently where there is no tensor parallelism;
            else it is refused.
    """

    section: Section
    key: Callable[[str], str]
    lacks_sequence_parallel: bool = True

    def has(self, name: str) -> bool:
        """Return whether a setting is there."""
        return self.key(name) in self.section

    def text(self, name: str, default: str = "") -> str:
        """Return a setting as text."""
        return str(self.section.values[self.key(name)]) if self.has(name) else default

    def number(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a whole number."""
        return self.section.number(self.key(name), default, least=least)

    def on(self, name: str) -> bool:
        """Return a boolean that is off by default."""
        return self.section.switch(self.key(name), False)

    def fault(self, text: str) -> None:
        """Note what Megatron refuses."""
        self.section.notes.faults.append(text)

    def assume(self, text: str) -> None:
        """Note what was taken."""
        self.section.notes.assumed.append(text)


def launch_of(settings: Settings, devices: int) -> Launch:
    """Return the launch that settings say; what is wrong goes to their notes."""
    tensor, pipeline, context = _degrees(settings, devices)
    data = max(1, devices // (tensor * pipeline * context))
    zero, replicate = _sharding(settings, data, pipeline)
    expert, expert_tensor = _experts(settings, data * context * tensor, tensor)
    micro_batch, batch = _batches(settings, data)
    sequence = _sequence_parallel(settings, tensor)
    virtual = _virtual_stages(settings, pipeline)
    _interleaved(settings, pipeline, virtual, (batch or micro_batch * data) // (micro_batch * data))
    _overlaps(settings, zero, sequence)
    for name, why in UNPRICED.items():
        settings.section.leave(settings.key(name), because=why, unless=_OFF)
    return Launch(
        replicate=replicate,
        shard=data // replicate,
        zero=zero,
        tensor=tensor,
        sequence_parallel=sequence,
        pipeline=pipeline,
        virtual_stages=virtual,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        micro_batch=micro_batch,
        batch=batch,
        seq=settings.number("seq_length", 0) if settings.has("seq_length") else None,
        checkpointing=_checkpointing(settings),
        dtype=dtype_of(settings),
        optimizer=settings.section.choice(settings.key("optimizer"), OPTIMIZERS, "adam"),
        compiled=True,
        reshard_after_forward=not settings.on("torch_fsdp2_no_reshard_after_forward"),
        offload=settings.on("optimizer_cpu_offload"),
    )


def sizes_of(settings: Settings) -> dict[str, tuple[int, str]]:
    """Return what settings say of the model, as in `api.frameworks.launch.Reading`."""
    return {
        field: (settings.number(name, 1), settings.key(name)) for name, field in SIZES.items() if settings.has(name)
    }


def stages_of(settings: Settings) -> Stages:
    """Return how layers may split into pipeline stages."""
    uneven = ("pipeline_model_parallel_layout", *(name for name in UNPRICED if name.endswith("_pipeline_num_layers")))
    uneven += tuple(name for name in UNPRICED if name.startswith("num_layers_in_"))
    if any(settings.has(name) for name in uneven):
        return "free"
    ends = [settings.on(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss")]
    return "ends" if all(ends) else "free" if any(ends) else "even"


def _degrees(settings: Settings, devices: int) -> tuple[int, int, int]:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    degrees = [settings.number(name, 1) for name in names]
    if devices % (degrees[0] * degrees[1] * degrees[2]):
        _refuse(settings, dict(zip(names, degrees, strict=True)), devices)
    return degrees[0], degrees[1], degrees[2]


def _refuse(settings: Settings, degrees: dict[str, int], devices: int) -> None:
    product = math.prod(degrees.values())
    factors = [f"{settings.key(name)} {degree}" for name, degree in degrees.items() if degree > 1]
    is_product = f" is {product}, which" if len(factors) > 1 else ""
    settings.fault(
        f"{' x '.join(factors)}{is_product} does not divide {devices} devices ({divisors(devices)} would do)"
    )


def _sharding(settings: Settings, data: int, pipeline: int) -> tuple[int, int]:
    """Return the ZeRO stage and the replicas."""
    zero = 1 if settings.on("use_distributed_optimizer") else 0
    instances = settings.number("num_distributed_optimizer_instances", 1)
    if settings.on("use_torch_fsdp2"):
        _torch_fsdp2(settings, pipeline)
        zero, instances = 3, 1
    elif settings.on("use_megatron_fsdp"):
        key = settings.key("data_parallel_sharding_strategy")
        zero = settings.section.choice(key, STRATEGIES, "no_shard")
        if settings.text("ckpt_format", "fsdp_dtensor") != "fsdp_dtensor":
            settings.fault(
                f"{settings.key('ckpt_format')} {settings.text('ckpt_format')} does not run with "
                f"{settings.key('use_megatron_fsdp')} (fsdp_dtensor would do)"
            )
    if data % instances:
        settings.fault(
            f"{settings.key('num_distributed_optimizer_instances')} {instances} does not divide {data} data-parallel "
            f"ranks ({divisors(data)} would do)"
        )
        instances = 1
    return zero, instances if zero else data


def _torch_fsdp2(settings: Settings, pipeline: int) -> None:
    refused = {
        "pipeline_model_parallel_size": pipeline > 1,
        "expert_model_parallel_size": settings.number("expert_model_parallel_size", 1) > 1,
        "use_distributed_optimizer": settings.on("use_distributed_optimizer"),
        "fp16": settings.on("fp16"),
    }
    for name, is_refused in refused.items():
        if is_refused:
            settings.fault(f"{settings.key('use_torch_fsdp2')} does not run with {settings.key(name)}")


def _experts(settings: Settings, ranks: int, tensor: int) -> tuple[int, int]:
    """Return the ranks that experts are spread over, and those that split each: the tensor ranks by default."""
    name, split = "expert_model_parallel_size", "expert_tensor_parallel_size"
    expert = settings.number(name, 1)
    has_experts = expert > 1 or settings.number("num_experts", 0, least=0) > 0
    width = settings.number(split, tensor if has_experts else 1)
    if expert > 1 and settings.has("num_layers") and not settings.has("num_experts"):
        settings.fault(f"{settings.key(name)} {expert} needs {settings.key('num_experts')}")
    if ranks % (expert * width):
        what = f"{settings.key(name)} {expert}" + (f" x {settings.key(split)} {width}" if width > 1 else "")
        legal = divisors(ranks // width) if ranks % width == 0 else divisors(ranks)
        settings.fault(f"{what} does not divide the {ranks} ranks of a pipeline stage ({legal} would do)")
        return 1, 1
    return expert, width


def _batches(settings: Settings, data: int) -> tuple[int, int | None]:
    name, total = "micro_batch_size", "global_batch_size"
    if not settings.has(name):
        settings.assume(f"{settings.key(name)} 1: it is not said")
    micro_batch = settings.number(name, 1)
    if not settings.has(total):
        return micro_batch, None
    together = micro_batch * data
    batch = settings.number(total, together)
    if batch % together:
        near = [batch // together * together, (batch // together + 1) * together]
        settings.fault(
            f"{settings.key(total)} {batch} is no multiple of {settings.key(name)} {micro_batch} x {data} "
            f"data-parallel ranks ({' or '.join(str(each) for each in near if each)} would do)"
        )
        batch = max(near[0], together)
    return micro_batch, batch


def _sequence_parallel(settings: Settings, tensor: int) -> bool:
    key, degree = settings.key("sequence_parallel"), settings.key("tensor_model_parallel_size")
    on = settings.on("sequence_parallel")
    if on and tensor == 1 and settings.lacks_sequence_parallel:
        settings.assume(f"{key} has no effect with {degree} 1")
    elif on and tensor == 1:
        settings.fault(f"{key} needs {degree} of 2 or more")
    elif not on and tensor > 1 and settings.number("num_experts", 0, least=0):
        settings.fault(f"{degree} {tensor} with {settings.key('num_experts')} needs {key}")
    return on and tensor > 1


def _virtual_stages(settings: Settings, pipeline: int) -> int:
    layers, stages = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
    said = [name for name in (layers, stages, "pipeline_model_parallel_layout") if settings.has(name)]
    if len(said) > 1:
        settings.fault(f"{' and '.join(settings.key(name) for name in said)} exclude each other")
    virtual = 1
    if settings.has(stages):
        virtual = settings.number(stages, 1)
    elif settings.has(layers):
        virtual = _by_layers(settings, layers, pipeline)
    if virtual > 1 and pipeline == 1:
        name, degree = stages if settings.has(stages) else layers, settings.key("pipeline_model_parallel_size")
        settings.fault(f"{settings.key(name)} {settings.text(name)} needs {degree} of 2 or more")
        return 1
    return virtual


def _interleaved(settings: Settings, pipeline: int, virtual: int, micro_batches: int) -> None:
    """Note that a pipeline with virtual stages runs groups of as many micro-batches as it has ranks."""
    name = "microbatch_group_size_per_virtual_pipeline_stage"
    if virtual > 1 and micro_batches % pipeline and not settings.has(name):
        many = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
        settings.fault(
            f"{settings.key('global_batch_size')} gives {many}, and virtual stages need a multiple of "
            f"{settings.key('pipeline_model_parallel_size')} {pipeline}"
        )


def _by_layers(settings: Settings, name: str, pipeline: int) -> int:
    each, total = settings.number(name, 1), settings.number("num_layers", 0, least=0)
    for end in ("embedding", "loss"):
        total += settings.on(f"account_for_{end}_in_pipeline_split")
    if not settings.has("num_layers"):
        settings.assume(f"{settings.key(name)}: one chunk a rank, as {settings.key('num_layers')} is not said")
        return 1
    if total % pipeline == 0 and total // pipeline % each:
        settings.fault(
            f"{settings.key(name)} {each} does not divide the {total // pipeline} layers of a pipeline rank "
            f"({divisors(total // pipeline)} would do)"
        )
        return 1
    return max(1, total // pipeline // each)


def _overlaps(settings: Settings, zero: int, sequence: bool) -> None:
    reduce, gather = "overlap_grad_reduce", "overlap_param_gather"
    fsdp = settings.on("use_megatron_fsdp") or settings.on("use_torch_fsdp2")
    if settings.on(gather) and not zero:
        settings.fault(f"{settings.key(gather)} needs {settings.key('use_distributed_optimizer')}")
    if settings.on(gather) and not settings.on(reduce):
        settings.fault(f"{settings.key(gather)} needs {settings.key(reduce)}")
    if not settings.on(reduce) and not fsdp:
        settings.assume(f"{settings.key(reduce)} is not said: gradients are priced as reduced during backward")
    if settings.on("tp_comm_overlap") and not sequence:
        settings.fault(f"{settings.key('tp_comm_overlap')} needs {settings.key('sequence_parallel')}")


def _checkpointing(settings: Settings) -> Checkpointing:
    """Return what is recomputed; selective recomputation is of attention unless modules are said."""
    name, method, count = "recompute_granularity", "recompute_method", "recompute_num_layers"
    granularity = "selective" if settings.on("recompute_activations") else settings.text(name, "none")
    if granularity not in ("none", "selective", "full"):
        settings.fault(f"{settings.key(name)} {granularity} is neither selective nor full")
        return "none"
    if granularity == "none":
        return "none"
    if granularity == "selective":
        for other in (method, count):
            if settings.has(other):
                settings.fault(f"{settings.key(other)} does not go with {settings.key(name)} selective")
        modules = settings.text("recompute_modules", "core_attn").strip("[]").replace(",", " ").replace('"', "")
        if set(modules.replace("'", "").split()) != {"core_attn"}:
            settings.section.notes.unpriced.append(
                f"{settings.key('recompute_modules')}: priced as if attention were recomputed"
            )
        return "attention"
    for other, legal in ((method, "uniform or block"), (count, "1")):
        if not settings.has(other):
            settings.fault(f"{settings.key(name)} full needs {settings.key(other)} ({legal} would do)")
    how = settings.text(method, "uniform")
    if how not in ("uniform", "block"):
        settings.fault(f"{settings.key(method)} {how} is neither uniform nor block")
    if (how, settings.number(count, 1)) != ("uniform", 1):
        settings.section.notes.unpriced.append(f"{settings.key(count)}: priced as if each layer were recomputed")
    return "full"


def dtype_of(settings: Settings) -> TrainingDtype:
    """Return the dtype of GEMMs."""
    pairs: Mapping[str, TrainingDtype] = {"fp4_format": "fp4", "fp8_format": "fp8", "fp16": "fp16", "bf16": "bf16"}
    said = [name for name in pairs if settings.text(name, "false").lower() not in ("false", "none")]
    for first, second in (("fp4_format", "fp8_format"), ("fp16", "bf16")):
        if first in said and second in said:
            settings.fault(f"{settings.key(first)} and {settings.key(second)} exclude each other")
    return pairs[said[0]] if said else "fp32"
