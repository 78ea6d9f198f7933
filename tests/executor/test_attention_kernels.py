"""Attention forward and backward apart equals torch's; what needs a GPU is called on meta, which shows shapes alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from executor import attention_kernels
from executor.attention_kernels import attend, attend_backward
from executor.redistribute import stride_as


def test_a_result_lies_as_its_piece_does() -> None:
    """So that what the module does next, heads behind the sequence, is a view and no copy."""
    query = torch.empty(2, 6, 8, 4, device="meta").transpose(1, 2)  # [batch, heads, sequence, width]
    for heads in (8, 4, 1):
        piece = torch.empty(2, 6, heads, 4, device="meta").transpose(1, 2)
        assert stride_as(piece, (2, 8, 6, 4), query) == query.stride()
    plain = torch.empty(2, 4, 6, 4, device="meta")
    assert stride_as(plain, (2, 8, 6, 4), query) == (192, 24, 4, 1)


MASKS = {
    "none": None,
    "boolean": torch.arange(10) > torch.arange(6).unsqueeze(1) - 1,
    "added": torch.linspace(-2, 2, 60).view(6, 10),
}


@pytest.fixture(params=["kernel", "plain"])
def anyhow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's kernel, and without any."""
    if request.param == "plain":
        monkeypatch.setattr(attention_kernels, "_runs_on_cpu", lambda q, v: False)


@pytest.mark.usefixtures("anyhow")
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_result_and_gradients_are_torchs(mask: str) -> None:
    torch.manual_seed(0)
    causal = mask == "causal"
    keys = 6 if causal else 10
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    added = None if causal or MASKS[mask] is None else MASKS[mask].expand(2, 1, 6, 10)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    options = {"attn_mask": added, "is_causal": causal, "enable_gqa": True, "scale": 0.4}
    expected = F.scaled_dot_product_attention(*leaves, **options)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    result, sums = attend(q, k, v, added, causal, 0.4)
    found = attend_backward(gradient, q, k, v, added, result, sums, causal, 0.4)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(list(found), [leaf.grad for leaf in leaves])


def test_kernel_for_gpus_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_runs_flash", lambda q, v, mask: True)
    q, k = (torch.empty(2, heads, 6, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    result, sums = attend(q, k, k, None, True, 0.4)
    assert (result.shape, sums.shape, sums.dtype) == (q.shape, (2, 4, 6), torch.float32)
    found = attend_backward(result, q, k, k, None, result, sums, True, 0.4)
    assert [gradient.shape for gradient in found] == [q.shape, k.shape, k.shape]
