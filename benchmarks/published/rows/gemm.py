"""The rows of gemm.csv as calls of the cost model: device, shape and kernel, or the reason why there is no call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.hardware.devices import DeviceSpec, device_names, find_device
from cost_model.kernels.attention import attention_time_s
from cost_model.kernels.compute import dtype_nbytes, elementwise_time_s
from cost_model.kernels.efficiency import Efficiency, shipped_efficiency
from cost_model.kernels.gemm import gemm_time_s, grouped_gemm_time_s, grouped_gradient_time_s
from published.rows.priced_row import number

DEVICES = (
    ("gb300", ("gb300-nvl72-288gb", "gb200-nvl72-186gb")),
    ("gb200", ("gb200-nvl72-186gb",)),
    ("b300", ("b300-sxm-288gb", "b200-sxm-180gb")),
    ("b200", ("b200-sxm-180gb",)),
    ("h200", ("h200-sxm-141gb",)),
    ("h100 pcie", ("h100-pcie-80gb",)),
    ("h100 nvl", ("h100-nvl-94gb",)),
    ("h100", ("h100-sxm-80gb",)),
    ("gh200", ("h100-sxm-80gb",)),
    ("hopper", ("h100-sxm-80gb",)),
    ("a100 pcie", ("a100-pcie-80gb",)),
    ("a100", ("a100-sxm-80gb",)),
    ("mi300x", ("mi300x-192gb",)),
    ("mi325x", ("mi325x-256gb",)),
    ("mi355x", ("mi355x-288gb",)),
    ("l40s", ("l40s-48gb",)),
    ("l4", ("l4-24gb",)),
    ("v100", ("v100-sxm-32gb",)),
    ("rtx 4090", ("rtx-4090-24gb",)),
)
"""(start of a row's ``gpu``, names in the catalogue, nearest first); SXM where the row states no form."""

KERNELS = (
    ("FlashAttention-2", "flash2"),
    ("FlashAttention-3", "flash3"),
    ("FlashAttention-4", "flash4"),
    ("cuDNN", "cudnn"),
    ("standard attention", "unfused"),
    ("PyTorch standard attention", "unfused"),
)
_SEQ = re.compile(r"seq (\d+), head_dim (\d+), causal=(True|False)")
_GROUPED = re.compile(r"(\d+)x(\d+)x(\d+) g(\d+)")
_TOKENS, _HIDDEN = 16384, 2048
_FLOPS_OF = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


class OutOfScopeError(Exception):
    """The cost model has no call for a row; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """An attention benchmark of FlashAttention's kind: 16k tokens, hidden size 2048, one or two passes."""

    seq: int
    head_dim: int
    causal: bool
    passes: str
    kernel: str

    @property
    def flops(self) -> float:
        """FLOPs by the papers' convention: half of the scores where causal, backward 2.5 times forward."""
        return _FLOPS_OF[self.passes] * 4 * _TOKENS * self.seq * _HIDDEN / (2 if self.causal else 1)

    def time_s(self, device: DeviceSpec, efficiency: Efficiency) -> float:
        """Return the seconds on ``device``, two event records around the kernels included."""
        heads = _HIDDEN // self.head_dim
        seconds = sum(
            attention_time_s(
                batch=_TOKENS // self.seq,
                heads=heads,
                kv_heads=heads,
                seq_q=self.seq,
                seq_k=self.seq,
                head_dim=self.head_dim,
                causal=self.causal,
                backward=backward,
                device=device,
                dtype="fp16",
                kernel=self.kernel,
                efficiency=efficiency,
            )
            for name, backward in (("fwd", False), ("bwd", True))
            if name in self.passes
        )
        return seconds + efficiency.gemm.isolated_launch_s


def device_of(row: Mapping[str, str]) -> tuple[DeviceSpec, str | None]:
    """Return the catalogue's device for the row, and the assumption about it.

    Raises:
        OutOfScopeError: the catalogue has no such device.
    """
    gpu = row["gpu"].lower()
    known = device_names()
    for start, names in DEVICES:
        if gpu.startswith(start):
            for name in names:
                if name in known:
                    exact = name.startswith(start.split()[0]) and ("sxm" in gpu or "pcie" in gpu or start[0] in "gm")
                    return find_device(name), None if exact else f"{row['gpu']} taken as {name}"
    raise OutOfScopeError(f"no device of the catalogue is {row['gpu']!r}")


def dtype_of(row: Mapping[str, str]) -> str:
    """Return the cost model's name of the row's dtype.

    Raises:
        OutOfScopeError: the cost model has no such dtype.
    """
    text = row["dtype"].lower()
    for dtype in ("fp8", "bf16", "fp16", "tf32", "fp32"):
        if dtype in text:
            return dtype
    raise OutOfScopeError(f"no model of dtype {row['dtype']!r}")


def attention_case(row: Mapping[str, str]) -> AttentionCase:
    """Return the row's attention benchmark.

    Raises:
        OutOfScopeError: the kernel or the shape is not modelled.
    """
    kernel = next((name for start, name in KERNELS if row["op"].startswith(start)), None)
    if dtype_of(row) == "fp8":
        raise OutOfScopeError("attention in fp8: no row to calibrate with")
    match = _SEQ.search(row["shape"])
    passes = row["op"].rsplit(" ", 1)[-1]
    if kernel is None or passes not in _FLOPS_OF:
        raise OutOfScopeError(f"no model of {row['op'].split(' fwd')[0].split(' bwd')[0]}")
    if match is None:
        raise OutOfScopeError(f"shape {row['shape']!r} is not seq, head_dim, causal")
    return AttentionCase(
        seq=int(match[1]), head_dim=int(match[2]), causal=match[3] == "True", passes=passes, kernel=kernel
    )


def shape_of(row: Mapping[str, str]) -> tuple[int, int, int]:
    """Return (m, n, k) of a GEMM's row.

    Raises:
        OutOfScopeError: one of them is blank.
    """
    sizes = [number(row, column) for column in "MNK"]
    if None in sizes:
        raise OutOfScopeError("the row has no M, N, K")
    m, n, k = (int(size) for size in sizes if size is not None)
    return m, n, k


def gemm_row_time_s(row: Mapping[str, str], device: DeviceSpec, efficiency: Efficiency | None = None) -> float:
    """Return the seconds of a ``gemm`` row, two event records around the kernel included."""
    m, n, k = shape_of(row)
    constants = (efficiency or shipped_efficiency()).gemm
    dtype = dtype_of(row)
    aligned = all(size * dtype_nbytes(dtype) % 16 == 0 for size in (m, n, k))
    seconds = gemm_time_s(m=m, n=n, k=k, device=device, dtype=dtype, aligned=aligned, efficiency=constants)
    return seconds + constants.isolated_launch_s


def grouped_row_time_s(
    row: Mapping[str, str], device: DeviceSpec, efficiency: Efficiency | None = None
) -> tuple[float, float]:
    """Return (FLOPs, seconds) of a ``grouped gemm`` row: torch's forward kernel, or all three GEMMs of a step.

    Where the row includes quantization, both operands and the gradient are quantized along both dims.
    """
    constants = (efficiency or shipped_efficiency()).gemm
    dtype = dtype_of(row)

    def seconds(tokens: int, n: int, k: int, groups: int) -> float:
        return grouped_gemm_time_s(
            tokens=tokens, n=n, k=k, groups=groups, device=device, dtype=dtype, kernel="grouped", efficiency=constants
        )

    single = _GROUPED.search(row["shape"])
    if single is not None:
        tokens, n, k, groups = (int(single[i]) for i in range(1, 5))
        return 2.0 * tokens * n * k, seconds(tokens, n, k, groups)
    tokens, n, k = shape_of(row)
    match = re.search(r"(\d+) groups", row["op"])
    if match is None or "fwd+bwd" not in row["op"]:
        raise OutOfScopeError(f"no model of {row['op']}")
    groups = int(match[1])
    weights_s = grouped_gradient_time_s(
        tokens=tokens, n=k, k=n, groups=groups, device=device, dtype=dtype, efficiency=constants
    )
    all_s = seconds(tokens, n, k, groups) + seconds(tokens, k, n, groups) + weights_s
    if "quantisation" in row["op"]:
        numel = tokens * (n + k) + groups * n * k
        all_s += 2 * elementwise_time_s(numel=numel, reads=1, writes=0, dtype="bf16", device=device)
        all_s += 2 * elementwise_time_s(numel=numel, reads=0, writes=1, dtype="fp8", device=device)
    return 6.0 * tokens * n * k, all_s
