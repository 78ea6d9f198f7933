"""The defaults of each framework, which hold where a row's columns are blank. No other module has defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cost_model.configuration.frameworks import FSDP2, FSDP2_BF16, MEGATRON
from cost_model.configuration.implementation import (
    AllocatorOptions,
    DataParallelOptions,
    Implementation,
    KernelOptions,
    LossOptions,
    StateOptions,
)
from cost_model.configuration.parallelism import Checkpointing


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """A framework's defaults.

    Attributes:
        checkpointing: mode where a row states none.
        micro_batch: sequences per micro-batch where a row states none; 0 for unknown.
        seq: tokens in a sequence where a row states none; 0 for unknown.
        zero: ZeRO stage where a row states none.
        experts_split: whether tensor ranks split experts where a row does not state their tensor degree (Megatron-Core:
            expert_tensor_parallel_size None means the tensor degree).
        sequence_parallel: whether sequence parallelism is on where a row does not state it.
        dropout: whether models without a gated MLP have dropout.
        interleaved_chunks: model chunks per pipeline rank where a row states an interleaved schedule and no chunks.
        layers_per_chunk: layers per chunk of an interleaved pipeline whose chunks are not stated; 0 where pipelines are
            not interleaved.
        packed_document: tokens of the documents packed into a sequence for fine-tuning; 0 for whole sequences.
        model_experts: ranks that experts are spread over, by model, where a row states none.
        model_batches: sequences per micro-batch by model, where the framework's configuration of the model sets them.
        printed_gigabyte: bytes of a gigabyte in the framework's log, for rows that quote it as printed.
        note: the assumptions in words, which the accuracy table prints.
    """

    implementation: Implementation
    checkpointing: Checkpointing = "none"
    micro_batch: int = 0
    seq: int = 0
    zero: int = 0
    experts_split: bool = False
    sequence_parallel: bool = True
    dropout: bool = False
    interleaved_chunks: int = 1
    layers_per_chunk: int = 0
    packed_document: int = 0
    model_experts: Mapping[str, int] = field(default_factory=dict)
    model_batches: Mapping[str, int] = field(default_factory=dict)
    printed_gigabyte: int = 2**30
    note: str = ""


MEGATRON_2021 = Implementation(
    kernels=KernelOptions(attention="unfused", host_ops_per_layer=50),
    data_parallel=DataParallelOptions(overlaps=False, reduce_nbytes=2),
    state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, master_nbytes=4, optimizer_nbytes=12),
    loss=LossOptions(logit_nbytes=6.0, traffic_nbytes=52.0),
)
CUDA_GRAPHED_MEGATRON = replace(
    MEGATRON,
    kernels=replace(MEGATRON.kernels, host_ops_per_layer=0, expert_host_ops=0),
    experts=replace(MEGATRON.experts, sends_once_per_node=True),
)

DEEPSPEED_REUSE = 1e9
"""Number of parameters: the default of ``stage3_max_reuse_distance`` (deepspeed/runtime/zero/config.py).

