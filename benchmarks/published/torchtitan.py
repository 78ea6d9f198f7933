"""What torchtitan's quantized linears and its graph_trainer do: assumptions that ``frameworks`` makes of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cost_model.parallelism import Implementation
from published.dates import date_of

LATENT = ("DeepSeek-V3", "Kimi")
"""How the names of models with latent attention start: queries and keys are wider than values."""


GRAPH_TRAINER = ("graph_trainer", "graph sac", "message (#2564)")
"""How rows of torchtitan's graph_trainer are told: its name, its selective checkpointing, and the pull request whose
message shows MODULE=graph_trainer while the row does not."""


def graph_trainer(row: Mapping[str, str], implementation: Implementation, eager: Implementation) -> Implementation:
    """Return what torchtitan's experiment graph_trainer does, where a row ran it; ``eager`` is torchtitan uncompiled.

    - At first (README @72f89d206, 2026-03) the graph ran as it was traced: overlap of collectives with compute
      (bucketing passes) and compilation of FlexAttention (regional_inductor) had to be asked for, which the commands of
      the rows do not. FlexAttention is latent attention's default, and without a compiler it is dense, in float32
      (torch's _higher_order_ops/flex_attention.py).
    - Since #3060 (2026-04-23; passes.py and memory_policy.py @27aa49077) collectives are bucketed, CUDA graphs run the
      step, and the default policy keeps all products; only FlexAttention is compiled, all else is interpreted.
    """
    text = " ".join(row.get(key, "") for key in ("source", "framework", "compile", "config_notes", "act_ckpt")).lower()
    if not any(mark in text for mark in GRAPH_TRAINER):
        return implementation
    traced = dataclasses.replace(
        eager,
        loss_chunks=implementation.loss_chunks,
        keeps_unread=False,
        keeps_exchanged=implementation.keeps_exchanged,
    )
    if date_of(row) >= "2026-04-23":
        return dataclasses.replace(traced, host_ops_per_layer=0, expert_host_ops=0, kept_products="all")
    dense = row.get("model", "").startswith(LATENT)
    kernel = "dense" if dense else traced.attention
    return dataclasses.replace(traced, data_overlap=False, gather_pieces=7, attention=kernel)


NVFP4_SHARE = 0.85
"""Share of the layers whose linears torchtitan's recipes run in NVFP4, the last ones stay in 16 bits (its
components/quantization/nvfp4.md @b5bcd76)."""


def torchao(row: Mapping[str, str], implementation: Implementation) -> Implementation:
    """Return what torchao's 8- and 4-bit linears do in torchtitan, by recipe.

    - Scaled by tensor: inputs are cast before tensor parallelism gathers them, gradients likewise (torchao's
      float8_tensor_parallel.py); parameters too where the row says so (float8 all-gather of FSDP2).
    - Scaled by row: everything is gathered in 16 bits (torchtitan's parallelize_llama.py: for rowwise recipes regular
      TP). A tensor is scaled along both dims: read and written along the one (3 bytes), read twice and written along
      the other (5). Backward's products are those of tensors, rescaled afterwards by a kernel of their own, two bytes
      read and two written (torchao's float8_ops.py @36027d82d, post_inverse_scale; pytorch/ao#2184).
    - NVFP4's product is not on the list of ops whose results selective checkpointing keeps: it is _scaled_mm_v2
      (torchao's nvfp4_linear.py calls torch.nn.functional.scaled_mm), the list has _scaled_mm
      (torch._functorch.partitioners.get_default_op_list, torch 2.13). Its recipes compile the model alone, not the
      loss (models/llama3/config_registry.py @bcc09297a, components=["model"]).
    """
    precision = row.get("precision", "").lower()
    if "nvfp4" in precision:
        return dataclasses.replace(
            implementation,
            cast_share=NVFP4_SHARE,
            cast_kept_products="none",
            loss_nbytes=Implementation.loss_nbytes,
            loss_traffic_nbytes=Implementation.loss_traffic_nbytes,
        )
    if "rowwise" in precision:
        return dataclasses.replace(implementation, cast_nbytes=8.0, rescale_nbytes=4.0)
    if "tensorwise" in precision or "fp8 all-gather" in precision:
        sharded = "fp8 all-gather" in precision or "fp8 ag" in precision
        return dataclasses.replace(implementation, gathers_cast=True, shards_cast=sharded)
    return implementation
