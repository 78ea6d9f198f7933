"""Attention forward and backward apart equals torch's; what needs a GPU is called on meta, which shows shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from executor import torch_internals
from executor.ops import attention_kernels
from executor.ops.attention_kernels import attend, attend_backward, use_kernel
from executor.redistribute import stride_as
from planner.errors import PlanError

_ATEN = torch.ops.aten


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


@pytest.mark.parametrize("chosen", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_kernels_for_gpus_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch, chosen: SDPBackend) -> None:
    monkeypatch.setattr(attention_kernels, "_runs_fused", lambda q, v, mask: True)
    monkeypatch.setattr(torch_internals, "chosen_attention", lambda q, k, v, causal, scale: chosen)
    q, k = (torch.empty(2, heads, 6, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    with _Called() as called:
        result, sums = attend(q, k, k, None, True, 0.4)
        assert (result.shape, sums.shape, sums.dtype) == (q.shape, (2, 4, 6), torch.float32)
        found = attend_backward(result, q, k, k, None, result, sums, True, 0.4)
    assert [gradient.shape for gradient in found] == [q.shape, k.shape, k.shape]
    kernel = "cudnn" if chosen == SDPBackend.CUDNN_ATTENTION else "flash"
    names = [name for name in called.names if "attention" in name]
    assert names == [f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"]


@pytest.mark.parametrize("causal", [True, False])
def test_cudnns_sums_are_as_the_others(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """cuDNN's have a dim of one more, in and out: the same numbers come back through it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    expected, expected_sums = attend(q, k, v, None, causal, 0.4)
    gradient = torch.randn_like(expected)
    gradients = attend_backward(gradient, q, k, v, None, expected, expected_sums, causal, 0.4)
    monkeypatch.setattr(attention_kernels, "_runs_fused", lambda q, v, mask: True)
    monkeypatch.setattr(attention_kernels, "_aten", _CudnnOnCpu)
    monkeypatch.setattr(torch_internals, "chosen_attention", lambda *_: SDPBackend.CUDNN_ATTENTION)
    result, sums = attend(q, k, v, None, causal, 0.4)
    found = attend_backward(gradient, q, k, v, None, result, sums, causal, 0.4)
    torch.testing.assert_close((result, sums), (expected, expected_sums))
    torch.testing.assert_close(found, gradients)


class _CudnnOnCpu:
    """cuDNN's operators, by torch's schema of them, computed by the CPU's."""

    @staticmethod
    def _scaled_dot_product_cudnn_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        bound = _bound(_ATEN._scaled_dot_product_cudnn_attention.default, args, kwargs)
        assert bound["attn_bias"] is None
        assert bound["compute_log_sumexp"]
        given = (bound["query"], bound["key"], bound["value"], bound["dropout_p"], bound["is_causal"])
        result, sums = _ATEN._scaled_dot_product_flash_attention_for_cpu(*given, scale=bound["scale"])
        return result, sums.unsqueeze(-1)

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        bound = _bound(_ATEN._scaled_dot_product_cudnn_attention_backward.default, args, kwargs)
        sums = bound["logsumexp"]
        assert sums.shape == (*bound["query"].shape[:3], 1)
        assert sums.is_contiguous()
        assert [bound[name] for name in ("attn_bias", "cum_seq_q", "cum_seq_k")] == [None, None, None]
        assert (bound["max_q"], bound["max_k"]) == (bound["query"].shape[2], bound["key"].shape[2])
        given = [bound[name] for name in ("grad_out", "query", "key", "value", "out")]
        ends = (bound["dropout_p"], bound["is_causal"])
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            *given, sums.squeeze(-1), *ends, scale=bound["scale"]
        )


def _bound(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that ``op`` has for them."""
    arguments = op._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**found, **{argument.name: value for argument, value in zip(positional, args, strict=False)}, **kwargs}


class _Called(TorchDispatchMode):
    """Notes the names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_torch_says_which_kernel_it_would_run() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch_internals.chosen_attention(q, k, k, True, 0.4) == SDPBackend.MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch_internals.chosen_attention(q, k, k, True, 0.4) == SDPBackend.FLASH_ATTENTION


def hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the GPU")


def test_flash_attention_3_is_asked_for_where_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    hopper(monkeypatch)
    monkeypatch.setattr(torch_internals, "activate_flash_attention_impl", asked.append)
    monkeypatch.setattr(torch_internals, "restore_flash_attention_impl", lambda: asked.append("own"))
    try:
        use_kernel(None, "cuda")
        use_kernel("flash3", "cpu")
        assert not asked
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
        for _ in range(2):
            use_kernel("flash3", "cuda")
            assert asked == ["FA3"]
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        for _ in range(2):
            use_kernel(None, "cuda")
            assert asked == ["FA3", "own"]
            assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


@pytest.mark.parametrize(
    ("capability", "why"), [((9, 0), "flash_attn_interface"), ((10, 0), "the GPU does not run"), ((8, 0), "does not")]
)
def test_flash_attention_3_that_cannot_be_had_is_an_error_that_says_so(
    capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch, capability)
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(PlanError, match=why) as raised:
        use_kernel("flash3", "cuda")
    assert "without attention_kernel" in raised.value.what_to_do
    assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
