"""Tiny models, and plans for them written by hand, for the tests of the executor."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import divides, sharded_dim
from planner.plan.job import Job
from planner.plan.patterns import resolve_keys
from planner.plan.sharding_plan import PlanMesh, Port, ShardingPlan

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)
BATCH, SEQ, VOCAB = 8, 16, 256
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2, self.head = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.fc2(self.relu(self.fc1(x)))), labels)


def make_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    models: dict[str, Callable[[], nn.Module]] = {
        "mlp": MLP,
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**_SIZES, num_key_value_heads=4, vocab_size=VOCAB, max_position_embeddings=64)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **_SIZES, num_key_value_heads=4, vocab_size=VOCAB, max_position_embeddings=64, num_local_experts=4
            )
        ),
        "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **_SIZES | {"num_hidden_layers": 3},
                vocab_size=VOCAB,
                max_position_embeddings=64,
                num_key_value_heads=8,
                moe_intermediate_size=64,
                n_routed_experts=8,
                n_group=4,
                topk_group=2,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                q_lora_rank=32,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=64,
                n_layer=2,
                n_head=8,
                vocab_size=VOCAB,
                n_positions=64,
                attn_pdrop=0,
                embd_pdrop=0,
                resid_pdrop=0,
            )
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                **_SIZES,
                vocab_size=VOCAB,
                max_position_embeddings=64,
                hidden_dropout_prob=0,
                attention_probs_dropout_prob=0,
            )
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                decoder_start_token_id=0,
                d_model=64,
                d_kv=8,
                d_ff=128,
                num_layers=2,
                num_heads=8,
                vocab_size=VOCAB,
                dropout_rate=0,
                # ReLU's gradient jumps: rounding of 1e-8 in a weight then changes gradients by 2e-4, sharded or not.
                feed_forward_proj="gelu",
            )
        ),
        "vit": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**_SIZES, image_size=32, patch_size=8, num_labels=8)
        ),
    }
    return models[family]().train()


def make_batch(family: str, seed: int = 1) -> dict[str, Any]:
    """Return the global batch; rows ignore different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    if family == "mlp":
        labels = torch.randint(0, 16, (BATCH,), generator=generator)
        labels[:3] = -100
        return {"x": torch.randn(BATCH, 64, generator=generator), "labels": labels}
    if family == "vit":
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 8, (BATCH,), generator=generator)}
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    labels = ids.clone()
    for row in range(BATCH):
        labels[row, : 2 * row] = -100
    batch = {"input_ids": ids, "labels": labels}
    if family == "t5":
        batch["decoder_input_ids"] = ids.flip(1)
    return batch if family == "bert" else {**batch, "use_cache": False}


def tensor_names(batch: dict[str, Any]) -> list[str]:
    return [name for name, value in batch.items() if isinstance(value, torch.Tensor)]


MESH = PlanMesh(axes=(("dp", 2), ("tp", 2)), device="cpu")
FP32 = Job(dtype="fp32", master_dtype=None, optimizer="sgd")


@dataclass(frozen=True)
class Case:
    family: str
    plan: ShardingPlan


def _plan(**fields: Any) -> ShardingPlan:
    return ShardingPlan(**{"mesh": MESH, "job": FP32} | fields)


def data_parallel(family: str, **fields: Any) -> Case:
    model, batch = make_model(family), make_batch(family)
    return Case(
        family,
        _plan(
            plan={name: (R, R) for name, _ in model.named_parameters()},
            input_plan={"input": {name: Port(layout=(S0, S0)) for name in tensor_names(batch)}},
            **fields,
        ),
    )


def fully_sharded(family: str, **fields: Any) -> Case:
    """Return a case with parameters stored sharded on both axes, and computed replicated."""
    model, batch = make_model(family), make_batch(family)
    stored = {name: (S0, S0) if divides(p.shape, (S0, S0), (2, 2)) else (R, R) for name, p in model.named_parameters()}
    computed = {name: (R, R) for name, layout in stored.items() if layout != (R, R)}
    ports = {name: Port(layout=(S0, S0)) for name in tensor_names(batch)}
    return Case(family, _plan(plan=stored, compute_plan=computed, input_plan={"input": ports}, **fields))


_COLUMN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_ROW = ("o_proj.weight", "down_proj.weight")


