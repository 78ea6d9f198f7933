"""Weights that a checkpoint holds in 4 or 8 bits, read as what they stand for.

MXFP4, in which GPT-OSS is published, is the 4-bit format of the OCP Microscaling specification (v1.0, 2023): 32 numbers
of a row share one scale, a power of two, and each number is one of 16. A checkpoint has them in ``NAME_blocks``
``[experts, out, groups, 16]``, two numbers in a byte, and ``NAME_scales`` ``[experts, out, groups]``; the parameter
``NAME`` is ``[experts, in, out]``.

In 8 bits, as DeepSeek-V3 is published, each block of ``NAME`` (128 x 128) is multiplied by one number of
``NAME_scale_inv``; blocks at the end may be cut off (DeepSeek-V3 technical report, 2024, section 3.3).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from executor.weights.lazy_tensors import Indices, LazyTensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], dtype=torch.bfloat16)
"""The number that each of the 16 codes stands for."""

_GROUP = 32
"""Numbers that share a scale."""

_EXPONENT_BIAS = 127

FP8_BLOCK = (128, 128)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Mxfp4Tensor(LazyTensor):
    """``[experts, in, out]`` in bfloat16; reading a slice takes the groups around it."""

    def __init__(self, blocks: LazyTensor, scales: LazyTensor) -> None:
        """Take the numbers, ``[experts, out, groups, 16]``, and their scales, ``[experts, out, groups]``, in uint8."""
        experts, out, groups, _ = blocks.shape
        reads_slices = blocks.reads_slices and scales.reads_slices
        super().__init__((experts, groups * _GROUP, out), torch.bfloat16, reads_slices=reads_slices)
        self._blocks, self._scales = blocks, scales

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``."""
        experts, within, out = indices
        groups, group_of = (within // _GROUP).unique(return_inverse=True)
        packed = self._blocks.read((experts, out, groups, torch.arange(_GROUP // 2)))
        exponents = self._scales.read((experts, out, groups)).int() - _EXPONENT_BIAS
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
        numbers = torch.ldexp(_NUMBERS.to(codes.device)[codes], exponents.unsqueeze(-1)).to(torch.bfloat16).flatten(-2)
        return numbers[..., (group_of * _GROUP + within % _GROUP).to(numbers.device)].transpose(1, 2)

    def prepared(self) -> LazyTensor:
        """Return the tensor that reads from prepared blocks and scales."""
        return Mxfp4Tensor(self._blocks.prepared(), self._scales.prepared())


class Fp8Tensor(LazyTensor):
    """A matrix, or a stack of them, in float32: numbers of 8 bits times the scale of their block."""

    def __init__(self, numbers: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> None:
        reads_slices = numbers.reads_slices and scales.reads_slices
        super().__init__(numbers.shape, torch.float32, reads_slices=reads_slices)
        self._numbers, self._scales, self._block = numbers, scales, block

    def read(self, indices: Indices) -> torch.Tensor:
        """Return the values at ``indices``."""
        *others, rows, columns = indices
        row_blocks, row_of = (rows // self._block[0]).unique(return_inverse=True)
        column_blocks, column_of = (columns // self._block[1]).unique(return_inverse=True)
        scales = self._scales.read((*others, row_blocks, column_blocks)).float()
        scales = scales.index_select(-2, row_of.to(scales.device)).index_select(-1, column_of.to(scales.device))
        return self._numbers.read(indices).float().mul_(scales)

    def prepared(self) -> LazyTensor:
        """Return the tensor that reads from prepared numbers and scales."""
        return Fp8Tensor(self._numbers.prepared(), self._scales.prepared(), self._block)


def dequantized(
    tensors: Mapping[str, LazyTensor], names: Container[str], block: tuple[int, int] = FP8_BLOCK
) -> dict[str, LazyTensor]:
    """Return ``tensors``, with one tensor in place of the numbers and scales of each that is in MXFP4 or in 8 bits.

    Args:
        tensors: name in a checkpoint -> tensor.
        names: of the model; scales that the model itself holds are left alone.
        block: rows and columns of a block in 8 bits.
    """
    found: dict[str, LazyTensor] = dict(tensors)
    for name, tensor in tensors.items():
        scale_inv, stem = f"{name}_scale_inv", name.removesuffix("_blocks")
        if scale_inv in tensors and scale_inv not in names and _is_fp8(tensor, tensors[scale_inv], block):
            found[name] = Fp8Tensor(tensor, found.pop(scale_inv), block)
        scales = f"{stem}_scales"
        if stem != name and name not in names and scales in tensors and _is_mxfp4(tensor, tensors[scales]):
            found[stem] = Mxfp4Tensor(found.pop(name), found.pop(scales))
    return found


def _is_fp8(numbers: LazyTensor, scales: LazyTensor, block: tuple[int, int]) -> bool:
    blocks = [-(-length // size) for length, size in zip(numbers.shape[-2:], block, strict=False)]
    in_blocks = len(numbers.shape) > 1 and list(scales.shape) == [*numbers.shape[:-2], *blocks]
    return in_blocks and numbers.dtype in _FP8 and scales.dtype.is_floating_point


def _is_mxfp4(blocks: LazyTensor, scales: LazyTensor) -> bool:
    in_groups = len(blocks.shape) == 4 and blocks.shape[:-1] == scales.shape and blocks.shape[-1] == _GROUP // 2
    return in_groups and blocks.dtype == scales.dtype == torch.uint8
