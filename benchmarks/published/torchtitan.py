"""What torchtitan did at a row's date, its quantized linears, its graph_trainer: what ``frameworks`` makes of its rows.

Dates are those of commits to pytorch/torchtitan, read at b5bcd76.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cost_model.configuration.parallelism import Implementation
from published.dates import date_of
from published.rows import number

LATENT = ("DeepSeek-V3", "Kimi")
"""How the names of models with latent attention start: queries and keys are wider than values."""


OWN_COMMANDS = (
    "aws-samples/awsome-distributed-training",
    "pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy",
    "pytorch/torchtitan torchtitan/components/quantization/nvfp4.md",
    "pytorch/torchtitan commit bcc09297a",
)
"""Sources whose command is torchrun without torchtitan's run_train.sh: AWS's sbatch script @7217859f, the commands of
benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md and of nvfp4.md, whose code is #3914 (bcc09297a)."""


def torchtitan(
    row: Mapping[str, str], implementation: Implementation, eager: Implementation, *, compiled: bool
) -> Implementation:
    """Return what torchtitan did at the row's date, in the parts that cost memory; ``eager`` is torchtitan uncompiled.

    - The loss: in eager torch 12 bytes per logit in backward, and 2 that are no use to it; until #391 (2024-06-12) the
      float32 logits were alive, too. Compiled since #1033 (2025-04-02): logits and their gradient in 16 bits.
    - Tensor-parallel logits were whole before May 2024. Since then DTensor's loss parallelism: log-softmax, two float32
      tensors of its gradient and their sum (_nll_loss_and_log_softmax_backward in torch's
      distributed/tensor/parallel/loss.py).
    - In 8 pieces since #2937 (2026-04-27): per value of the hidden state 2 bytes, 2 of its pieces' copies, 4 of a
      float32 gradient and 2 of that in 16 bits (components/loss.py @bcc09297a, ChunkedLossWrapper).
    - Embedding and head were the root's until #1094 (2025-07-28), of models with experts until #1561 (2025-08-13), gave
      each a fully_shard of its own.
    - Shared experts were a stack of one expert until #1561, which fully_shard gives to the first rank whole.
    - Experts' results were put back whole and in float32 from #1974 (2025-11-21) to #2775 (2026-04-06); the router
      reads its input in float32 since #2389 (2026-03-04).
    - A pipeline keeps parameters gathered, and so does ZeRO-2. Results of all-to-alls are kept since #1672.
    - torch's pipelining keeps what the last stage returns of each micro-batch until the step ends; since #1922
      (2025-10-22) torchtitan declines it.
    """
    date = date_of(row)
    changes: dict[str, object] = {"expandable_segments": _expandable(row, date)}
    if (compiled or row.get("compile") == "loss only") and date >= "2025-04-02":
        changes |= {"loss_traffic_nbytes": 8.0, "loss_nbytes": 4.0, "loss_hole_nbytes": 0.0}
    elif "0000" < date < "2024-06-12":
        changes |= {"loss_nbytes": 16.0, "loss_parallel": date >= "2024-05-01"}
    if date >= "2026-04-27":
        changes |= {"loss_chunks": 8, "loss_hidden_nbytes": 10.0}
    if date >= ("2025-08-13" if number(row, "n_experts") else "2025-07-28"):
        changes["root_holds_ends"] = False
    if date >= "2025-09-06":
        changes["keeps_exchanged"] = True  # #1672
    if "0000" < date < "2025-08-13":
        changes["shards_shared_experts"] = False
    changes |= {"unsorts_whole": "2025-11-21" <= date < "2026-04-06", "router_nbytes": 4 if date >= "2026-03-04" else 0}
    if (number(row, "pp") or 1) > 1:
        changes |= {"receives_ahead": True, "keeps_outputs": "0000" < date < "2025-10-22"}
    if (number(row, "pp") or 1) > 1 or row.get("zero_stage") == "2":
        changes["reshards"] = False
    found = dataclasses.replace(implementation, **changes)  # type: ignore[arg-type]
    found = torchao(row, found)
    if (number(row, "tp") or 1) > 1 and found.loss_parallel and found.loss_nbytes == Implementation.loss_nbytes:
        found = dataclasses.replace(found, loss_nbytes=16.0)
    return graph_trainer(row, found, eager)


def _expandable(row: Mapping[str, str], date: str) -> bool:
    """Return whether the row ran with expandable segments.

    run_train.sh (before run_llama_train.sh) sets them since #643 (2024-10-22); ROCm has them since torch 2.12
    (pytorch/pytorch#177974, 2026-03). Assumed alike on several nodes: multinode_trainer.slurm does not set them, but it
    is for AWS's network, and the rows' runs were elsewhere.
    """
    rocm = row.get("gpu", "").startswith("MI") and date < "2026-03-20"
    return date >= "2024-10-22" and not rocm and not row.get("source", "").startswith(OWN_COMMANDS)


