"""The assumptions about a row's run: its framework's defaults, adjusted to the row's columns and to its date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_model.configuration.frameworks import FSDP2, MEGATRON, with_compile
from cost_model.configuration.implementation import AttentionKernel, Implementation
from published.frameworks.defaults import TABLE, Assumptions
from published.frameworks.torchtitan import MLA_MODELS, torchtitan
from published.rows.dates import date_of
from published.rows.priced_row import number

CHUNKED_LOSS_NBYTES, CHUNKED_LOSS_NBYTES_COMPILED = 7.0, 4.5
"""Bytes per logit of torchtune's CEWithChunkedOutputLoss (in torchtitan #996), eager and compiled.

The loss receives all logits in 16 bits (2 bytes) and casts one of 8 chunks at a time. Eager: 4 bytes for the
log-softmax of all chunks, saved until backward, and 8 / 8 for one chunk's cast and gradient. Compiled: the log-softmax
is not saved; the peak has gradients of 2 bytes, and 4 / 8 for one chunk. torchtitan's later ChunkedCELoss, which
projects chunk by chunk, is another loss."""

TORCHTUNE_STEPS = ("Packed Dataset", "Compile", "Chunked Cross Entropy", "Activation Checkpointing")
"""The first rows of torchtune's table; each includes all before it. The others are not modelled: a baseline with
sequences of unknown lengths, the optimizer inside backward, activations on the host, quantized weights."""


def assumptions_of(row: Mapping[str, str]) -> Assumptions | None:
    """Return the assumptions for a row, adjusted to its columns; None for an unknown framework."""
    framework = row.get("framework", "")
    found = next((known for start, known in TABLE if framework.startswith(start)), None)
    if found is None:
        return None
    notes = (row.get("config_notes", "") + " " + row.get("notes", "") + " " + framework).lower()
    implementation = _compiled(row, found.implementation)
    if framework.startswith(("torchtitan", "torchtune")) and (date_of(row) or "2025-01") < "2025-08":
        implementation = _with_kernels(implementation, float32_norm=True)
    if framework.startswith("torchtitan"):
        compiled = row.get("compile", "").startswith("Y")
        implementation = torchtitan(row, implementation, FSDP2, compiled=compiled)
    if "chunked ce" in notes:
        loss = replace(implementation.loss, logit_nbytes=CHUNKED_LOSS_NBYTES, logit_hole_nbytes=0.0)
        implementation = replace(implementation, loss=loss)
    if "fused=false" in notes:
        implementation = replace(implementation, state=replace(implementation.state, optimizer_passes=3.0))
    step = torchtune_step(row)
    if step is not None:
        implementation = _torchtune(implementation, step)
        found = replace(found, checkpointing="full" if step >= 4 else "none")
    implementation = _as_noted(row, implementation, notes)
    found, implementation = _attention_of(row, found, implementation)
    if framework.startswith("Megatron-Bridge") and row.get("model", "").startswith("GPT-OSS"):
        implementation = _gpt_oss(row, implementation)
    if row.get("gpu", "").startswith("A100") and implementation.kernels.attention == "cudnn":
        implementation = _with_kernels(implementation, attention="flash2")
    if "mem-efficient" in notes:
        implementation = _with_kernels(implementation, attention="efficient")
    return replace(found, implementation=implementation)


def torchtune_step(row: Mapping[str, str]) -> int | None:
    """Return how many ``TORCHTUNE_STEPS`` a row of torchtune's table has; -1: not modelled; None: another table."""
    notes = row.get("config_notes", "") + row.get("notes", "")
    if not row.get("framework", "").startswith("torchtune") or "cumulative:" not in notes:
        return None
    return next((number for number, name in enumerate(TORCHTUNE_STEPS, start=1) if f"+ {name}" in notes), -1)


def _with_kernels(
    implementation: Implementation, *, attention: AttentionKernel | None = None, float32_norm: bool | None = None
) -> Implementation:
    kernels = implementation.kernels
    if attention is not None:
        kernels = replace(kernels, attention=attention)
    if float32_norm is not None:
        kernels = replace(kernels, float32_norm=float32_norm)
    return replace(implementation, kernels=kernels)


def _compiled(row: Mapping[str, str], implementation: Implementation) -> Implementation:
    """Return the implementation with torch.compile, where the row has it and the framework's kernels are not fused."""
    return with_compile(implementation) if row.get("compile", "").startswith("Y") else implementation


