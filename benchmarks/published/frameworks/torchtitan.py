"""torchtitan's choices at a row's date, torchao's for quantized linears, and those of torchtitan's graph_trainer.

Dates are those of commits to pytorch/torchtitan, read at b5bcd76.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_model.configuration.implementation import (
    EAGER_LOGIT_NBYTES,
    EAGER_LOSS_TRAFFIC_NBYTES,
    AllocatorOptions,
    DataParallelOptions,
    ExpertOptions,
    Implementation,
    LossOptions,
    PipelineOptions,
)
from published.rows.dates import date_of
from published.rows.priced_row import number

MLA_MODELS = ("DeepSeek-V3", "Kimi")
"""Starts of the names of models with multi-head latent attention: queries and keys are wider than values."""

OWN_COMMANDS = (
    "aws-samples/awsome-distributed-training",
    "pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy",
    "pytorch/torchtitan torchtitan/components/quantization/nvfp4.md",
    "pytorch/torchtitan commit bcc09297a",
)
"""Sources whose command is torchrun without torchtitan's run_train.sh: AWS's sbatch script @7217859f, the commands of
benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md and of nvfp4.md, whose code is #3914 (bcc09297a)."""

LOSS_PARALLEL_LOGIT_NBYTES = 16.0
"""Bytes per logit of DTensor's loss parallelism: log-softmax, two float32 tensors of its gradient, and their sum
(_nll_loss_and_log_softmax_backward in torch's distributed/tensor/parallel/loss.py)."""

NVFP4_SHARE = 0.85
"""Share of the layers whose linears torchtitan's recipes run in NVFP4; the last ones stay in 16 bits (its
components/quantization/nvfp4.md @b5bcd76)."""

GRAPH_TRAINER = ("graph_trainer", "graph sac", "message (#2564)")
"""Texts that mark rows of torchtitan's graph_trainer: its name, its selective checkpointing, and a pull request whose
message has MODULE=graph_trainer, which the row does not state."""


def torchtitan(
    row: Mapping[str, str], implementation: Implementation, eager: Implementation, *, compiled: bool
) -> Implementation:
    """Return torchtitan's choices at the row's date, as far as they affect memory; ``eager`` is for uncompiled runs."""
    date = date_of(row)
    found = replace(
        implementation,
        experts=_experts(implementation.experts, date),
        data_parallel=_data_parallel(row, implementation.data_parallel, date),
        loss=_loss(row, implementation.loss, date, compiled=compiled),
        # Results of all-to-alls are saved since #1672.
        saving=replace(implementation.saving, selective_all_to_all=date >= "2025-09-06"),
        allocator=replace(implementation.allocator, expandable_segments=_expandable(row, date)),
        pipeline=_pipeline(row, date),
    )
    found = torchao(row, found)
    loss = found.loss
    if (number(row, "tp") or 1) > 1 and loss.vocabulary_parallel and loss.logit_nbytes == EAGER_LOGIT_NBYTES:
        found = replace(found, loss=replace(loss, logit_nbytes=LOSS_PARALLEL_LOGIT_NBYTES))
    return graph_trainer(row, found, eager)


def _loss(row: Mapping[str, str], loss: LossOptions, date: str, *, compiled: bool) -> LossOptions:
    """Return the loss at a date.

    - Eager torch holds 12 bytes per logit in backward, and 2 more that it cannot use. Until #391 (2024-06-12), the
      float32 logits were live, too. Compiled since #1033 (2025-04-02): logits and their gradient in 16 bits.
    - Tensor-parallel logits were whole before May 2024; since then DTensor's loss parallelism splits them.
    - In 8 chunks since #2937 (2026-04-27). Per value of the projection's input: 2 bytes, 2 of its chunks' copies, 4 of
      a float32 gradient and 2 of that in 16 bits (components/loss.py @bcc09297a, ChunkedLossWrapper).
    """
    if (compiled or row.get("compile") == "loss only") and date >= "2025-04-02":
        loss = replace(loss, traffic_nbytes=8.0, logit_nbytes=4.0, logit_hole_nbytes=0.0)
    elif "0000" < date < "2024-06-12":
        loss = replace(loss, logit_nbytes=16.0, vocabulary_parallel=date >= "2024-05-01")
    if date >= "2026-04-27":
        loss = replace(loss, chunks=8, input_nbytes=10.0)
    return loss


