"""Defaults of each framework, and what is assumed of it where a row's columns are blank. The one place for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from cost_model.configuration.parallelism import Checkpointing, Implementation


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
        printed_gigabyte: bytes of what the framework's log calls a gigabyte, for rows that quote it as printed.
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
    printed_gigabyte: int = 2**30
    note: str = ""


MEGATRON = Implementation(
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
MEGATRON_2021 = Implementation(
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
FSDP2 = Implementation(
    attention="flash2",
    fused=False,
    separate_linears=True,
    gather_stream=True,
    host_ops_per_layer=60,
    reduce_stream=True,
    tensor_copies=True,
    attention_copies=4.0,
    loss_hole_nbytes=2.0,
)

DEEPSPEED_REUSE = 1e9
"""Default of ``stage3_max_reuse_distance`` (deepspeed/runtime/zero/config.py). In 2021 fetch_sub_module of
deepspeed/runtime/zero/stage3.py gathered, waited and synchronized the device before each module; it fetched ahead only
below 1e9 parameters alive (``stage3_max_live_parameters``), of which one layer of 530B has 5e9; ``overlap_comm`` was
off."""

TABLE: tuple[tuple[str, Assumptions], ...] = (
    (
        "Megatron-LM 2021",
        Assumptions(
            implementation=MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="unfused attention, dropout on, gradients reduced in fp16 after backward, sends not overlapped",
        ),
    ),
    (
        "Megatron-LM PTD-P",
        Assumptions(
            implementation=MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="as Megatron-LM 2021",
        ),
    ),
    (
        "Megatron-LM 2022",
        Assumptions(
            implementation=MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="as Megatron-LM 2021",
        ),
    ),
    (
        "Megatron-DeepSpeed",
        Assumptions(
            implementation=dataclasses.replace(MEGATRON_2021, host_ops_per_layer=60),
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
                root_holds_ends=False,
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
                MEGATRON, tensor_overlap=False, host_ops_per_layer=60, reduce_nbytes=4, gradient_nbytes=4
            ),
            sequence_parallel=False,
            note="no overlap unless stated; gradients reduced in fp32",
        ),
    ),
    (
        "NeMo AutoModel",
        Assumptions(
            implementation=dataclasses.replace(
                FSDP2,
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
            implementation=MEGATRON,
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
            implementation=dataclasses.replace(MEGATRON, host_ops_per_layer=0, expert_host_ops=0, expert_once=True),
            zero=1,
            printed_gigabyte=10**9,  # report_memory in src/megatron/bridge/training/utils/train_utils.py @067f987df
            note="as NeMo; CUDA graphs; DeepEP or HybridEP; GPT-OSS as its recipes say; no recomputation where blank; "
            "a GB as printed is 10^9 bytes",
        ),
    ),
    (
        "NVIDIA dgxc",
        Assumptions(
            implementation=dataclasses.replace(MEGATRON, host_ops_per_layer=0, expert_host_ops=0, expert_once=True),
            zero=1,
            note="as Megatron-Bridge",
        ),
    ),
    ("Megatron-Core", Assumptions(implementation=MEGATRON, zero=1, experts_cut=True, note="as NeMo")),
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
            implementation=dataclasses.replace(
                FSDP2, parameter_nbytes=4, fused=True, gather_stream=False, reduce_stream=False
            ),
            zero=3,
            note="compiled; FSDP1",
        ),
    ),
    (
        "torchtitan",
        Assumptions(
            implementation=dataclasses.replace(FSDP2, context_merges=True),
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
            "compiled with the model since #1033 (2025-04-02) and cut into 8 pieces since #2937 (2026-04-27); "
            "expandable segments since #643 (2024-10-22) where no other command is known",
        ),
    ),
    (
        "torchtune",
        Assumptions(
            implementation=dataclasses.replace(FSDP2, parameter_nbytes=2, gradient_nbytes=2, state_nbytes=4),
            zero=3,
            note="bf16 parameters and states",
        ),
    ),
    (
        "DeepSpeed",
        Assumptions(
            implementation=dataclasses.replace(
                FSDP2,
                attention="flash3",
                gather_stream=False,
                reduce_stream=False,
                root_holds_ends=False,
                optimizer_on_host=True,
                parameter_nbytes=2,
                gradient_nbytes=2,
                reduce_nbytes=2,
                master_nbytes=4,
                loss_traffic_nbytes=8.0,
                loss_nbytes=0.5,
                loss_hole_nbytes=0.0,
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
            implementation=dataclasses.replace(FSDP2, parameter_nbytes=2, gradient_nbytes=2, state_nbytes=4),
            note="bf16 parameters and states, one device",
        ),
    ),
    (
        "nanotron",
        Assumptions(
            implementation=dataclasses.replace(
                MEGATRON,
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
    ("Primus", Assumptions(implementation=dataclasses.replace(MEGATRON, attention="flash2"), zero=1, note="as NeMo")),
    ("Meta internal", Assumptions(implementation=dataclasses.replace(MEGATRON), zero=2, note="as NeMo")),
)
"""First match of the start of the row's framework wins."""
