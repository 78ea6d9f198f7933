"""Bytes of parameters, gradients and optimizer state on one device, the reserve, and seconds of the optimizer's step.

Activations and communication buffers depend on the graph; the planner counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.compute import dtype_nbytes, stream_bytes_per_s
from cost_model.kernels.optimizers import find_optimizer

CONTEXT_BYTES = 800_000_000
"""Bytes of the CUDA context and the kernels of one PyTorch process: 781 MB (pytorch issue #34323, 2020). Assumed equal
on every GPU."""

NCCL_BYTES = 1_000_000_000
"""Bytes of the communicators' buffers: 4 MiB (default of NCCL_BUFFSIZE) per channel, peer and direction. Assumed sum: 4
communicators of 250 MB."""

ALLOCATOR_SHARE = 0.05
"""Share of the device's memory that fragmentation makes unusable for the caching allocator. Assumed, 2026-11:
in 94 published runs of trust A the reserved bytes are above the priced allocated bytes by 8 % of the device (median; by
up to 21 % but for one run, benchmarks/published_memory.py), but the allocator frees cached blocks when memory is
short."""


RESERVE_ROLES = ("allocator", "context")
"""Roles of the bytes that a plan reserves beyond its tensors."""


def parameter_state_bytes(
    numel_local: int,
    *,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    master_dtype: str = "fp32",
    gradient_dtype: str = "fp32",
    training: bool = True,
    shape: Sequence[int] | None = None,
    in_block: bool = False,
) -> dict[str, float]:
    """Return the bytes of one parameter between steps, by role.

    Mixed precision with AdamW takes 18 bytes per element: 2 parameter, 4 gradient, 4 master copy, 8 states
    (Rajbhandari et al., ZeRO, 2020, section 3.1, counts 16 with 2 bytes of gradient). The master copy counts as
    optimizer state. It exists if ``master_dtype`` differs from ``dtype``.

    Args:
        numel_local: elements on this device.
        optimizer: a name in ``optimizers.OPTIMIZERS``.
        dtype: dtype of the parameters.
        master_dtype: dtype of the optimizer's master copy and states.
        gradient_dtype: dtype in which gradients are accumulated.
        training: whether there are gradients and optimizer state.
        shape, in_block: of the parameter, for optimizers that treat matrices in their own way
            (`OptimizerSpec.state_nbytes`).

    Returns:
        ``parameters``, ``gradients`` and ``optimizer_state``.
    """
    if numel_local < 0:
        raise ValueError(f"numel_local is {numel_local}; give 0 or more")
    spec, master_nbytes = find_optimizer(optimizer), dtype_nbytes(master_dtype)
    states = spec.state_nbytes(numel_local, master_nbytes, shape=shape, in_block=in_block)
    master_copy = numel_local * master_nbytes if dtype != master_dtype else 0
    return {
        "parameters": float(numel_local * dtype_nbytes(dtype)),
        "gradients": float(numel_local * dtype_nbytes(gradient_dtype)) if training else 0.0,
        "optimizer_state": states + master_copy if training else 0.0,
    }


def optimizer_update_s(
    numel_local: int,
    *,
    device: DeviceSpec,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    master_dtype: str = "fp32",
    gradient_dtype: str = "fp32",
    shape: Sequence[int] | None = None,
    in_block: bool = False,
) -> float:
    """Return the seconds of a fused optimizer's update of one parameter, limited by memory, without the launch.

    The update reads the gradient, reads and writes the states and the master copy, and writes the parameter. If the
    dtypes are equal, the parameter is the master copy. Muon's orthogonalization is not part of it.

    Known error: an unfused step (``foreach``) passes over memory several times and takes about three times as long.

    Args:
        shape, in_block: as in `parameter_state_bytes`.
    """
    if numel_local < 0:
        raise ValueError(f"numel_local is {numel_local}; give 0 or more")
    master_nbytes = dtype_nbytes(master_dtype)
    states = find_optimizer(optimizer).state_nbytes(numel_local, master_nbytes, shape=shape, in_block=in_block)
    written = numel_local * dtype_nbytes(dtype) if dtype != master_dtype else 0
    nbytes = numel_local * dtype_nbytes(gradient_dtype) + 2 * (states + numel_local * master_nbytes) + written
    return nbytes / stream_bytes_per_s(device)


def reserve_by_role(device: DeviceSpec) -> dict[str, int]:
    """Return the bytes of a device that a plan reserves beyond its tensors, by role; 0 without a GPU.

    Returns:
        ``allocator``: free blocks of the caching allocator that no tensor fits into. ``context``: the CUDA context and
        NCCL's buffers, which lie outside the allocator.
    """
    if device.kind == "cpu":
        return dict.fromkeys(RESERVE_ROLES, 0)
    return {"allocator": round(ALLOCATOR_SHARE * device.memory_bytes), "context": CONTEXT_BYTES + NCCL_BYTES}


def reserve_bytes(device: DeviceSpec) -> int:
    """Return the bytes of a device that a plan reserves beyond its tensors, over all roles; 0 without a GPU."""
    return sum(reserve_by_role(device).values())
