"""Separate forward and backward of attention equal torch's; GPU kernels are called on meta, for shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from executor.ops import attention_kernels
from executor.ops.attention_kernels import attend, attend_backward, use_kernel
from executor.redistribute import stride_as
from executor.torch_internals import dtensor as torch_internals
from planner.errors import PlanError

_ATEN = torch.ops.aten


def test_a_result_has_the_order_of_dims_of_its_local_tensor() -> None:
    """The module then puts heads after the sequence by a view instead of a copy."""
    query = torch.empty(2, 6, 8, 4, device="meta").transpose(1, 2)  # [batch, heads, sequence, width]
    for heads in (8, 4, 1):
        local = torch.empty(2, 6, heads, 4, device="meta").transpose(1, 2)
        assert stride_as(local, (2, 8, 6, 4), query) == query.stride()
    plain = torch.empty(2, 4, 6, 4, device="meta")
    assert stride_as(plain, (2, 8, 6, 4), query) == (192, 24, 4, 1)


MASKS = {
    "none": None,
    "boolean": torch.arange(10) > torch.arange(6).unsqueeze(1) - 1,
    "added": torch.linspace(-2, 2, 60).view(6, 10),
}


@pytest.fixture(params=["kernel", "plain"])
def each_implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU's kernel, and with all scores in memory."""
    if request.param == "plain":
        monkeypatch.setattr(attention_kernels, "_runs_on_cpu", lambda q, v: False)


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
def test_result_and_actualequal_torchs(mask: str) -> None:
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
    result, lse = attend(q, k, v, added, causal, 0.4)
    actual = attend_backward(gradient, q, k, v, added, result, lse, causal, 0.4)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(list(actual), [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("chosen", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_gpu_kernels_get_valid_arguments(monkeypatch: pytest.MonkeyPatch, chosen: SDPBackend) -> None:
    monkeypatch.setattr(attention_kernels, "_runs_fused", lambda q, v, mask: True)
    monkeypatch.setattr(torch_internals, "chosen_attention", lambda q, k, v, causal, scale: chosen)
    q, k = (torch.empty(2, heads, 6, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    with _OpRecorder() as recorder:
        result, lse = attend(q, k, k, None, True, 0.4)
        assert (result.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 6), torch.float32)
        actual = attend_backward(result, q, k, k, None, result, lse, True, 0.4)
    assert [gradient.shape for gradient in actual] == [q.shape, k.shape, k.shape]
    kernel = "cudnn" if chosen == SDPBackend.CUDNN_ATTENTION else "flash"
    names = [name for name in recorder.names if "attention" in name]
    assert names == [f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"]


@pytest.mark.parametrize("causal", [True, False])
def test_cudnns_lse_equals_that_of_the_other_kernels(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """cuDNN's has an additional dim of size one, in and out."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    expected, expected_lse = attend(q, k, v, None, causal, 0.4)
    gradient = torch.randn_like(expected)
    gradients = attend_backward(gradient, q, k, v, None, expected, expected_lse, causal, 0.4)
    monkeypatch.setattr(attention_kernels, "_runs_fused", lambda q, v, mask: True)
    monkeypatch.setattr(attention_kernels, "_aten", _CudnnOnCpu)
    monkeypatch.setattr(torch_internals, "chosen_attention", lambda *_: SDPBackend.CUDNN_ATTENTION)
    result, lse = attend(q, k, v, None, causal, 0.4)
    actual = attend_backward(gradient, q, k, v, None, result, lse, causal, 0.4)
    torch.testing.assert_close((result, lse), (expected, expected_lse))
    torch.testing.assert_close(actual, gradients)


class _CudnnOnCpu:
    """Operators with the schemas of cuDNN's, computed by the CPU's kernel."""

    @staticmethod
    def _scaled_dot_product_cudnn_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        bound = _bound(_ATEN._scaled_dot_product_cudnn_attention.default, args, kwargs)
        assert bound["attn_bias"] is None
        assert bound["compute_log_sumexp"]
        inputs = (bound["query"], bound["key"], bound["value"], bound["dropout_p"], bound["is_causal"])
        result, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(*inputs, scale=bound["scale"])
        return result, lse.unsqueeze(-1)

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        bound = _bound(_ATEN._scaled_dot_product_cudnn_attention_backward.default, args, kwargs)
        lse = bound["logsumexp"]
        assert lse.shape == (*bound["query"].shape[:3], 1)
        assert lse.is_contiguous()
        assert [bound[name] for name in ("attn_bias", "cum_seq_q", "cum_seq_k")] == [None, None, None]
        assert (bound["max_q"], bound["max_k"]) == (bound["query"].shape[2], bound["key"].shape[2])
        inputs = [bound[name] for name in ("grad_out", "query", "key", "value", "out")]
        ends = (bound["dropout_p"], bound["is_causal"])
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            *inputs, lse.squeeze(-1), *ends, scale=bound["scale"]
        )


def _bound(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the schema of ``op``."""
    arguments = op._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **{argument.name: value for argument, value in zip(positional, args, strict=False)}, **kwargs}


class _OpRecorder(TorchDispatchMode):
    """Records the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_chosen_attention_is_the_kernel_that_torch_would_run() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch_internals.chosen_attention(q, k, k, True, 0.4) == SDPBackend.MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch_internals.chosen_attention(q, k, k, True, 0.4) == SDPBackend.FLASH_ATTENTION


def hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "the GPU")


def test_flash_attention_3_is_activated_where_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    activated: list[str] = []
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    hopper(monkeypatch)
    monkeypatch.setattr(torch_internals, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch_internals, "restore_flash_attention_impl", lambda: activated.append("own"))
    try:
        use_kernel(None, "cuda")
        use_kernel("flash3", "cpu")
        assert not activated
        assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
        for _ in range(2):
            use_kernel("flash3", "cuda")
            assert activated == ["FA3"]
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        for _ in range(2):
            use_kernel(None, "cuda")
            assert activated == ["FA3", "own"]
            assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


@pytest.mark.parametrize(
    ("capability", "why"), [((9, 0), "flash_attn_interface"), ((10, 0), "the GPU does not run"), ((8, 0), "does not")]
)
def test_flash_attention_3_that_is_not_available_is_an_error(
    capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(monkeypatch, capability)
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(PlanError, match=why) as raised:
        use_kernel("flash3", "cuda")
    assert "without attention_kernel" in raised.value.what_to_do
    assert torch.backends.cuda.cudnn_sdp_enabled() == was_on
