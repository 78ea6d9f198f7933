"""The price of one parallel configuration of a model, from the model's config only: no plan, no trace, no torch.

``shardplan estimate MODEL --cluster C --mesh dp=2,fsdp=8,tp=4,pp=2,cp=1,ep=1 --micro-batch 1 --ac full --sp``
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from api.requests.model_configs import ModelConfig, find_config
from cost_model.configuration.divisibility import uneven_splits
from cost_model.configuration.implementation import (
    EAGER_LOGIT_NBYTES,
    EAGER_LOSS_TRAFFIC_NBYTES,
    AllocatorOptions,
    DataParallelOptions,
    Implementation,
    KernelOptions,
    LossOptions,
    SavingOptions,
    StateOptions,
    TensorParallelOptions,
)
from cost_model.configuration.memory import ROLES, StepMemory, step_memory
from cost_model.configuration.parallelism import Checkpointing, ParallelSpec, Schedule, TrainingDtype
from cost_model.configuration.step import StepTime, step_time
from cost_model.configuration.transformer import Experts, MultiHeadLatentAttention, TransformerSpec
from cost_model.hardware.cluster import ClusterError, ClusterSpec
from cost_model.kernels.optimizers import find_optimizer
from planner.errors import ClusterInputError, JobError, MeshError, ModelError

AXES = ("dp", "fsdp", "tp", "pp", "cp", "ep")
PLAIN_MLP = ("gpt2", "gpt_neox", "bert", "roberta", "opt", "falcon")
UNKNOWN = ("t5", "vit", "bart", "mamba", "mamba2", "jamba")
_DEGREE = re.compile(r"[0-9]{1,300}")


@dataclass(frozen=True, kw_only=True)
class PricedConfiguration:
    """A parallel configuration with its step time and memory."""

    model: str
    spec: TransformerSpec
    parallel: ParallelSpec
    cluster: ClusterSpec
    time: StepTime
    memory: StepMemory

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.parallel.global_batch * self.parallel.seq / self.time.total_s / self.parallel.ranks

    @property
    def model_flops_share(self) -> float:
        """MFU: FLOP/s without recomputation, over the devices' bf16 peak (fp32 peak where bf16 has none)."""
        peak = self.cluster.device.peak_flops
        flops = self.spec.model_flops(self.parallel.global_batch * self.parallel.seq, self.parallel.seq)
        return flops / self.time.total_s / self.parallel.ranks / peak.get("bf16", peak["fp32"])

    @property
    def fits(self) -> bool:
        """Whether the peak, with CUDA context, NCCL buffers and fragmentation, fits in a device's memory."""
        return self.memory.device <= self.cluster.memory_bytes

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, in seconds and bytes."""
        return {
            "model": self.model,
            "cluster": self.cluster.name,
            "parameters": self.spec.parameters,
            "step_time_s": self.time.total_s,
            "parts_s": {name: getattr(self.time, name) for name in self.time.__dataclass_fields__},
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "model_flops_share": self.model_flops_share,
            "fits": self.fits,
            "memory_bytes": {
                "allocated": self.memory.allocated,
                "reserved": self.memory.reserved,
                "device": self.memory.device,
                "peak": self.memory.peak.name,
                **{role: getattr(self.memory.peak, role) for role in ROLES},
            },
            "timeline_bytes": {phase.name: phase.allocated for phase in self.memory.phases},
        }


def price_configuration(
    model: str | Mapping[str, Any],
    *,
    cluster: str | Mapping[str, Any],
    mesh: str | Mapping[str, int],
    micro_batch: int = 1,
    batch: int | None = None,
    seq: int = 4096,
    ac: str = "none",
    sequence_parallel: bool = False,
    virtual_stages: int = 1,
    schedule: str = "1f1b",
    dtype: str = "bf16",
    optimizer: str = "adamw",
    compiled: bool = True,
    allow_local: bool = True,
) -> PricedConfiguration:
    """Return the price of one configuration.

    Args:
        model: a preset, a config.json's path, or ``{"hf_config": {...}}``.
        cluster: a name such as ``2x8xh100-sxm-80gb``, a file, or an object with figures.
        mesh: degrees by axis, such as ``"fsdp=8,tp=4"``; axes that are left out have degree 1. ``ep`` is no axis of
            its own: experts are spread over the ranks of dp, fsdp and cp.
        micro_batch: sequences per data-parallel rank and micro-batch.
        batch: sequences of the global batch; None: one micro-batch for each data-parallel rank.
        seq: tokens in a sequence.
        ac: none, selective (op policy), attention or full.
        compiled: whether element-wise chains are fused and the loss is compiled.

    Raises:
        ModelError: the model is no stack of equal transformer layers, or its config lacks a dimension.
        ClusterInputError: the cluster cannot be read.
        MeshError: the degrees do not fit the cluster or the batch.
        JobError: another value of the configuration is invalid.
    """
    config = find_config(model, allow_local=allow_local)
    if config is None:
        raise ModelError("a factory has no config to read dimensions from.", what_to_do="Give a preset or config.json.")
    try:
        spec = transformer_of(config)
    except (ValueError, ArithmeticError) as error:
        raise ModelError(f"{config.name} has dimensions that cannot be: {error}.") from error
    try:
        where = ClusterSpec.parse(cluster)
    except ClusterError as error:
        raise ClusterInputError(str(error)) from error
    degrees = parse_degrees(mesh)
    data = degrees["dp"] * degrees["fsdp"]
    sequences = data * micro_batch if batch is None else batch
    interleaved = virtual_stages > 1 and schedule == "1f1b"
    try:
        parallel = ParallelSpec(
            micro_batch=micro_batch,
            micro_batches=-(-sequences // (data * max(micro_batch, 1))),
            seq=seq,
            replicate=degrees["dp"],
            shard=degrees["fsdp"],
            zero=3 if degrees["fsdp"] > 1 else 0,
            tensor=degrees["tp"],
            sequence_parallel=sequence_parallel and degrees["tp"] > 1,
            pipeline=degrees["pp"],
            virtual_stages=virtual_stages,
            schedule="interleaved" if interleaved else _choice(schedule, get_args(Schedule), "schedule"),
            context=degrees["cp"],
            expert=degrees["ep"],
            checkpointing=_choice(ac, get_args(Checkpointing), "ac"),
            dtype=_choice(dtype, get_args(TrainingDtype), "dtype"),
            implementation=_implementation(optimizer, compiled=compiled, architecture=where.device.architecture),
        )
        _check_splits(spec, parallel, where, sequences)
        seconds, nbytes = step_time(spec, parallel, where), step_memory(spec, parallel, where)
    except (ValueError, ArithmeticError) as error:
        raise JobError(str(error)) from error
    if not math.isfinite(seconds.total_s):
        raise JobError("a step would take more seconds than there are numbers.", what_to_do="Check the model's sizes.")
    return PricedConfiguration(
        model=config.name, spec=spec, parallel=parallel, cluster=where, time=seconds, memory=nbytes
    )


def _check_splits(spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, sequences: int) -> None:
    """Check that the degrees have the cluster's devices, and divide the batch and the model's sizes.

    Raises:
        MeshError: they do not. It lists everything that does not divide, with the values that would do.
    """
    wrong = uneven_splits(spec, parallel, batch=sequences, devices=cluster.size)
    if parallel.ranks != cluster.size:
        wrong.append(f"the mesh has {parallel.ranks} ranks and {cluster.name} {cluster.size} devices")
    if wrong:
        raise MeshError(f"{'; '.join(wrong)}.", what_to_do="Choose degrees, a batch and a sequence that divide evenly.")


def parse_degrees(mesh: str | Mapping[str, int]) -> dict[str, int]:
    """Return the degree of every axis of ``AXES``; 1 where the mesh does not name it.

    Raises:
        MeshError: an axis is unknown, or a degree is no number above 0.
    """
    degrees: dict[str, int] = {}
    items = (
        mesh.items() if isinstance(mesh, Mapping) else (part.partition("=")[::2] for part in mesh.split(",") if part)
    )
    for name, degree in items:
        key = name.strip()
        if key not in AXES:
            raise MeshError(f"unknown axis {key!r}; known: {', '.join(AXES)}.")
        text = str(degree).strip()
        if _DEGREE.fullmatch(text) is None or int(text) < 1:
            raise MeshError(f"axis {key} has the degree {text!r}; it must be a whole number above 0.")
        degrees[key] = int(text)
    return {axis: degrees.get(axis, 1) for axis in AXES}


def transformer_of(config: ModelConfig) -> TransformerSpec:
    """Return the dimensions of a transformer from its Hugging Face config.

    Raises:
        ModelError: the model is no stack of decoder or encoder layers, or a dimension is missing.
    """
    values = config.values
    kind = str(values.get("model_type"))
    if kind in UNKNOWN:
        raise ModelError(f"{config.name} ({kind}) is no stack of equal layers.", what_to_do="Plan it instead.")

    def find(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(values.get(name), int):
                return int(values[name])
        if default is None:
            raise ModelError(f"{config.name} has no {names[0]}.", what_to_do="Give a config.json that has it.")
        return default

    hidden, heads = find("hidden_size", "n_embd", "d_model"), find("num_attention_heads", "n_head")
    plain = kind in PLAIN_MLP
    rank = values.get("kv_lora_rank")
    return TransformerSpec(
        layers=find("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if rank else find("num_key_value_heads", default=heads),
        head_dim=find("head_dim", default=hidden // heads),
        ffn=find("intermediate_size", "n_inner", default=4 * hidden),
        vocab=find("vocab_size"),
        gated=not plain,
        tied=bool(values.get("tie_word_embeddings", plain)),
        positions=find("max_position_embeddings", "n_positions", default=0) if plain else 0,
        causal=kind not in ("bert", "roberta"),
        layer_norm=plain,
        query_norm=kind.startswith("qwen3"),
        experts=_experts(find, bool(values.get("n_routed_experts"))) if find(*_EXPERTS, default=0) else None,
        mla=MultiHeadLatentAttention(
            query_rank=find("q_lora_rank", default=0),
            kv_rank=find("kv_lora_rank"),
            nope_dim=find("qk_nope_head_dim"),
            rope_dim=find("qk_rope_head_dim"),
            value_dim=find("v_head_dim"),
        )
        if rank
        else None,
    )


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _experts(find: Any, shared_by_count: bool) -> Experts:
    ffn = find("moe_intermediate_size", "intermediate_size")
    shared = find("n_shared_experts", default=0) * ffn if shared_by_count else 0
    return Experts(
        count=find(*_EXPERTS),
        top_k=find("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared,
        first_dense=find("first_k_dense_replace", default=0),
    )


def _implementation(optimizer: str, *, compiled: bool, architecture: str) -> Implementation:
    """Return the executor's choices: FSDP2 and DTensor, float32 parameters and gradients, torch's fused kernels."""
    return Implementation(
        kernels=KernelOptions(
            attention="flash2" if architecture.startswith("sm8") else "cudnn",
            fused_ops=compiled,
            attention_copies=4.0,
            host_ops_per_layer=20 if compiled else 60,
        ),
        tensor_parallel=TensorParallelOptions(copies=True),
        data_parallel=DataParallelOptions(reduces_each_micro_batch=True),  # fully_shard does
        state=StateOptions(optimizer_nbytes=_state_nbytes_per_parameter(optimizer)),
        loss=LossOptions(
            logit_nbytes=4.0 if compiled else EAGER_LOGIT_NBYTES,
            logit_hole_nbytes=0.0 if compiled else 2.0,
            traffic_nbytes=8.0 if compiled else EAGER_LOSS_TRAFFIC_NBYTES,
        ),
        saving=SavingOptions(recomputes_elementwise=compiled),
        allocator=AllocatorOptions(gather_stream=True, reduce_stream=True),
    )


def _state_nbytes_per_parameter(optimizer: str) -> float:
    """Return the bytes of state for a parameter of a matrix of the usual size, which is inside a block."""
    shape = (4096, 4096)
    numel = math.prod(shape)
    return find_optimizer(optimizer).state_nbytes(numel, 4, shape=shape, in_block=True) / numel


def _choice(value: str, options: tuple[str, ...], name: str) -> Any:
    if value not in options:
        raise JobError(f"{name} is {value!r}; known: {', '.join(options)}.")
    return value
