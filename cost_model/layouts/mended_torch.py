"""What torch 2.13 gets wrong of DTensors and of tensors without values, mended in this process.

**Clones.** It has two rules for ``aten.clone``: the one written for it, which keeps the placements, and a later one
that every op with the tag ``pointwise`` gets, which reduces partial tensors first. The later one wins. Autograd copies
a gradient that is not contiguous before it views it, so each weight that is viewed and then transposed would have its
gradient reduced in every backward. No rule for the op, nor any trace of the forward, shows that copy.

**Grouped GEMMs.** ``aten._grouped_mm`` has kernels for fp32 and fp16 too, and refuses them on the meta device, where
DTensor looks up the shapes of each result.

**Batch norms.** On the meta device a batch norm divides by n - 1, where n is the number of values per channel, which
may be 1 in the smallest micro-batch that a search looks at.

**Autocast.** ``torch.autocast(x.device.type, enabled=False)`` is an error where ``x`` is on the meta device.

**Shifts.** DTensor takes ``x >> 4`` and ``x << 4`` for ops in place, as the names of ``aten.__rshift__`` and
``aten.__lshift__`` end in "_", and returns ``x`` as it is.

**Ops in place.** Where an op in place redistributes the tensor that it writes, as ``index_copy_`` and ``index_add_``
may, DTensor changes the tensor's placements and leaves its values as they were. Of a view, this is an error here.

**On the meta device**, where the planner measures ops, some do not run: backwards of margin losses and of one pooling,
Dirichlet and binomial numbers, and ``masked_fill`` with a number that is a tensor on the CPU, as GPUs take it.

**Backwards of activations.** DTensor has no rules for those of hard-swish, leaky ReLU and others, which are pointwise.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._meta_registrations
from torch._decomp import decompositions
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

_VERSION = "2.13."
"""What is mended are private functions of this release. `planner.strategies.dtensor_rules` refuses any other."""
_GROUPED_MM = "_meta_grouped_mm_common"
_BATCH_NORM = "native_batch_norm_helper"
_END_OF_DISPATCH = "_dispatch_fast_path_python_tail"


_SHIFTS = {
    torch.ops.aten.__rshift__.Scalar: torch.ops.aten.bitwise_right_shift.Tensor_Scalar,
    torch.ops.aten.__rshift__.Tensor: torch.ops.aten.bitwise_right_shift.Tensor,
    torch.ops.aten.__lshift__.Scalar: torch.ops.aten.bitwise_left_shift.Tensor_Scalar,
    torch.ops.aten.__lshift__.Tensor: torch.ops.aten.bitwise_left_shift.Tensor,
}
"""Ops that DTensor runs wrongly -> ops of the same results."""
_POINTWISE = (
    *(torch.ops.aten.hardswish_backward.default, torch.ops.aten.hardsigmoid_backward.default),
    *(torch.ops.aten.hardtanh_backward.default, torch.ops.aten.hardshrink_backward.default),
    *(torch.ops.aten.softshrink_backward.default, torch.ops.aten.softplus_backward.default),
    *(torch.ops.aten.elu_backward.default, torch.ops.aten.leaky_relu_backward.default),
    torch.ops.aten.mish_backward.default,
)
"""Pointwise ops, of tensors of one shape, that DTensor has no rules for."""


_LIKE_ARGUMENT = {
    **dict.fromkeys(("_sample_dirichlet", "binomial", "_dirichlet_grad", "_standard_gamma_grad"), 0),
    **dict.fromkeys(("multi_margin_loss_backward", "multilabel_margin_loss_backward"), 1),
    "fractional_max_pool3d_backward": 1,
}
"""Ops without a kernel on the meta device -> position of the argument that their result is like."""
_META: list[torch.library.Library] = []
"""Keeps what is registered."""
_MASKED: list[torch.library.Library] = []
"""Keeps the kernels of `masked_fill`."""


def mend_torch() -> None:
    """Mend torch 2.13; a second call changes nothing, nor does one with another torch."""
    if not torch.__version__.startswith(_VERSION):
        return
    rules = DTensor._op_dispatcher.sharding_propagator
    if torch.ops.aten.clone.default in rules.op_strategy_funcs:
        rules.op_single_dim_strategy_funcs.pop(torch.ops.aten.clone.default, None)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for shift in _SHIFTS:
        handlers.setdefault(shift, _shifted)
    unruled = [op for op in _POINTWISE if op not in rules.op_strategy_funcs | rules.op_single_dim_strategy_funcs]
    register_sharding(unruled)(_pointwise)
    for name, position in _LIKE_ARGUMENT.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _META.append(torch.library.Library("aten", "IMPL", "Meta"))
            _META[-1].impl(name, functools.partial(_like_argument, position))
    if not _MASKED:
        _MASKED.append(torch.library.Library("aten", "IMPL", "Meta"))
        _MASKED[-1].impl("masked_fill.Tensor", _masked_fill)
        _MASKED[-1].impl("masked_fill_.Tensor", _masked_fill_in_place)
    mended = (
        (torch._meta_registrations, _GROUPED_MM, _in_any_dtype),
        (decompositions, _BATCH_NORM, _of_one_value),
        (type(DTensor._op_dispatcher), _END_OF_DISPATCH, _with_what_was_written),
        (torch.autocast, "__init__", _off_on_meta),
    )
    for module, name, mend in mended:
        function = getattr(module, name)
        if not hasattr(function, "__wrapped__"):
            setattr(module, name, mend(function))


def _like_argument(position: int, *arguments: Any, **options: Any) -> torch.Tensor:
    return torch.empty_like(arguments[position])


def _masked_fill(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(f"masked_fill takes a value of 0 dims, not of {value.dim()}.")
    return torch.where(mask, value.to("meta", tensor.dtype), tensor).contiguous()


def _masked_fill_in_place(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tensor.copy_(_masked_fill(tensor, mask, value))


def _shifted(op_call: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return _SHIFTS[op_call](*args, **kwargs)


def _with_what_was_written(end_of_dispatch: Any) -> Any:
    @functools.wraps(end_of_dispatch)
    def end(
        self: Any, op_call: Any, args: Any, kwargs: Any, mesh: Any, sharding: Any, local_results: Any, *rest: Any
    ) -> Any:
        written: Any = args[0] if args else None
        before = written._spec.placements if isinstance(written, DTensor) else None
        result: Any = end_of_dispatch(self, op_call, args, kwargs, mesh, sharding, local_results, *rest)
        if before is None or result is not written or result._spec.placements == before:
            return result
        if isinstance(local_results, torch.Tensor) and local_results is not result._local_tensor:
            if result._is_view():
                raise RuntimeError(
                    f"{op_call} writes to a view of a DTensor in another layout ({before} became "
                    f"{result._spec.placements}), which would not reach the tensor itself. Write it out of place."
                )
            result._local_tensor = local_results
        return result

    return end


def _off_on_meta(init: Any) -> Any:
    @functools.wraps(init)
    def on_or_off(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *rest: Any, **names: Any
    ) -> None:
        device_type = "cpu" if device_type == "meta" and not enabled else device_type
        init(self, device_type, dtype, enabled, *rest, **names)

    return on_or_off


def _pointwise(*arguments: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Return (placements of the result, placements of the arguments) of a pointwise op: whole, or split on one dim."""
    is_tensor = [hasattr(argument, "placements") for argument in arguments]
    places: list[Placement] = [Replicate(), *map(Shard, range(len(arguments[0].shape)))]
    return [([place], [place if tensor else None for tensor in is_tensor]) for place in places]


def _in_any_dtype(of_bf16: Any) -> Any:
    @functools.wraps(of_bf16)
    def grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mat_a.dtype != mat_b.dtype or mat_a.dtype not in (torch.float32, torch.float16):
            return of_bf16(mat_a, mat_b, *args, **kwargs)
        result = of_bf16(mat_a.bfloat16(), mat_b.bfloat16(), *args, **(kwargs | {"out_dtype": None}))
        return result.to(mat_a.dtype)

    return grouped_mm


def _of_one_value(of_many: Any) -> Any:
    @functools.wraps(of_many)
    def batch_norm(
        input: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *args: Any
    ) -> Any:
        if not training or input.numel() > input.shape[1]:
            return of_many(input, weight, bias, mean, variance, training, *args)
        results = of_many(input, weight, bias, None, None, training, *args)
        return (*results[:3], mean, variance)

    return batch_norm