def megatron(*, vocabulary: bool = False, fsdp: bool = False, **fields: Any) -> Case:
    """Return Llama, data parallel on dp, tensor and sequence parallel on tp, perhaps the vocabulary too; FSDP on dp."""
    model = make_model("llama")
    stored: dict[str, Any] = {}
    for name, _ in model.named_parameters():
        tp = S0 if name.endswith(_COLUMN) else S1 if name.endswith(_ROW) else R
        if vocabulary and ("embed_tokens" in name or "lm_head" in name):
            tp = S0
        stored[name] = (R, tp)
    computed = {}
    if fsdp:
        for name, layout in list(stored.items()):
            stored[name], computed[name] = (S0, layout[1]), layout
    whole, split = (S0, R), (S0, S1)
    entering = Port(layout=whole, grad=(S0, P), source=split, source_grad=split)
    leaving = Port(layout=split, grad=split, source=(S0, P), source_grad=(S0, R))
    blocks = "model.layers.*"
    inputs: dict[str, Any] = {
        "input": {"input_ids": Port(layout=whole), "labels": Port(layout=whole)},
        f"{blocks}.self_attn.input": {"hidden_states": entering},
        f"{blocks}.mlp.input": (entering,),
        "lm_head.input": (entering if vocabulary else Port(layout=whole, source=split, source_grad=split),),
    }
    outputs: dict[str, Any] = {
        "model.embed_tokens": leaving if vocabulary else Port(layout=split, source=whole, source_grad=whole),
        f"{blocks}.self_attn": {"0": leaving},
        f"{blocks}.mlp": leaving,
    }
    return Case("llama", _plan(plan=stored, compute_plan=computed, input_plan=inputs, output_plan=outputs, **fields))


LLAMA_BLOCKS = {
    "model.layers.*": (
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    )
}
"""An FSDP group of all large parameters of each block of Llama."""


def with_fsdp_groups(case: Case, groups: Mapping[str, tuple[str, ...]], *axes: int) -> Case:
    """Return ``case`` with FSDP groups, whose parameters are stored sharded on ``axes`` instead of replicated."""
    axes = axes or (0,)
    model = make_model(case.family)
    plan = case.plan
    names = resolve_keys(groups, [fqn for fqn, _ in model.named_modules()], field="fully_shard", what="module")
    stored, computed, gradients = dict(plan.plan), dict(plan.compute_plan), dict(plan.gradient_plan)
    for module, members in names.items():
        for member in members:
            fqn = f"{module}.{member}" if module else member
            layout = list(stored[fqn])
            shape = model.get_parameter(fqn).shape
            taken = {sharded_dim(place) for place in layout}
            ranks = math.prod(plan.mesh.shape[axis] for axis in axes)
            dim = next(d for d, n in enumerate(shape) if d not in taken and n % ranks == 0)
            computed[fqn] = tuple(layout)
            for axis in axes:
                layout[axis] = Shard(dim)
            stored[fqn] = gradients[fqn] = tuple(layout)
    changed = dataclasses.replace(
        plan, plan=stored, compute_plan=computed, gradient_plan=gradients, fully_shard=dict(groups)
    )
    return Case(case.family, changed)


def reshard_after_backward(case: Case) -> Case:
    """Return ``case`` with every FSDP group resharded after the backward."""
    return Case(case.family, dataclasses.replace(case.plan, keep_gathered=tuple(case.plan.fully_shard)))


def reshard_after_step(case: Case) -> Case:
    """Return ``case`` with every FSDP group resharded after the last backward of a step."""
    return Case(case.family, dataclasses.replace(case.plan, keep_gathered_for_step=tuple(case.plan.fully_shard)))


def replicated_on_tp(family: str, **fields: Any) -> Case:
    """Return a case that is data parallel on dp and replicated on tp."""
    case = data_parallel(family, **fields)
    ports = {name: Port(layout=(S0, R)) for name in tensor_names(make_batch(family))}
    return Case(family, dataclasses.replace(case.plan, input_plan={"input": ports}))


def reference(family: str, seed: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the unsharded model."""
    model = make_model(family)
    loss = loss_of(model(**make_batch(family, seed)))
    loss.backward()
    return loss.detach(), {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss
