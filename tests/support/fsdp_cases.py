"""Models and hand-written plans with FSDP groups: over one axis and two, resharded after forward, backward or step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from support.executor_cases import (
    LLAMA_BLOCKS,
    S0,
    Case,
    P,
    R,
    data_parallel,
    megatron,
    replicated_on_tp,
    reshard_after_backward,
    reshard_after_step,
    with_fsdp_groups,
)

MLP = {"fc1": ("weight", "bias"), "fc2": ("weight",), "": ("head.weight",)}
"""One group has parameters of the root, and one a bias."""
ALL_MLP = {"fc1": ("weight", "bias"), "fc2": ("weight", "bias"), "": ("head.weight", "head.bias")}
GPT2 = {"transformer.h.*": ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_fc.weight")}
BERT = {"bert.encoder.layer.*": ("attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight")}
T5 = {
    "encoder.block.*": ("layer.1.DenseReluDense.wi.weight",),
    "decoder.block.*": ("layer.2.DenseReluDense.wi.weight",),
}
AC = "model.layers.*"

CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: with_fsdp_groups(replicated_on_tp("mlp"), MLP),
    "mlp, 2 micro-batches": lambda: with_fsdp_groups(replicated_on_tp("mlp", micro_batches=2), MLP),
    "gpt2": lambda: with_fsdp_groups(replicated_on_tp("gpt2"), GPT2),
    "bert": lambda: with_fsdp_groups(replicated_on_tp("bert"), BERT),
    "t5": lambda: with_fsdp_groups(replicated_on_tp("t5"), T5),
    "llama, sharded on two dims": lambda: with_fsdp_groups(megatron(), LLAMA_BLOCKS),
    "llama, 2 micro-batches": lambda: with_fsdp_groups(megatron(micro_batches=2), LLAMA_BLOCKS),
    "llama, full AC": lambda: with_fsdp_groups(megatron(activation_checkpointing={AC: "full"}), LLAMA_BLOCKS),
    "llama, selective AC": lambda: with_fsdp_groups(megatron(activation_checkpointing={AC: "selective"}), LLAMA_BLOCKS),
    "llama, full AC, 2 micro-batches": lambda: with_fsdp_groups(
        megatron(activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS
    ),
    "llama, vocabulary sharded, head and embedding": lambda: with_fsdp_groups(
        megatron(vocabulary=True), {**LLAMA_BLOCKS, "lm_head": ("weight",), "model.embed_tokens": ("weight",)}
    ),
    "mlp, until backward, 2 micro-batches": lambda: reshard_after_backward(
        with_fsdp_groups(replicated_on_tp("mlp", micro_batches=2), MLP)
    ),
    "gpt2, until backward": lambda: reshard_after_backward(
        with_fsdp_groups(replicated_on_tp("gpt2", micro_batches=2), GPT2)
    ),
    "t5, until backward": lambda: reshard_after_backward(with_fsdp_groups(replicated_on_tp("t5"), T5)),
    "llama, until backward, 3 micro-batches": lambda: reshard_after_backward(
        with_fsdp_groups(megatron(micro_batches=3), LLAMA_BLOCKS)
    ),
    "llama, until backward, full AC, 2 micro-batches": lambda: reshard_after_backward(
        with_fsdp_groups(megatron(activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS)
    ),
    "llama, until backward, selective AC": lambda: reshard_after_backward(
        with_fsdp_groups(megatron(activation_checkpointing={AC: "selective"}), LLAMA_BLOCKS)
    ),
    "mlp, for the step, 4 micro-batches": lambda: reshard_after_step(
        with_fsdp_groups(replicated_on_tp("mlp", micro_batches=4), MLP)
    ),
    "mlp, all for the step": lambda: reshard_after_step(
        with_fsdp_groups(replicated_on_tp("mlp", micro_batches=3), ALL_MLP)
    ),
    "t5, for the step": lambda: reshard_after_step(with_fsdp_groups(replicated_on_tp("t5", micro_batches=4), T5)),
    "llama, for the step, 4 micro-batches": lambda: reshard_after_step(
        with_fsdp_groups(megatron(micro_batches=4), LLAMA_BLOCKS)
    ),
    "llama, for the step, full AC": lambda: reshard_after_step(
        with_fsdp_groups(megatron(activation_checkpointing={AC: "full"}, micro_batches=4), LLAMA_BLOCKS)
    ),
    "mlp, for the step, reduced on tp afterwards": lambda: reshard_after_step(
        reduced_on_tp_afterwards(with_fsdp_groups(data_parallel("mlp", micro_batches=4), MLP))
    ),
    "mlp, over both axes": lambda: with_fsdp_groups(data_parallel("mlp"), MLP, 0, 1),
    "gpt2, over both axes, 2 micro-batches": lambda: with_fsdp_groups(
        data_parallel("gpt2", micro_batches=2), GPT2, 0, 1
    ),
    "llama, over both axes, full AC": lambda: with_fsdp_groups(
        data_parallel("llama", activation_checkpointing={AC: "full"}, micro_batches=2), LLAMA_BLOCKS, 0, 1
    ),
    "llama, over both axes, until backward": lambda: reshard_after_backward(
        with_fsdp_groups(data_parallel("llama", micro_batches=2), LLAMA_BLOCKS, 0, 1)
    ),
    "llama, over both axes, for the step": lambda: reshard_after_step(
        with_fsdp_groups(data_parallel("llama", micro_batches=3), LLAMA_BLOCKS, 0, 1)
    ),
    "llama, with other parameters outside of groups": lambda: with_gathered_norms(
        with_fsdp_groups(megatron(), LLAMA_BLOCKS)
    ),
}


def with_gathered_norms(case: Case) -> Case:
    plan = case.plan
    norms = {name: (S0, R) for name in plan.plan if "norm" in name}
    computed = dict.fromkeys(norms, (R, R))
    changed = dataclasses.replace(
        plan, plan={**plan.plan, **norms}, compute_plan={**plan.compute_plan, **computed}, micro_batches=2
    )
    return Case(case.family, changed)


def reduced_on_tp_afterwards(case: Case) -> Case:
    """Return ``case`` with gradients of FSDP groups that stay partial on tp until the end of the step."""
    gradients = {name: (layout[0], P) for name, layout in case.plan.gradient_plan.items()}
    return Case(case.family, dataclasses.replace(case.plan, gradient_plan=gradients))