GRAPH_TRAINER = ("graph_trainer", "graph sac", "message (#2564)")
"""How rows of torchtitan's graph_trainer are told: its name, its selective checkpointing, and the pull request whose
message shows MODULE=graph_trainer while the row does not."""


def graph_trainer(row: Mapping[str, str], implementation: Implementation, eager: Implementation) -> Implementation:
    """Return what torchtitan's experiment graph_trainer does, where a row ran it; ``eager`` is torchtitan uncompiled.

    - At first (README @72f89d206, 2026-03) the graph ran as it was traced: overlap of collectives with compute
      (bucketing passes) and compilation of FlexAttention (regional_inductor) had to be asked for, which the commands of
      the rows do not. FlexAttention is latent attention's default, and without a compiler it is dense, in float32
      (torch's _higher_order_ops/flex_attention.py).
    - In that graph aten._to_copy casts shards, not prims.convert_element_type, which is all that
      reshard_after_forward.py looks for, so that the casts are kept for backward. Without checkpointing so are the
      transposed views of gathered parameters, which no pass marks, and with them the parameters
      (torch._functorch.partitioners.default_partition, seen on a model of two linears with torch 2.13). What the graph
      keeps stays until its backward returns: graph_utils.py gives GraphModules for compiled callables, which take no
      boxed arguments.
    - Since #3060 (2026-04-23; passes.py and memory_policy.py @27aa49077) collectives are bucketed, CUDA graphs run the
      step (but for grouped products before Blackwell, cudagraph.py), and the default policy keeps all products; only
      FlexAttention is compiled, all else is interpreted. The full policy (#3429, 2026-06-02) keeps results of ops that
      are tagged nondeterministic_seeded, as those of scaled_dot_product_attention are.
    - Without a CUDA graph's own pool, the first step allocates gradients and optimizer states between each other.
    - Its collectives are functional: what they return is allocated on the stream that computes. Its loss is not cut
      into pieces (configs.py @27aa49077, @9d3c7d205: "doesn't yet support ChunkedCELoss"); where it is traced with the
      model, its parts are dropped after their last use.
    """
    text = " ".join(row.get(key, "") for key in ("source", "framework", "compile", "config_notes", "act_ckpt")).lower()
    if not any(mark in text for mark in GRAPH_TRAINER):
        return implementation
    traced = dataclasses.replace(
        eager,
        loss_nbytes=implementation.loss_nbytes,
        loss_hole_nbytes=2.0,
        keeps_unread=False,
        keeps_exchanged=implementation.keeps_exchanged,
        unsorts_whole=implementation.unsorts_whole,
        router_nbytes=implementation.router_nbytes,
        gather_stream=False,
        reduce_stream=False,
        root_holds_ends=False,
        expandable_segments=implementation.expandable_segments,
    )
    latent = row.get("model", "").startswith(LATENT)
    if date_of(row) >= "2026-04-23":
        graphed = not number(row, "n_experts") or row.get("gpu", "").startswith(("B", "GB"))
        return dataclasses.replace(
            traced,
            gradient_holes=not graphed,
            full_keeps_attention=not latent,
            host_ops_per_layer=0 if graphed else eager.host_ops_per_layer,
            expert_host_ops=0 if graphed else eager.expert_host_ops,
            kept_products="all",
            loss_nbytes=Implementation.loss_nbytes,
        )
    return dataclasses.replace(
        traced,
        data_overlap=False,
        gather_pieces=7,
        attention="dense" if latent else traced.attention,
        reshards=row.get("act_ckpt") != "none",
        releases_saved=False,
        gradient_holes=True,
        keeps_cast_shards=True,
    )


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
      read and two written (torchao's float8_ops.py @36027d82d, post_inverse_scale; pytorch/ao#2184). Before #820
      selective checkpointing kept the absolute values of gathered weights (its message; one row says so).
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
            loss_hole_nbytes=2.0,
            loss_traffic_nbytes=Implementation.loss_traffic_nbytes,
        )
    if "rowwise" in precision:
        kept = 2.0 if "saves abs() of weights" in row.get("notes", "") else 0.0
        return dataclasses.replace(implementation, cast_nbytes=8.0, rescale_nbytes=4.0, kept_weight_nbytes=kept)
    if "tensorwise" in precision or "fp8 all-gather" in precision:
        sharded = "fp8 all-gather" in precision or "fp8 ag" in precision
        return dataclasses.replace(implementation, gathers_cast=True, shards_cast=sharded)
    return implementation