def _data_parallel(row: Mapping[str, str], options: DataParallelOptions, date: str) -> DataParallelOptions:
    """Return the FSDP choices at a date.

    Embedding and head were in the root's FSDP group. Since #1094 (2025-07-28), and for models with experts since #1561
    (2025-08-13), each is a group of its own. With a pipeline, or with ZeRO-2, parameters are not resharded after
    forward.
    """
    if date >= ("2025-08-13" if number(row, "n_experts") else "2025-07-28"):
        options = replace(options, root_holds_ends=False)
    if (number(row, "pp") or 1) > 1 or row.get("zero_stage") == "2":
        options = replace(options, reshard_after_forward=False)
    return options


def _experts(options: ExpertOptions, date: str) -> ExpertOptions:
    """Return the choices of experts at a date.

    Until #1561 (2025-08-13), shared experts were a stack of one expert, all of which fully_shard puts on the first
    rank. From #1974 (2025-11-21) to #2775 (2026-04-06), results of experts were combined in float32, not split over
    tensor ranks. Since #2389 (2026-03-04), the router reads its input in float32.
    """
    return replace(
        options,
        shards_shared_experts=not "0000" < date < "2025-08-13",
        float32_combine="2025-11-21" <= date < "2026-04-06",
        router_nbytes=4 if date >= "2026-03-04" else 0,
    )


def _pipeline(row: Mapping[str, str], date: str) -> PipelineOptions:
    """Return the buffers of torch's pipelining.

    Its last stage retains its outputs until the step ends. Since #1922 (2025-10-22) torchtitan does not ask for them.
    """
    if (number(row, "pp") or 1) == 1:
        return PipelineOptions()
    return PipelineOptions(preallocates_receives=True, retains_outputs="0000" < date < "2025-10-22")


def _expandable(row: Mapping[str, str], date: str) -> bool:
    """Return whether the row ran with expandable segments.

    run_train.sh (before that run_llama_train.sh) sets them since #643 (2024-10-22). ROCm has them since torch 2.12
    (pytorch/pytorch#177974, 2026-03). Assumed to hold on several nodes too: multinode_trainer.slurm does not set them,
    but it is for AWS's network, and the rows' runs were elsewhere.
    """
    rocm = row.get("gpu", "").startswith("MI") and date < "2026-03-20"
    return date >= "2024-10-22" and not rocm and not row.get("source", "").startswith(OWN_COMMANDS)


def graph_trainer(row: Mapping[str, str], implementation: Implementation, eager: Implementation) -> Implementation:
    """Return the choices of torchtitan's experiment graph_trainer if a row ran it; ``eager`` is for uncompiled runs.

    - At first (README @72f89d206, 2026-03) the graph ran as traced. The overlap of collectives with compute (bucketing
      passes) and the compilation of FlexAttention (regional_inductor) were optional, and the rows' commands do not ask
      for them. FlexAttention is the default for multi-head latent attention; without a compiler it is dense, in float32
      (torch's _higher_order_ops/flex_attention.py).
    - In that graph aten._to_copy casts shards, while reshard_after_forward.py looks for prims.convert_element_type
      only. So the casts are saved for backward. Without checkpointing, the transposed views of all-gathered parameters
      are saved as well, since no pass marks them, and they keep the all-gathered parameters alive
      (torch._functorch.partitioners.default_partition, seen on a model of two linears with torch 2.13). Saved tensors
      live until backward returns: graph_utils.py gives GraphModules for compiled callables, which take no boxed
      arguments.
    - Since #3060 (2026-04-23; passes.py and memory_policy.py @27aa49077) collectives are bucketed, CUDA graphs run the
      step (except grouped GEMMs before Blackwell, cudagraph.py), and the default policy saves all GEMMs' results. Only
      FlexAttention is compiled; all else is interpreted. The full policy (#3429, 2026-06-02) saves results of ops with
      the tag nondeterministic_seeded, which scaled_dot_product_attention has.
    - Without the memory pool of a CUDA graph, the first step allocates optimizer states between gradients.
    - Its collectives are functional: their results are allocated on the stream that computes. Its loss is not chunked
      (configs.py @27aa49077, @9d3c7d205: "doesn't yet support ChunkedCELoss"). Where the loss is traced with the model,
      its tensors are freed after their last use.
    """
    text = " ".join(row.get(key, "") for key in ("source", "framework", "compile", "config_notes", "act_ckpt")).lower()
    if not any(mark in text for mark in GRAPH_TRAINER):
        return implementation
    mla = row.get("model", "").startswith(MLA_MODELS)
    traced = replace(
        eager,
        experts=replace(
            eager.experts,
            float32_combine=implementation.experts.float32_combine,
            router_nbytes=implementation.experts.router_nbytes,
        ),
        data_parallel=replace(eager.data_parallel, root_holds_ends=False),
        loss=replace(eager.loss, logit_nbytes=implementation.loss.logit_nbytes, logit_hole_nbytes=2.0),
        saving=replace(
            eager.saving,
            selective_unread=False,
            selective_all_to_all=implementation.saving.selective_all_to_all,
        ),
        allocator=AllocatorOptions(expandable_segments=implementation.allocator.expandable_segments),
    )
    if date_of(row) >= "2026-04-23":
        return _bucketed_graph(row, traced, mla=mla)
    return replace(
        traced,
        kernels=replace(traced.kernels, attention="dense") if mla else traced.kernels,
        data_parallel=replace(
            traced.data_parallel,
            overlaps=False,
            collectives_per_layer=7,
            reshard_after_forward=row.get("act_ckpt") != "none",
            saves_cast_shards=True,
        ),
        saving=replace(traced.saving, frees_in_backward=False),
        allocator=replace(traced.allocator, gradient_holes=True),
    )


