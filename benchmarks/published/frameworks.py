"""What is assumed of each framework where a row's columns are blank or its defaults decide. The one place for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_model.parallelism import Checkpointing, Implementation
from published.dates import date_of
from published.rows import number
from published.torchtitan import LATENT, graph_trainer, torchao


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A framework's defaults, and what to say of them.

    Attributes:
        micro_batch: where a row states none; 0 for unknown.
        checkpointing: where a row states none.
        experts_cut: whether experts are cut over tensor ranks where a row does not state their tensor degree
            (Megatron-Core: expert_tensor_parallel_size None stands for the tensor degree).
        packed_document: tokens of the documents packed into a sequence for fine-tuning; 0 for whole sequences.
        model_experts: ranks over which experts are spread, of models for which a row states none.
        model_batches: micro-batch of models whose own configuration in the framework says another.
        interleaved_chunks: model chunks per pipeline rank where a row says that they are interleaved and not how many.
        layers_per_chunk: of an interleaved pipeline whose chunks are not stated; 0 for a pipeline that is not.
    """

    implementation: Implementation
    checkpointing: Checkpointing = "none"
    micro_batch: int = 0
    seq: int = 0
    zero: int = 0
    experts_cut: bool = False
    sequence_parallel: bool = True
    dropout: bool = False
    interleaved_chunks: int = 1
    layers_per_chunk: int = 0
    packed_document: int = 0
    model_experts: Mapping[str, int] = field(default_factory=dict)
    model_batches: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


_MEGATRON = Implementation(
    attention="cudnn",
    fused=True,
    host_ops_per_layer=20,
    tensor_overlap=True,
    reduce_nbytes=2,
    gradient_nbytes=2,
    cast_nbytes=4.0,
    parameter_nbytes=2,
    master_nbytes=4,
    loss_traffic_nbytes=30.0,
    loss_nbytes=6.0,  # 16-bit logits and their float32 copy, which softmax overwrites
    keeps_gathered=False,
    gradients_persist=True,
    saves_cast=True,
    expert_bias_kernels=True,
)
_MEGATRON_2021 = Implementation(
    attention="unfused",
    host_ops_per_layer=50,
    data_overlap=False,
    reduce_nbytes=2,
    gradient_nbytes=2,
    parameter_nbytes=2,
    master_nbytes=4,
    state_nbytes=12,
    loss_traffic_nbytes=52.0,
    loss_nbytes=6.0,
)
_FSDP2 = Implementation(
    attention="flash2",
    fused=False,
    separate_linears=True,
    gather_stream=True,
    host_ops_per_layer=60,
    tensor_copies=True,
    attention_copies=4.0,
)

CHUNKED_LOSS_NBYTES, CHUNKED_LOSS_NBYTES_COMPILED = 7.0, 4.5
"""Bytes per logit of torchtune's CEWithChunkedOutputLoss (in torchtitan #996), which is given all logits in 16 bits and
casts one of 8 pieces at a time: logits (2), each piece's log-softmax until its backward (4; compiled it is not kept,
and gradients of 2 are the most), and one piece's cast and gradient (8 / 8; compiled 4 / 8). Not torchtitan's later
ChunkedCELoss, which projects piece by piece."""

DEEPSPEED_REUSE = 1e9
"""Default of ``stage3_max_reuse_distance`` (deepspeed/runtime/zero/config.py). In 2021 fetch_sub_module of
deepspeed/runtime/zero/stage3.py gathered, waited and synchronized the device before each module; it fetched ahead only
below 1e9 parameters alive (``stage3_max_live_parameters``), of which one layer of 530B has 5e9; ``overlap_comm`` was
off."""

