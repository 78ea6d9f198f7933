"""Checkpoints in ``from_pretrained`` format, and plans to load them under, for the tests of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from support.executor_cases import (
    LLAMA_BLOCKS,
    S0,
    S1,
    S2,
    Case,
    P,
    R,
    fully_sharded,
    make_batch,
    make_model,
    megatron,
    replicated_on_tp,
    with_fsdp_groups,
)
from support.fsdp_cases import BERT, GPT2, T5
from support.small_models import EIGHT_HEADS
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard

from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner.plan.sharding_plan import Port, ShardingPlan

QWEN = EIGHT_HEADS | {
    "tie_word_embeddings": True,
}


def build(family: str) -> nn.Module:
    """Return a tiny model; the same values each time."""
    if family != "qwen3":
        return make_model(family)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN)).train()


def build_on_meta(family: str) -> nn.Module:
    with torch.device("meta"):
        return build(family)


def batch_of(family: str) -> dict[str, Any]:
    return make_batch("llama" if family == "qwen3" else family)


def _qwen() -> Case:
    """Return a case with tied embeddings stored sharded, beside replicated parameters."""
    model, plan = build("qwen3"), replicated_on_tp("llama").plan
    stored = {name: (S0, S1) if p.dim() == 2 else (R, R) for name, p in model.named_parameters()}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p.dim() == 2]
    computed = dict.fromkeys(names, (R, R))
    return Case("qwen3", dataclasses.replace(plan, plan=stored, compute_plan=computed))


def _experts_inner() -> Case:
    """Return Mixtral with the inner dim of its experts sharded on tp: ``gate_up_proj`` is a strided shard."""
    case = replicated_on_tp("mixtral")
    stored = dict(case.plan.plan)
    for name in stored:
        if name.endswith("gate_up_proj"):
            stored[name] = (R, _StridedShard(1, split_factor=2))
        elif name.endswith("experts.down_proj"):
            stored[name] = (R, S2)
    rows = (S0, R)
    entering, leaving = Port(layout=rows, grad=(S0, P)), Port(layout=rows, source=(S0, P), source_grad=rows)
    entering = dataclasses.replace(entering, source=rows, source_grad=rows)
    ports = {"model.layers.*.mlp.experts.input": (entering, Port(layout=rows), entering)}
    return Case(
        "mixtral",
        dataclasses.replace(
            case.plan,
            plan=stored,
            input_plan={**case.plan.input_plan, **ports},
            output_plan={"model.layers.*.mlp.experts": leaving},
        ),
    )


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: with_fsdp_groups(megatron(vocabulary=True), LLAMA_BLOCKS),
    "gpt2": lambda: with_fsdp_groups(replicated_on_tp("gpt2"), GPT2),
    "mixtral": _experts_inner,
    "t5": lambda: with_fsdp_groups(replicated_on_tp("t5"), T5),
    "bert": lambda: with_fsdp_groups(replicated_on_tp("bert"), BERT),
    "vit": lambda: fully_sharded("vit"),
    "qwen3": _qwen,
    "deepseek": lambda: fully_sharded("deepseek"),
}
"""The eight families, each under a plan of another kind."""


def write_checkpoint(family: str, folder: Path) -> Path:
    """Write a tiny model as ``save_pretrained`` does, and return the folder."""
    build(family).save_pretrained(folder, max_shard_size="300KB")
    return folder


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Return name -> tensor of all safetensors files in a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def sharded_on_meta(family: str, plan: ShardingPlan) -> nn.Module:
    model = build_on_meta(family)
    return shard_module(model, device_mesh_for(plan), plan)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