def _bucketed_graph(row: Mapping[str, str], traced: Implementation, *, mla: bool) -> Implementation:
    """Return graph_trainer's choices since #3060 (2026-04-23), by `graph_trainer`'s docstring."""
    graphed = not number(row, "n_experts") or row.get("gpu", "").startswith(("B", "GB"))
    kernels = replace(traced.kernels, host_ops_per_layer=0, expert_host_ops=0) if graphed else traced.kernels
    return replace(
        traced,
        kernels=kernels,
        loss=replace(traced.loss, logit_nbytes=EAGER_LOGIT_NBYTES),
        saving=replace(traced.saving, selective_gemms="all", full_attention=not mla),
        allocator=replace(traced.allocator, gradient_holes=not graphed),
    )


def torchao(row: Mapping[str, str], implementation: Implementation) -> Implementation:
    """Return the choices of torchao's 8- and 4-bit linears in torchtitan, by recipe.

    - Tensorwise scales: inputs are cast before tensor parallelism all-gathers them, gradients likewise (torchao's
      float8_tensor_parallel.py), and parameters where the row says so (float8 all-gather of FSDP2).
    - Rowwise scales: everything is all-gathered in 16 bits (torchtitan's parallelize_llama.py: for rowwise recipes
      regular TP). A tensor is scaled along both dims: read and written along the first (3 bytes), read twice and
      written along the second (5). Results of backward GEMMs are rescaled by a separate kernel, two bytes read and two
      written (torchao's float8_ops.py @36027d82d, post_inverse_scale; pytorch/ao#2184). Before #820, selective
      checkpointing saved the absolute values of all-gathered weights (its message; one row says so).
    - NVFP4: its GEMM is not among the ops whose results selective checkpointing saves. It is _scaled_mm_v2 (torchao's
      nvfp4_linear.py calls torch.nn.functional.scaled_mm); the list has _scaled_mm
      (torch._functorch.partitioners.get_default_op_list, torch 2.13). Its recipes compile the model only, not the loss
      (models/llama3/config_registry.py @bcc09297a, components=["model"]).
    """
    precision = row.get("precision", "").lower()
    low, saving = implementation.low_precision, implementation.saving
    if "nvfp4" in precision:
        loss = replace(
            implementation.loss,
            logit_nbytes=EAGER_LOGIT_NBYTES,
            logit_hole_nbytes=2.0,
            traffic_nbytes=EAGER_LOSS_TRAFFIC_NBYTES,
        )
        return replace(
            implementation,
            low_precision=replace(low, layer_share=NVFP4_SHARE),
            saving=replace(saving, selective_cast_gemms="none"),
            loss=loss,
        )
    if "rowwise" in precision:
        weight_nbytes = 2.0 if "saves abs() of weights" in row.get("notes", "") else 0.0
        return replace(
            implementation,
            low_precision=replace(low, cast_nbytes=8.0, rescale_nbytes=4.0),
            saving=replace(saving, selective_weight_nbytes=weight_nbytes),
        )
    if "tensorwise" in precision or "fp8 all-gather" in precision:
        shards = "fp8 all-gather" in precision or "fp8 ag" in precision
        return replace(implementation, low_precision=replace(low, casts_before_gather=True, casts_shards=shards))
    return implementation
