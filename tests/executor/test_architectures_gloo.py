"""Real architectures, small, with what is particular to them, and modules of many kinds: each trains as unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from covered.coverage import BATCH, CLUSTER, MESH, cases
from covered.plain_modules import PLAIN
from support.gloo import GlooRanks
from support.small_models import EIGHT_HEADS
from support.trained_steps import Errors, errors_in_steps
from torch import nn

from planner import build_plan
from planner.plan.sharding_plan import ShardingPlan

pytestmark = pytest.mark.slow

COVERED = (
    *("gemma3_text", "qwen3_next", "mamba2", "jamba", "gpt_oss", "nemotron_h", "deepseek_v2", "whisper", "llava"),
    *("convnext", "swin", "bart", "albert"),
)
"""Of `covered.coverage`."""

NOT_COMPARED = {
    *("embedding with max_norm", "embedding with sparse gradient", "autocast inside forward", "torch.jit.script"),
    "lazy layers, not initialised",  # they get their parameters in the first call
    "variational autoencoder",  # samples
    "bfloat16 module",  # of which one step rounds to 1/256
}
"""Plain modules that are refused, or have no unsharded run to compare with."""

SIX_HEADS = EIGHT_HEADS | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}
UNEVEN: Mapping[str, tuple[int, Callable[[], Any]]] = {
    "vocabulary of 257": (BATCH, lambda: transformers.LlamaConfig(**EIGHT_HEADS | {"vocab_size": 257})),
    "6 heads": (
        BATCH,
        lambda: transformers.LlamaConfig(**SIX_HEADS),
    ),
    "2 key-value heads": (BATCH, lambda: transformers.LlamaConfig(**EIGHT_HEADS | {"num_key_value_heads": 2})),
    "3 rows": (3, lambda: transformers.LlamaConfig(**EIGHT_HEADS)),
    "6 experts": (BATCH, lambda: transformers.MixtralConfig(**EIGHT_HEADS, num_local_experts=6)),
}
"""Name -> samples, and a config with a dim that four ranks do not divide."""

LR = 1e-3
"""At 1e-2 the unsharded U-Net, trained in fp32 and in fp64, differs by 1.3e-3 after three steps; at 1e-3 by 1.5e-7."""


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model in which nothing is left to chance, and its arguments."""
    torch.manual_seed(0)
    if name in UNEVEN:
        samples, config = UNEVEN[name]
        ids = torch.randint(0, 256, (samples, 32))
        model, inputs = transformers.AutoModelForCausalLM.from_config(config()), {"input_ids": ids, "labels": ids}
    else:
        model, inputs = next(case for case in cases() if case.name == name).make()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for of in (part, getattr(part, "config", None)):
            for field, value in list(vars(of).items()) if of is not None else ():
                if "drop" in field and isinstance(value, float):
                    setattr(of, field, 0.0)
    return model.train(), inputs


def errors(rank: int, name: str, plan: dict[str, Any]) -> Errors:
    return errors_in_steps(ShardingPlan.from_dict(plan), lambda: made(name), LR)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as started:
        yield started


def check(ranks: GlooRanks, name: str, mesh: str) -> None:
    model, inputs = made(name)
    options: dict[str, Any] = {"cluster": CLUSTER, "mesh": mesh, "dtype": "fp32", "micro_batches": 1, "tolerance": 0.0}
    plan = build_plan(model, example_inputs=inputs, **options)
    (found, *_) = ranks.call(errors, name, plan.to_dict())
    assert found.loss < 1e-5
    assert found.parameter < 1e-5
    assert found.buffer < 1e-5


@pytest.mark.parametrize("name", [*COVERED, *(case.name for case in PLAIN if case.name not in NOT_COMPARED)])
def test_an_architecture_trains_as_unsharded(ranks: GlooRanks, name: str) -> None:
    check(ranks, name, MESH)


@pytest.mark.parametrize("mesh", ["tp=4", MESH])
@pytest.mark.parametrize("name", UNEVEN)
def test_dims_that_the_ranks_do_not_divide_train_as_unsharded(ranks: GlooRanks, name: str, mesh: str) -> None:
    check(ranks, name, mesh)
