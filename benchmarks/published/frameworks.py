"""What is assumed of a row's run: its framework's defaults, adjusted to what the row states and to when it ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cost_model.configuration.parallelism import Implementation
from published.dates import date_of
from published.defaults import FSDP2, MEGATRON, TABLE, Assumptions
from published.rows import number
from published.torchtitan import LATENT, torchtitan

CHUNKED_LOSS_NBYTES, CHUNKED_LOSS_NBYTES_COMPILED = 7.0, 4.5
"""Bytes per logit of torchtune's CEWithChunkedOutputLoss (in torchtitan #996), which is given all logits in 16 bits and
casts one of 8 pieces at a time: logits (2), each piece's log-softmax until its backward (4; compiled it is not kept,
and gradients of 2 are the most), and one piece's cast and gradient (8 / 8; compiled 4 / 8). Not torchtitan's later
ChunkedCELoss, which projects piece by piece."""


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
        host_ops_per_layer=0 if graphs else MEGATRON.host_ops_per_layer,
        expert_host_ops=0 if graphs else MEGATRON.expert_host_ops,
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
    if framework.startswith(("torchtitan", "torchtune")) and (date_of(row) or "2025-01") < "2025-08":
        implementation = dataclasses.replace(implementation, float32_norm=True)
    if framework.startswith("torchtitan"):
        implementation = torchtitan(row, implementation, FSDP2, compiled=compiled)
    if "chunked ce" in notes:
        implementation = dataclasses.replace(implementation, loss_nbytes=CHUNKED_LOSS_NBYTES, loss_hole_nbytes=0.0)
    if "fused=false" in notes:
        implementation = dataclasses.replace(implementation, optimizer_passes=3.0)
    step = torchtune_step(row)
    if step is not None:
        implementation = dataclasses.replace(
            implementation,
            fused=step >= 2,
            recomputes_cheap=step >= 2,
            loss_nbytes=CHUNKED_LOSS_NBYTES_COMPILED if step >= 3 else implementation.loss_nbytes,
            loss_hole_nbytes=0.0 if step >= 3 else implementation.loss_hole_nbytes,
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
    found, implementation = _attention_of(row, found, implementation)
    if framework.startswith("Megatron-Bridge") and row.get("model", "").startswith("GPT-OSS"):
        implementation = _gpt_oss(row, implementation)
    if row.get("gpu", "").startswith("A100") and implementation.attention == "cudnn":
        implementation = dataclasses.replace(implementation, attention="flash2")
    if "mem-efficient" in notes:
        implementation = dataclasses.replace(implementation, attention="efficient")
    return dataclasses.replace(found, implementation=implementation)