In 2021, fetch_sub_module of deepspeed/runtime/zero/stage3.py all-gathered, waited and synchronized the device before
each module. It prefetched only below 1e9 live parameters (``stage3_max_live_parameters``); one layer of 530B has 5e9.
``overlap_comm`` was off."""

TABLE: tuple[tuple[str, Assumptions], ...] = (
    (
        "Megatron-LM 2021",
        Assumptions(
            implementation=MEGATRON_2021,
            checkpointing="full",
            sequence_parallel=False,
            dropout=True,
            note="unfused attention, dropout, gradients reduced in fp16 after backward, sends exposed",
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
            implementation=replace(MEGATRON_2021, kernels=replace(MEGATRON_2021.kernels, host_ops_per_layer=60)),
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
                kernels=KernelOptions(attention="unfused", host_ops_per_layer=60),
                data_parallel=DataParallelOptions(
                    overlaps=False,
                    reduces_each_micro_batch=True,
                    reduce_nbytes=2,
                    root_holds_ends=False,
                    collectives_per_layer=4,  # one per linear
                    max_reuse_numel=DEEPSPEED_REUSE,
                ),
                state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, master_nbytes=4),
            ),
            checkpointing="full",
            zero=3,
            dropout=True,
            note="as Megatron-LM 2021; all-gathers and reductions of each module are exposed",
        ),
    ),
    (
        "Megatron-Core CI",
        Assumptions(
            implementation=replace(
                MEGATRON,
                kernels=replace(MEGATRON.kernels, host_ops_per_layer=60),
                tensor_parallel=replace(MEGATRON.tensor_parallel, async_tp=False),
                data_parallel=replace(MEGATRON.data_parallel, reduce_nbytes=4),
                state=replace(MEGATRON.state, gradient_nbytes=4),
            ),
            sequence_parallel=False,
            note="no overlap unless stated; gradients reduced in fp32",
        ),
    ),
    (
        "NeMo AutoModel",
        Assumptions(
            implementation=replace(
                FSDP2_BF16,
                kernels=replace(FSDP2.kernels, attention="cudnn", fused_ops=True),
                data_parallel=replace(FSDP2.data_parallel, defers_reduction=True),
            ),
            zero=3,
            model_experts={"GPT-OSS-20B": 8, "GPT-OSS-120B": 64},
            note="Transformer Engine layers, bf16 parameters and states, no recomputation; expert ranks of GPT-OSS as "
            "in examples/llm_benchmark @36044ad3d; gradients reduced with the last micro-batch (config.py, "
            "defer_fsdp_grad_sync); models with experts do not reshard parameters between micro-batches "
            "(reshard_after_forward: false in examples/llm_benchmark; moe/fsdp_mixin.py)",
        ),
    ),
    (
        "NeMo",
        Assumptions(
            implementation=MEGATRON,
            zero=1,
            experts_split=True,
            layers_per_chunk=1,
            packed_document=256,
            note="Transformer Engine, tp-comm-overlap, gradients reduced in bf16, no recomputation where blank, "
            "fine-tuning on packed SQuAD examples of about 256 tokens, "
            "one layer in each interleaved chunk and experts split over tensor ranks where blank; multi-head latent "
            "attention unfused on Blackwell before July 2025",
        ),
    ),
    (
        "Megatron-Bridge",
        Assumptions(
            implementation=CUDA_GRAPHED_MEGATRON,
            zero=1,
            printed_gigabyte=10**9,  # report_memory in src/megatron/bridge/training/utils/train_utils.py @067f987df
            note="as NeMo; CUDA graphs; DeepEP or HybridEP; GPT-OSS as its recipes say; no recomputation where blank; "
            "a GB as printed is 10^9 bytes",
        ),
    ),
    (
        "NVIDIA dgxc",
        Assumptions(
            implementation=CUDA_GRAPHED_MEGATRON,
            zero=1,
            note="as Megatron-Bridge",
        ),
    ),
    ("Megatron-Core", Assumptions(implementation=MEGATRON, zero=1, experts_split=True, note="as NeMo")),
    (
        "Composer",
        Assumptions(
            implementation=Implementation(
                kernels=KernelOptions(attention="flash1", attention_copies=8.0, host_ops_per_layer=25),
                data_parallel=DataParallelOptions(reduces_each_micro_batch=True, prefetches_backward=False),
                state=StateOptions(optimizer_passes=2.3),
                loss=LossOptions(logit_nbytes=6.0, traffic_nbytes=10.0),
            ),
            zero=3,
            note="FlashAttention-1, fused cross-entropy, unfused decoupled AdamW, gradients reduced every "
            "micro-batch: in fp32 (DEFAULT) or bf16 (PURE)",
        ),
    ),
    (
        "FSDP1 (fms",
        Assumptions(
            implementation=replace(FSDP2, kernels=replace(FSDP2.kernels, fused_ops=True), allocator=AllocatorOptions()),
            zero=3,
            note="compiled; FSDP1",
        ),
    ),
    (
        "torchtitan",
        Assumptions(
            implementation=replace(FSDP2, kernels=replace(FSDP2.kernels, torch_ring_attention=True)),
            checkpointing="selective",
            micro_batch=1,
            seq=8192,
            zero=3,
            interleaved_chunks=2,
            model_batches={"DeepSeek-V3-16B (torchtitan)": 4},
            note="fp32 parameters, gradients reduced in fp32, SDPA's FlashAttention-2, local batch 1 and selective "
            "checkpointing where blank; with a pipeline as many micro-batches as ranks until #1073 (2025-04-07), then "
            "of 1 sequence, "
            "parameters not resharded after forward and gradients reduced once a step; two stages per rank where they "
            "are interleaved (pipelining_utils.py @ba2469780, pipeline_parallel.py @36a4b6942); the loss "
            "compiled with the model since #1033 (2025-04-02) and computed in 8 chunks since #2937 (2026-04-27); "
            "expandable segments since #643 (2024-10-22) unless the source shows another command",
        ),
    ),
    (
        "torchtune",
        Assumptions(
            implementation=FSDP2_BF16,
            zero=3,
            note="bf16 parameters and states",
        ),
    ),
    (
        "DeepSpeed",
        Assumptions(
            implementation=replace(
                FSDP2,
                kernels=replace(FSDP2.kernels, attention="flash3", fused_ops=True),
                data_parallel=DataParallelOptions(
                    reduce_nbytes=2, root_holds_ends=False, max_reuse_numel=DEEPSPEED_REUSE
                ),
                state=StateOptions(parameter_nbytes=2, gradient_nbytes=2, master_nbytes=4, optimizer_on_host=True),
                loss=LossOptions(logit_nbytes=0.5, traffic_nbytes=8.0),
                allocator=AllocatorOptions(),
            ),
            zero=3,
            note="Liger kernels, optimizer on the CPU",
        ),
    ),
    (
        "HF transformers",
        Assumptions(
            implementation=FSDP2_BF16,
            note="bf16 parameters and states, one device",
        ),
    ),
    (
        "nanotron",
        Assumptions(
            implementation=replace(
                MEGATRON,
                kernels=KernelOptions(attention="flash2", host_ops_per_layer=50),
                tensor_parallel=replace(MEGATRON.tensor_parallel, async_tp=False),
                data_parallel=replace(MEGATRON.data_parallel, reduce_nbytes=4),
                state=replace(MEGATRON.state, gradient_nbytes=4),
            ),
            zero=1,
            note="FlashAttention-2, gradients in fp32",
        ),
    ),
    (
        "Primus",
        Assumptions(
            implementation=replace(MEGATRON, kernels=replace(MEGATRON.kernels, attention="flash2")),
            zero=1,
            note="as NeMo",
        ),
    ),
    ("Meta internal", Assumptions(implementation=MEGATRON, zero=2, note="as NeMo")),
)
"""(start of the framework's name in a row, the framework's defaults); the first match holds."""
