"""torch's attention modules give the same results as torch's own code, and can be split by samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.any_modules import SelfAttention
from torch import Tensor, nn

from planner import build_plan
from planner.model_rewrites.torch_attention import attention_as_planned

SAMPLES, LENGTH, KEYS, WIDTH, HEADS = 3, 4, 6, 16, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
PADDING = torch.arange(KEYS).expand(SAMPLES, KEYS) >= torch.tensor([[6], [4], [5]])


def results(module: nn.MultiheadAttention, *inputs: Tensor, **options: Any) -> list[Tensor | None]:
    """Return result, weights, and the gradients of inputs and parameters."""
    leaves = [each.clone().requires_grad_() for each in dict.fromkeys(inputs)]
    replaced = dict(zip(dict.fromkeys(inputs), leaves, strict=True))
    result, weights = module(*(replaced[each] for each in inputs), **options)
    wanted = [*leaves, *module.parameters()]
    return [result, weights, *torch.autograd.grad(result.square().sum(), wanted)]


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({}, {}),
        ({}, {"need_weights": False}),
        ({"batch_first": True}, {"average_attn_weights": False}),
        ({"bias": False}, {"attn_mask": torch.randn(LENGTH, KEYS)}),
        ({}, {"attn_mask": torch.rand(SAMPLES * HEADS, LENGTH, KEYS) > 0.8, "need_weights": False}),
        ({}, {"key_padding_mask": PADDING}),
        ({}, {"key_padding_mask": PADDING, "attn_mask": torch.zeros(LENGTH, KEYS).bool(), "need_weights": False}),
        ({"kdim": 8, "vdim": 12}, {}),
        ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    ],
)
def test_results_weights_and_gradients_are_torchs(made: dict[str, Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, **made)
    query, key = torch.randn(LENGTH, SAMPLES, WIDTH), torch.randn(KEYS, SAMPLES, made.get("kdim", WIDTH))
    value = torch.randn(KEYS, SAMPLES, made["vdim"]) if "vdim" in made else key
    inputs = [each.transpose(0, 1) if made.get("batch_first") else each for each in (query, key)]
    inputs.append(inputs[1] if value is key else value)
    expected = results(module, *inputs, **options)
    with attention_as_planned():
        found = results(module, *inputs, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"need_weights": False, "attn_mask": CAUSAL, "is_causal": True}])
def test_attention_of_one_tensor_to_itself_is_torchs(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(LENGTH, SAMPLES, WIDTH)
    expected = results(module, x, x, x, **options)
    with attention_as_planned():
        found = results(module, x, x, x, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inputs_without_samples_run_torchs_code() -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(LENGTH, WIDTH)
    expected = module(x, x, x)
    with attention_as_planned():
        torch.testing.assert_close(module(x, x, x), expected)


@pytest.mark.parametrize("planner", ["data-parallel", "fully-sharded"])
def test_samples_can_be_split(planner: str) -> None:
    job: dict[str, Any] = {"cluster": "1x4xtoy", "planner": planner, "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(SelfAttention(), example_inputs=(torch.zeros(8, 6, 16),), **job)
    assert plan.verification is not None
    assert plan.verification.outcome == "as-planned"
    assert plan.local_ops == ()