TABLE: tuple[tuple[str, Assumptions], ...] = (
    (
        "Megatron-LM 2021",
        Assumptions(
            implementation=_MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="unfused attention, dropout on, gradients reduced in fp16 after backward, sends not overlapped",
        ),
    ),
    (
        "Megatron-LM PTD-P",
        Assumptions(
            implementation=_MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="as Megatron-LM 2021",
        ),
    ),
    (
        "Megatron-LM 2022",
        Assumptions(
            implementation=_MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="as Megatron-LM 2021",
        ),
    ),
    (
        "Megatron-DeepSpeed",
        Assumptions(
            implementation=dataclasses.replace(_MEGATRON_2021, host_ops_per_layer=60),
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="as Megatron-LM 2021; vocabulary 51200",
        ),
    ),
    (
        "DeepSpeed ZeRO-3",
        Assumptions(
            implementation=Implementation(
                attention="unfused",
                fused=False,
                host_ops_per_layer=60,
                reduce_nbytes=2,
                gradient_nbytes=2,
                parameter_nbytes=2,
                master_nbytes=4,
                reduce_each_micro_batch=True,
                data_overlap=False,
                gather_pieces=4,  # a module at a time: the four linears of a layer
                reuse_numel=DEEPSPEED_REUSE,
            ),
            checkpointing="full",
            zero=3,
            dropout=True,
            note="as Megatron-LM 2021; a module's parameters are waited for when it begins, gradients reduced likewise",
        ),
    ),
    (
        "Megatron-Core CI",
        Assumptions(
            implementation=dataclasses.replace(
                _MEGATRON, tensor_overlap=False, host_ops_per_layer=60, reduce_nbytes=4, gradient_nbytes=4
            ),
            sequence_parallel=False,
            note="no overlap unless stated; gradients reduced in fp32",
        ),
    ),
    (
        "NeMo AutoModel",
        Assumptions(
            implementation=dataclasses.replace(
                _FSDP2,
                attention="cudnn",
                fused=True,
                reduce_nbytes=4,
                parameter_nbytes=2,
                gradient_nbytes=2,
                state_nbytes=4,
                expert_overlap=False,
                defers_reduce=True,
            ),
            zero=3,
            model_experts={"GPT-OSS-20B": 8, "GPT-OSS-120B": 64},
            note="Transformer Engine layers, bf16 parameters and states, no recomputation; expert ranks of GPT-OSS as "
            "in examples/llm_benchmark @36044ad3d; gradients reduced with the last micro-batch (config.py, "
            "defer_fsdp_grad_sync); models with experts keep parameters gathered between micro-batches "
            "(reshard_after_forward: false in examples/llm_benchmark; moe/fsdp_mixin.py)",
        ),
    ),
    (
        "NeMo",
        Assumptions(
            implementation=_MEGATRON,
            zero=1,
            experts_cut=True,
            layers_per_chunk=1,
            packed_document=256,
            note="Transformer Engine, tp-comm-overlap, gradients reduced in bf16, no recomputation where blank, "
            "fine-tuning on packed SQuAD examples of about 256 tokens, "
            "one layer in each interleaved chunk and experts cut over tensor ranks where blank; latent attention "
            "unfused on Blackwell before July 2025",
        ),
    ),
    (
        "Megatron-Bridge",
        Assumptions(
            implementation=dataclasses.replace(_MEGATRON, host_ops_per_layer=0, expert_host_ops=0, expert_once=True),
            zero=1,
            note="as NeMo; CUDA graphs; DeepEP or HybridEP; GPT-OSS as its recipes say; no recomputation where blank",
        ),
    ),
    (
        "NVIDIA dgxc",
        Assumptions(
            implementation=dataclasses.replace(_MEGATRON, host_ops_per_layer=0, expert_host_ops=0, expert_once=True),
            zero=1,
            note="as Megatron-Bridge",
        ),
    ),
    ("Megatron-Core", Assumptions(implementation=_MEGATRON, zero=1, experts_cut=True, note="as NeMo")),
    (
        "Composer",
        Assumptions(
            implementation=Implementation(
                attention="flash1",
                fused=False,
                host_ops_per_layer=25,
                reduce_each_micro_batch=True,
                backward_gather_hidden=False,
                attention_copies=8.0,
                optimizer_passes=2.3,
                loss_traffic_nbytes=10.0,
                loss_nbytes=6.0,
            ),
            zero=3,
            note="FlashAttention-1, fused cross-entropy, unfused decoupled AdamW, gradients reduced every "
            "micro-batch: in fp32 (DEFAULT) or bf16 (PURE)",
        ),
    ),
    (
        "FSDP1 (fms",
        Assumptions(
            implementation=dataclasses.replace(_FSDP2, parameter_nbytes=4, fused=True, gather_stream=False),
            zero=3,
            note="compiled; FSDP1",
        ),
    ),
    (
        "torchtitan",
        Assumptions(
            implementation=dataclasses.replace(_FSDP2, context_merges=True),
            checkpointing="selective",
            micro_batch=1,
            seq=8192,
            zero=3,
            interleaved_chunks=2,
            model_batches={"DeepSeek-V3-16B (torchtitan)": 4},
            note="fp32 parameters, gradients reduced in fp32, SDPA's FlashAttention-2, local batch 1 and selective "
            "checkpointing where blank; with a pipeline as many micro-batches as ranks until #1073 (2025-04-07), then "
            "of 1 sequence, "
            "parameters kept gathered and gradients reduced once a step; two stages per rank where they are "
            "interleaved (pipelining_utils.py @ba2469780, pipeline_parallel.py @36a4b6942); the loss "
            "compiled with the model since #1033 (2025-04-02) and cut into 8 pieces since #2937 (2026-04-27)",
        ),
    ),
    (
        "torchtune",
        Assumptions(
            implementation=dataclasses.replace(_FSDP2, parameter_nbytes=2, gradient_nbytes=2, state_nbytes=4),
            zero=3,
            note="bf16 parameters and states",
        ),
    ),
    (
        "DeepSpeed",
        Assumptions(
            implementation=dataclasses.replace(
                _FSDP2,
                attention="flash3",
                gather_stream=False,
                optimizer_on_host=True,
                parameter_nbytes=2,
                gradient_nbytes=2,
                reduce_nbytes=2,
                master_nbytes=4,
                loss_traffic_nbytes=8.0,
                loss_nbytes=0.5,
                fused=True,
                reuse_numel=DEEPSPEED_REUSE,
            ),
            zero=3,
            note="Liger kernels, optimizer on the CPU",
        ),
    ),
    (
        "HF transformers",
        Assumptions(
            implementation=dataclasses.replace(_FSDP2, parameter_nbytes=2, gradient_nbytes=2, state_nbytes=4),
            note="bf16 parameters and states, one device",
        ),
    ),
    (
        "nanotron",
        Assumptions(
            implementation=dataclasses.replace(
                _MEGATRON,
                attention="flash2",
                tensor_overlap=False,
                reduce_nbytes=4,
                gradient_nbytes=4,
                host_ops_per_layer=50,
                fused=False,
            ),
            zero=1,
            note="FlashAttention-2, gradients in fp32",
        ),
    ),
    ("Primus", Assumptions(implementation=dataclasses.replace(_MEGATRON, attention="flash2"), zero=1, note="as NeMo")),
    ("Meta internal", Assumptions(implementation=dataclasses.replace(_MEGATRON), zero=2, note="as NeMo")),
)
"""First match of the start of the row's framework wins."""


