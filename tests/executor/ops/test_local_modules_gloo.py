"""Modules on local tensors compute what the unsharded module does; what depends on the batch is left to DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support import families
from support.gloo import run_on_gloo
from support.side_by_side import train_all
from support.trained_steps import errors_in_steps
from torch import nn
from torch.distributed.tensor import DTensor

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.whole_batches import whole_batches
from executor.shard import shard_module
from planner import ShardingPlan, build_plan
from planner.model_rewrites.local_module import LocalModule

WIDTH, BATCH, SEQ = 16, 8, 6
TOLERANCE = 1e-5


class Block(nn.Module):
    """Attention and a feed-forward, as most models write them; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, 4, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, -1))
        hidden = F.gelu(self.up(x)) if scale is None else F.gelu(self.up(x)) * scale
        return x + self.down(hidden), hidden.mean(-1)


class DividesByBatch(Block):
    def forward(self, x: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, other = super().forward(x)
        return result / x.shape[0], other


class CountsSamples(Block):
    def forward(self, x: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, other = super().forward(x)
        return result + torch.arange(x.shape[0], device=x.device).view(-1, 1, 1), other


class Remembers(Block):
    """Its other result reaches the model by an attribute."""

    def forward(self, x: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        result, self.seen = super().forward(x)
        return result, None


class BranchesOnBatch(Block):
    def forward(self, x: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, other = super().forward(x)
        return (result.tanh() if x.shape[0] == BATCH else result), other


class Normalizes(Block):
    """Its statistics are those of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.over_batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result, other = super().forward(x)
        return self.over_batch(result.flatten(0, 1)).view_as(x), other


class Model(nn.Module):
    def __init__(self, block: type[Block], *, scaled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.tensor(0.5)) if scaled else None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for block in self.blocks:
            x, other = block(x) if self.scale is None else block(x, scale=self.scale.tanh())
            kept.append(block.seen if isinstance(block, Remembers) else other)
        return F.cross_entropy(self.head(x.mean(1)), labels) + torch.stack(kept).square().mean()


def make(block: type[Block], scaled: bool = False, samples: int = BATCH) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Model(block, scaled=scaled), (torch.randn(samples, SEQ, WIDTH), torch.randint(0, 5, (samples,)))


def plan_of(block: type[Block], scaled: bool = False, **options: Any) -> ShardingPlan:
    module, inputs = make(block, scaled)
    given = {"cluster": "1x4xtoy", "planner": "fsdp", "ac": "none", "micro_batches": 1} | options
    return build_plan(module, example_inputs=inputs, dtype="fp32", headroom=0.0, **given)


def errors(rank: int, plan: dict[str, Any], block: type[Block], scaled: bool) -> Any:
    torch.use_deterministic_algorithms(True)
    return errors_in_steps(ShardingPlan.from_dict(plan), lambda: make(block, scaled))


CASES: dict[str, tuple[type[Block], dict[str, Any], str | None]] = {
    "FSDP": (Block, {}, "blocks.*"),
    "DDP": (Block, {"planner": "ddp"}, "blocks.*"),
    "FSDP, checkpointed": (Block, {"ac": "full"}, "blocks.*"),
    "FSDP, selective": (Block, {"ac": "selective"}, "blocks.*"),
    "HSDP": (Block, {"planner": "hsdp", "cluster": "2x2xtoy"}, "blocks.*"),
    "a parameter of the model is an argument": (Block, {"scaled": True}, "blocks.*"),
    "divides by the batch": (DividesByBatch, {}, None),
    "counts samples": (CountsSamples, {}, None),
    "keeps a tensor in an attribute": (Remembers, {}, None),
    "branches on the batch": (BranchesOnBatch, {}, None),
    "statistics of the batch": (Normalizes, {}, None),
}
"""Name -> block, options of the job, and the pattern of local modules; None: the block is not among them."""


@pytest.mark.parametrize("name", CASES)
def test_losses_parameters_and_buffers_equal_the_unsharded_modules(name: str) -> None:
    block, options, pattern = CASES[name]
    plan = plan_of(block, **options)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert (pattern in plan.local_modules) if pattern is not None else "blocks.*" not in plan.local_modules
    for error in run_on_gloo(errors, 4, plan.to_dict(), block, bool(options.get("scaled"))):
        assert max(error) <= TOLERANCE, error


FAMILY_BLOCKS = {
    "t5": ("ddp", "encoder.block.1"),  # blocks hand on their position bias, which all ranks have whole
    "mixtral": ("fsdp", "model.layers.*"),
    "gpt2": ("fsdp", "transformer.h.*"),
    "vit": ("fsdp", "vit.layers.*"),
}
"""Family -> planner, and a pattern among its local modules."""


@pytest.mark.parametrize(
    "family", [family if family == "t5" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILY_BLOCKS]
)
def test_losses_and_gradients_of_families_equal_the_unsharded_models(family: str) -> None:
    (module, inputs), (planner, pattern) = families.make(family, BATCH), FAMILY_BLOCKS[family]
    options = {"planner": planner, "dtype": "fp32", "optimizer": "sgd", "micro_batches": 1, "ac": "none"}
    plan = build_plan(module, cluster="1x4xtoy", example_inputs=inputs, headroom=0.0, **options)
    assert pattern in plan.local_modules
    for by_plan in run_on_gloo(train_all, 4, family, {planner: plan.to_dict()}, "sgd"):
        assert by_plan[planner].loss <= TOLERANCE
        assert by_plan[planner].gradient <= TOLERANCE
        assert by_plan[planner].tied


def test_router_logits_that_hooks_collect_stay_with_dtensor() -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_local_experts=4, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    with torch.device("meta"):
        module, ids = transformers.MixtralForCausalLM(config), torch.zeros(BATCH, 16, dtype=torch.long)
    options = {"planner": "fsdp", "dtype": "fp32", "micro_batches": 1, "ac": "none", "headroom": 0.0}
    plan = build_plan(module, cluster="1x4xtoy", example_inputs={"input_ids": ids, "labels": ids}, **options)
    assert not plan.local_modules
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"


def kinds_of_arguments(rank: int, plan: dict[str, Any], samples: int) -> set[bool]:
    """Return whether the first block's feed-forward got a DTensor, in a call with ``samples`` samples."""
    parsed = ShardingPlan.from_dict(plan)
    module, inputs = make(Block, samples=samples)
    mesh = device_mesh_for(parsed, device_type="cpu")
    shard_module(module, mesh, parsed)
    seen: set[bool] = set()
    module.blocks[0].up.register_forward_pre_hook(lambda part, args: seen.add(isinstance(args[0], DTensor)))
    with whole_batches(module):
        module(*inputs).backward()
    return seen


def test_blocks_see_plain_tensors_also_where_a_batch_does_not_divide() -> None:
    plan = plan_of(Block).to_dict()
    assert run_on_gloo(kinds_of_arguments, 4, plan, BATCH) == [{False}] * 4
    # Six samples are not split on four ranks: they stay whole, in plain tensors as well.
    assert run_on_gloo(kinds_of_arguments, 4, plan, 6) == [{False}] * 4


class Noisy(nn.Module):
    """A block whose result shows its dropout masks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh() * F.dropout(torch.ones_like(x), 0.5) + x


class NoisyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def masks(rank: int, plan: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of the block's dropout, in the forward and when the backward runs it again."""
    parsed = ShardingPlan.from_dict(plan)
    torch.manual_seed(0)
    module = NoisyModel()
    mesh = device_mesh_for(parsed, device_type="cpu")
    shard_module(module, mesh, parsed)
    seen: list[torch.Tensor] = []
    dropout = F.dropout

    def kept(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(dropout(*args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(F, "dropout", kept)
        result = module(local_batch((torch.ones(BATCH, WIDTH),), mesh, parsed)[0])
        forward = [each.detach().clone() for each in seen]
        seen.clear()
        result.sum().backward()
    return forward, [each.detach().clone() for each in seen]


def test_dropout_differs_between_ranks_and_is_repeated_by_a_recomputation() -> None:
    torch.manual_seed(0)
    plan = build_plan(
        NoisyModel(), cluster="1x4xtoy", example_inputs=(torch.ones(BATCH, WIDTH),), dtype="fp32", headroom=0.0,
        planner="fsdp", ac="full", micro_batches=1,
    )  # fmt: skip
    assert plan.local_modules["blocks.*"].endswith(";random")
    results = run_on_gloo(masks, 4, plan.to_dict())
    for forward, again in results:
        assert len(forward) == 5
        assert all(not isinstance(each, DTensor) for each in forward)
        # The backward runs the blocks again from the last to the first.
        assert all(torch.equal(a, b) for a, b in zip(forward, reversed(again), strict=True))
    first = [forward[0] for forward, _ in results]
    assert not any(torch.equal(first[0], other) for other in first[1:])


def test_text() -> None:
    text = "0=S(0),R states.0=R,R;S(0),R -;random"
    local = LocalModule.parse(text)
    assert local.text == text
    assert local.is_random
    assert local.outputs[1] is None