def _torchtune(implementation: Implementation, step: int) -> Implementation:
    """Return the implementation of a row with the first ``step`` of ``TORCHTUNE_STEPS``."""
    compiled = step >= 2
    if step >= 3:
        loss = replace(implementation.loss, logit_nbytes=CHUNKED_LOSS_NBYTES_COMPILED, logit_hole_nbytes=0.0)
        implementation = replace(implementation, loss=loss)
    return replace(
        implementation,
        kernels=replace(implementation.kernels, fused_ops=compiled),
        saving=replace(implementation.saving, recomputes_elementwise=compiled),
    )


def _as_noted(row: Mapping[str, str], implementation: Implementation, notes: str) -> Implementation:
    """Return the implementation with the choices that the row's precision, model name and notes state."""
    data_parallel, experts = implementation.data_parallel, implementation.experts
    if "PURE" in row.get("precision", ""):
        data_parallel = replace(data_parallel, reduce_nbytes=2)
    if row.get("framework", "").startswith("NeMo AutoModel") and number(row, "n_experts"):
        data_parallel = replace(data_parallel, reshard_after_forward=False)
    if "deepep" in notes or "hybridep" in notes:
        experts = replace(experts, sends_once_per_node=True)
    if "ep overlap on" in notes:
        experts = replace(experts, overlaps_all_to_all=True)
    tensor_parallel = implementation.tensor_parallel
    if "async tp" in notes or "asynctp" in notes:
        tensor_parallel = replace(tensor_parallel, async_tp=True)
    lora = implementation.lora or "(lora)" in row.get("model", "").lower()
    return replace(
        implementation, tensor_parallel=tensor_parallel, experts=experts, data_parallel=data_parallel, lora=lora
    )


def _attention_of(
    row: Mapping[str, str], found: Assumptions, implementation: Implementation
) -> tuple[Assumptions, Implementation]:
    """Return the assumptions with the attention kernel that the row's device, model and date allow.

    - torchtitan used the memory-efficient kernel for multi-head latent attention until FlexAttention (#1610,
      2025-08-22), since FlashAttention-2 needs values as wide as keys. On Blackwell it uses cuDNN's since #1196
      (2025-05-14), whose result its selective checkpointing saves since #2095 (2025-12-01).
    - On Blackwell, Transformer Engine trains queries of width 192 with values of width 128 by cuDNN from version 9.11
      of July 2025 on (its fused_attn.cpp). Before that the attention is unfused, and NVIDIA/dgxc-benchmarking
      deepseek_v3/pretraining/launch.sh @60d6fd3 recomputes its core (on GB200; on H100 it recomputes mla_up_proj).
    """
    blackwell = row.get("gpu", "").startswith(("B200", "B300", "GB200", "GB300"))
    mla, date = row.get("model", "").startswith(MLA_MODELS), date_of(row)
    if row.get("framework", "").startswith("torchtitan"):
        if mla and "0000" < date < "2025-08-22":
            return found, _with_kernels(implementation, attention="efficient")
        if blackwell and date >= "2025-05-14":
            saving = replace(implementation.saving, selective_attention=date >= "2025-12")
            return found, _with_kernels(replace(implementation, saving=saving), attention="cudnn")
    elif mla and blackwell and implementation.kernels.attention == "cudnn" and "0000" < date < "2025-07":
        return replace(found, checkpointing="attention"), _with_kernels(implementation, attention="unfused")
    return found, implementation


def _gpt_oss(row: Mapping[str, str], implementation: Implementation) -> Implementation:
    """Return the choices of Megatron-Bridge's recipes for GPT-OSS 120B in 16 bits; other models have other recipes.

    scripts/performance/configs/gpt_oss at v0.2.0, v0.3.0 and v0.4.1 (25.11, 26.02, 26.04): CUDA graphs on GB300 and
    B300 only; the plain all-to-all, but HybridEP from 26.04 on for B200, B300 and GB200.
    """
    graphs = row.get("gpu", "").startswith(("GB300", "B300"))
    hybrid = row.get("gpu", "").startswith(("B200", "B300", "GB200")) and date_of(row) >= "2026-04"
    kernels = replace(
        implementation.kernels,
        host_ops_per_layer=0 if graphs else MEGATRON.kernels.host_ops_per_layer,
        expert_host_ops=0 if graphs else MEGATRON.kernels.expert_host_ops,
    )
    return replace(implementation, kernels=kernels, experts=replace(implementation.experts, sends_once_per_node=hybrid))