def _attention_of(
    row: Mapping[str, str], found: Assumptions, implementation: Implementation
) -> tuple[Assumptions, Implementation]:
    """Return the assumptions with the attention kernel that the row's device, model and date allow.

    - torchtitan took the memory-efficient kernel for latent attention until FlexAttention (#1610, 2025-08-22), as
      FlashAttention-2 wants values as wide as keys; and cuDNN's on Blackwell since #1196 (2025-05-14), whose result its
      selective checkpointing keeps since #2095 (2025-12-01).
    - Transformer Engine trains 192 wide queries beside 128 wide values on Blackwell with cuDNN from 9.11 on (its
      fused_attn.cpp), of July 2025; before that unfused, of which NVIDIA/dgxc-benchmarking deepseek_v3/pretraining/
      launch.sh @60d6fd3 recomputes the core (on GB200; on H100 mla_up_proj).
    """
    blackwell = row.get("gpu", "").startswith(("B200", "B300", "GB200", "GB300"))
    latent, date = row.get("model", "").startswith(LATENT), date_of(row)
    if row.get("framework", "").startswith("torchtitan"):
        if latent and "0000" < date < "2025-08-22":
            return found, dataclasses.replace(implementation, attention="efficient")
        if blackwell and date >= "2025-05-14":
            return found, dataclasses.replace(implementation, attention="cudnn", keeps_attention=date >= "2025-12")
    elif latent and blackwell and implementation.attention == "cudnn" and "0000" < date < "2025-07":
        return (
            dataclasses.replace(found, checkpointing="attention"),
            dataclasses.replace(implementation, attention="unfused"),
        )
    return found, implementation


def _gpt_oss(row: Mapping[str, str], implementation: Implementation) -> Implementation:
    """Return what Megatron-Bridge's recipes for GPT-OSS 120B in 16 bits say, unlike those of its other experts.

    scripts/performance/configs/gpt_oss at v0.2.0, v0.3.0 and v0.4.1 (25.11, 26.02, 26.04): CUDA graphs on GB300 and
    B300 alone; the plain all-to-all, but HybridEP from 26.04 on for B200, B300 and GB200.
    """
    graphs = row.get("gpu", "").startswith(("GB300", "B300"))
    hybrid = row.get("gpu", "").startswith(("B200", "B300", "GB200")) and date_of(row) >= "2026-04"
    return dataclasses.replace(
        implementation,
        expert_once=hybrid,
        host_ops_per_layer=0 if graphs else _MEGATRON.host_ops_per_layer,
        expert_host_ops=0 if graphs else _MEGATRON.expert_host_ops,
    )


TORCHTUNE_STEPS = ("Packed Dataset", "Compile", "Chunked Cross Entropy", "Activation Checkpointing")
"""The first rows of torchtune's table, each with all before it. The others are not modelled: a baseline of sequences of
unknown lengths, the optimizer inside backward, activations on the host, quantized weights."""


