"""The ops that a graph from outside may contain: a list of names, with a check of each op's schema.

A name on the list is looked up in torch's own registry of ops and nowhere else. Every op on the list computes tensors
from tensors. On meta tensors it takes no memory, and its time does not depend on their sizes.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from planner.graph.layer_caches import decoding_step
from planner.model_rewrites import fused_kernels, opaque_op
from planner.model_rewrites.experts import experts_op
from planner.wire.schemas import computes_tensors

_POINTWISE: Final = """
abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor bucketize ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad
digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod frac gelu glu ge greater
greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite isinf isnan isneginf
isposinf le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative
nextafter not_equal positive pow prelu rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid
sign signbit silu sin sinc sinh softplus softshrink special_erf special_erfc special_expit special_expm1
special_logit special_xlogy sqrt square sub subtract tan tanh threshold true_divide trunc where xlogy zero
__and__ __lshift__ __or__ __rshift__ __xor__ complex isin polar searchsorted
"""
_REDUCTIONS: Final = """
all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum linalg_norm
linalg_vector_norm log_softmax logcumsumexp logsumexp max mean median min nanmean nansum norm prod softmax _softmax
_log_softmax sort std std_mean sum topk kthvalue var var_mean bincount histc
"""
_SHAPES: Final = """
_reshape_alias _unsafe_view adjoint alias alias_copy as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors
broadcast_to cat chunk clone column_stack concat concatenate constant_pad_nd contiguous copy detach diag
diag_embed diagonal diagonal_scatter dstack expand expand_as flatten flip fliplr flipud gather hsplit hstack index
index_add index_copy index_fill index_put index_reduce index_select lift_fresh_copy lift_fresh masked_scatter meshgrid
movedim moveaxis mT mH narrow narrow_copy numpy_T one_hot pad permute pixel_shuffle pixel_unshuffle ravel
reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
replication_pad3d reshape reshape_as roll rot90 scatter scatter_add scatter_reduce select select_scatter slice
slice_scatter split split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t
take take_along_dim tensor_split tile transpose tril triu unbind unbind_copy unflatten unfold unsafe_chunk unsafe_split
unsafe_split_with_sizes unsqueeze unsqueeze_copy view view_as view_as_complex view_as_real view_copy vsplit vstack
real imag conj _conj resolve_conj resolve_neg type_as to _to_copy
"""
_PRODUCTS: Final = """
addbmm addmm addmv addr baddbmm bilinear bmm cdist cosine_similarity cross dot einsum inner kron linalg_cross
linalg_matmul linalg_vecdot linear matmul mm mv outer tensordot vdot _scaled_mm _grouped_mm pairwise_distance
"""
_LAYERS: Final = """
_embedding_bag _safe_softmax _weight_norm _weight_norm_interface embedding_bag renorm
_convolution _native_batch_norm_legit _native_batch_norm_legit_no_training _prelu_kernel adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d
adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm
channel_shuffle col2im conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution dropout
embedding feature_alpha_dropout feature_dropout _fused_rms_norm grid_sampler grid_sampler_2d
grid_sampler_3d group_norm im2col instance_norm layer_norm max_pool1d max_pool2d max_pool3d max_pool2d_with_indices
max_pool3d_with_indices native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm
rms_norm scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
_scaled_dot_product_flash_attention_for_cpu upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
_upsample_nearest_exact2d
"""
_LOSSES: Final = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
nll_loss nll_loss2d nll_loss_nd nll_loss_forward poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_FACTORIES: Final = """
arange bernoulli empty empty_like empty_strided exponential eye full full_like linspace logspace new_empty new_full
new_ones new_zeros normal ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor
tril_indices triu_indices uniform zeros zeros_like
"""
_FOURIER: Final = """
fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
"""
_PRIMS: Final = "convert_element_type broadcast_in_dim"

_OWN_OPS: Final = (
    experts_op.OP_NAME, opaque_op.OP_NAME, decoding_step.OP_NAME, decoding_step.APPEND, *fused_kernels.NAMES
)  # fmt: skip

ALLOWED: Final = frozenset(
    f"aten.{name}"
    for family in (_POINTWISE, _REDUCTIONS, _SHAPES, _PRODUCTS, _LAYERS, _LOSSES, _FACTORIES, _FOURIER)
    for name in family.split()
) | {
    *(f"prims.{name}" for name in _PRIMS.split()),
    *(name.removesuffix(".default") for name in _OWN_OPS),
    "shardplan.ctc_losses",
}
"""Names of ops, without overloads. The in-place variant of each op (``add_``) is allowed as well."""


def name_of(target: Any) -> str | None:
    """Return the name of an op that a graph may contain; None for any other object."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = str(target)
    return name if find_op(name) is target else None


def find_op(name: str) -> torch._ops.OpOverload | None:
    """Return the op called ``name``, as in ``aten.linear.default``; None if no op on the list has this name."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    is_allowed = f"{namespace}.{base}" in ALLOWED or f"{namespace}.{base.removesuffix('_')}" in ALLOWED
    qualified = f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}")
    return _looked_up(namespace, base, overload) if is_allowed and qualified in _registered() else None


@functools.cache
def _looked_up(namespace: str, base: str, overload: str) -> torch._ops.OpOverload | None:
    op = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    assert isinstance(op, torch._ops.OpOverload)
    return op if computes_tensors(op) else None


@functools.cache
def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())
