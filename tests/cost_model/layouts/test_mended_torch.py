"""What is mended of torch: each test fails with torch as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from planner.strategies.dtensor_rules import mesh_without_groups


def test_the_gradient_of_a_weight_that_is_viewed_and_transposed_stays_partial() -> None:
    gradient = DTensor.from_local(torch.zeros(8, 16, 4, device="meta"), mesh_without_groups([4]), [Partial()])
    copied = gradient.transpose(1, 2).reshape(32, 16)  # which copies: it is not contiguous
    assert copied.placements == (Partial(),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_gemms_have_the_same_results_on_meta_as_on_the_cpu(dtype: torch.dtype) -> None:
    ends = torch.tensor([3, 8], dtype=torch.int32)
    rows, weights = torch.ones(8, 16, dtype=dtype), torch.ones(2, 32, 16, dtype=dtype).transpose(1, 2)
    computed = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    on_meta = torch.nn.functional.grouped_mm(rows.to("meta"), weights.to("meta"), offs=ends.to("meta"))
    assert (on_meta.shape, on_meta.dtype, on_meta.stride()) == (computed.shape, computed.dtype, computed.stride())


def test_a_batch_norm_of_one_value_per_channel_has_a_shape_on_meta() -> None:
    norm = torch.nn.BatchNorm2d(4, device="meta")
    sample = torch.zeros(1, 4, 1, 1, device="meta")
    normalized = torch.batch_norm(
        sample, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False
    )
    assert normalized.shape == sample.shape


@pytest.mark.parametrize("by", [4, torch.tensor([4, 1], dtype=torch.uint8)])
def test_a_shifted_tensor_is_not_the_tensor_itself(by: int | torch.Tensor) -> None:
    plain = torch.tensor([0x58, 0x12], dtype=torch.uint8)
    mesh = mesh_without_groups([4])
    tensor, amount = (
        DTensor.from_local(each, mesh, [Replicate()]) if isinstance(each, torch.Tensor) else each
        for each in (plain, by)
    )
    assert torch.equal((tensor >> amount).to_local(), plain >> by)
    assert torch.equal((tensor << amount).to_local(), plain << by)
    assert torch.equal(tensor.to_local(), plain)


ACTIVATIONS = {
    **{kind.__name__: kind(inplace=True) for kind in (nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.CELU)},
    **{kind.__name__: kind() for kind in (nn.Hardshrink, nn.Softshrink, nn.Softplus, nn.ELU, nn.LeakyReLU, nn.Mish)},
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)])
def test_the_backward_of_an_activation_keeps_the_layout(name: str, placement: Placement) -> None:
    local = torch.zeros(4, 6, 8, device="meta")
    x = DTensor.from_local(local, mesh_without_groups([4]), [placement]).requires_grad_()
    result = ACTIVATIONS[name](x * 1)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    assert result.placements == gradient.placements == (placement,)


@pytest.mark.parametrize("name", ["index_copy_", "index_add_"])
def test_an_op_in_place_writes_what_it_redistributes(name: str) -> None:
    mesh = mesh_without_groups([2])
    source = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    places = DTensor.from_local(torch.tensor([0, 2]), mesh, [Replicate()])
    written = source.new_zeros(4, 3)
    assert getattr(written, name)(1, places, source) is written
    assert written.placements == (Shard(0),)
    assert written.to_local().tolist() == [[1, 0, 1], [1, 0, 1]]
    with pytest.raises(RuntimeError, match="writes to a view of a DTensor"):
        getattr(source.new_zeros(4, 6)[:, :3], name)(1, places, source)


def test_autocast_that_is_off_may_be_named_on_the_meta_device() -> None:
    with torch.autocast("meta", enabled=False):
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match="meta"):
        torch.autocast("meta", torch.bfloat16)


@pytest.mark.parametrize("in_place", [False, True])
def test_elements_are_filled_with_a_number_on_the_cpu(in_place: bool) -> None:
    tensor, mask = torch.empty(2, 3, device="meta"), torch.ones(3, dtype=torch.bool, device="meta")
    filled = (tensor.masked_fill_ if in_place else tensor.masked_fill)(mask, torch.tensor(1, dtype=torch.int64))
    assert (filled.shape, filled.dtype, filled.is_meta) == (tensor.shape, tensor.dtype, True)
    assert (filled is tensor) == in_place
    with pytest.raises(RuntimeError, match="0 dims"):
        tensor.masked_fill(mask, torch.ones(3))