def torchtune_step(row: Mapping[str, str]) -> int | None:
    """Return how many of ``TORCHTUNE_STEPS`` a row of torchtune's table has; -1 for rows that are not modelled."""
    notes = row.get("config_notes", "") + row.get("notes", "")
    if not row.get("framework", "").startswith("torchtune") or "cumulative:" not in notes:
        return None
    return next((number for number, name in enumerate(TORCHTUNE_STEPS, start=1) if f"+ {name}" in notes), -1)


def assumptions_of(row: Mapping[str, str]) -> Assumptions | None:
    """Return what is assumed for a row, adjusted to what it states; None for an unknown framework."""
    framework = row.get("framework", "")
    found = next((known for start, known in TABLE if framework.startswith(start)), None)
    if found is None:
        return None
    implementation = found.implementation
    notes = (row.get("config_notes", "") + " " + row.get("notes", "") + " " + framework).lower()
    compiled = row.get("compile", "").startswith("Y")
    if compiled and not implementation.fused:
        implementation = dataclasses.replace(
            implementation,
            fused=True,
            recomputes_cheap=True,
            loss_traffic_nbytes=14.0,
            host_ops_per_layer=implementation.host_ops_per_layer // 2,
            keeps_unread=False,
            shares_casts=True,
        )
    loss_compiled = compiled or row.get("compile") == "loss only"
    if framework.startswith("torchtitan") and loss_compiled and date_of(row) >= "2025-04-02":
        # #1033 compiles the loss too: logits and their gradient stay in 16 bits
        implementation = dataclasses.replace(implementation, loss_traffic_nbytes=8.0, loss_nbytes=4.0)
    if framework.startswith("torchtitan") and date_of(row) >= "2026-04-27":
        implementation = dataclasses.replace(implementation, loss_chunks=8)  # ChunkedCELoss, #2937
    if framework.startswith(("torchtitan", "torchtune")) and (date_of(row) or "2025-01") < "2025-08":
        implementation = dataclasses.replace(implementation, float32_norm=True)
    if framework.startswith("torchtitan") and date_of(row) >= "2025-09-06":
        implementation = dataclasses.replace(implementation, keeps_exchanged=True)  # #1672
    if "chunked ce" in notes:
        implementation = dataclasses.replace(implementation, loss_nbytes=CHUNKED_LOSS_NBYTES)
    if "fused=false" in notes:
        implementation = dataclasses.replace(implementation, optimizer_passes=3.0)
    if framework.startswith("torchtitan") and (number(row, "pp") or 1) > 1:
        implementation = dataclasses.replace(implementation, reshards=False)
    if framework.startswith("torchtitan") and "0000" < date_of(row) < "2024-05-01":
        implementation = dataclasses.replace(implementation, loss_parallel=False)
    if framework.startswith("torchtitan") and row.get("zero_stage") == "2":
        implementation = dataclasses.replace(implementation, reshards=False)
    step = torchtune_step(row)
    if step is not None:
        implementation = dataclasses.replace(
            implementation,
            fused=step >= 2,
            recomputes_cheap=step >= 2,
            loss_nbytes=CHUNKED_LOSS_NBYTES_COMPILED if step >= 3 else implementation.loss_nbytes,
        )
        found = dataclasses.replace(found, checkpointing="full" if step >= 4 else "none")
    if "PURE" in row.get("precision", ""):
        implementation = dataclasses.replace(implementation, reduce_nbytes=2)
    if "(lora)" in row.get("model", "").lower():
        implementation = dataclasses.replace(implementation, lora=True)
    if "async tp" in notes or "asynctp" in notes:
        implementation = dataclasses.replace(implementation, tensor_overlap=True)
    if "deepep" in notes or "hybridep" in notes:
        implementation = dataclasses.replace(implementation, expert_once=True)
    if "ep overlap on" in notes:
        implementation = dataclasses.replace(implementation, expert_overlap=True)
    if framework.startswith("NeMo AutoModel") and number(row, "n_experts"):
        implementation = dataclasses.replace(implementation, reshards=False)
    if framework.startswith("torchtitan"):
        implementation = torchao(row, implementation)
        implementation = graph_trainer(row, implementation, _FSDP2)
    found, implementation = _attention_of(row, found, implementation)
    if framework.startswith("Megatron-Bridge") and row.get("model", "").startswith("GPT-OSS"):
        implementation = _gpt_oss(row, implementation)
    if row.get("gpu", "").startswith("A100") and implementation.attention == "cudnn":
        implementation = dataclasses.replace(implementation, attention="flash2")
    if "mem-efficient" in notes:
        implementation = dataclasses.replace(implementation, attention="efficient")
    return dataclasses.replace(found, implementation=implementation)
