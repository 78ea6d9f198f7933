"""Bytes of parameters, gradients and optimizer state on one device, the reserve, and seconds of the optimizer's step.

Activations and communication buffers depend on the graph; the planner counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.hardware.devices import DeviceSpec
from cost_model.hardware.reading import ClusterError, close_matches
from cost_model.kernels.compute import dtype_nbytes, stream_bytes_per_s

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The states of an optimizer.

    Attributes:
        states: number of state values per parameter, each in the master dtype.
        source: the names of the states, and the class that defines them.
    """

    name: str
    states: int
    source: str


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(name="adamw", states=2, source="exp_avg, exp_avg_sq: torch.optim.AdamW"),
        OptimizerSpec(name="adam", states=2, source="exp_avg, exp_avg_sq: torch.optim.Adam"),
        OptimizerSpec(name="adagrad", states=1, source="sum: torch.optim.Adagrad"),
        OptimizerSpec(name="sgd", states=0, source="torch.optim.SGD, momentum=0"),
        OptimizerSpec(name="sgd-momentum", states=1, source="momentum_buffer: torch.optim.SGD"),
    )
}


def find_optimizer(name: str) -> OptimizerSpec:
    """Return the optimizer called ``name``, whose case does not matter.

    Raises:
        ClusterError: no optimizer has this name; the message lists all names.
    """
    if name.lower() not in OPTIMIZERS:
        near = close_matches(name.lower(), OPTIMIZERS)
        question = f"did you mean {' or '.join(near)}? " if near else ""
        raise ClusterError(f"unknown optimizer {name!r}; {question}known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name.lower()]


def parameter_state_bytes(
    numel_local: int,
    *,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    master_dtype: str = "fp32",
    gradient_dtype: str = "fp32",
    training: bool = True,
) -> dict[str, int]:
    """Return the bytes of ``numel_local`` parameters between steps, by role.

    Mixed precision with AdamW takes 18 bytes per parameter: 2 parameter, 4 gradient, 4 master copy, 8 states
    (Rajbhandari et al., ZeRO, 2020, section 3.1, counts 16 with 2 bytes of gradient). The master copy counts as
    optimizer state. It exists if ``master_dtype`` differs from ``dtype``.

    Args:
        numel_local: elements on this device.
        optimizer: a name in ``OPTIMIZERS``.
        dtype: dtype of the parameters.
        master_dtype: dtype of the optimizer's master copy and states.
        gradient_dtype: dtype in which gradients are accumulated.
        training: whether there are gradients and optimizer state.

    Returns:
        ``parameters``, ``gradients`` and ``optimizer_state``.
    """
    if numel_local < 0:
        raise ValueError(f"numel_local is {numel_local}; give 0 or more")
    spec = find_optimizer(optimizer)
    master_values = spec.states + (dtype != master_dtype)
    return {
        "parameters": numel_local * dtype_nbytes(dtype),
        "gradients": numel_local * dtype_nbytes(gradient_dtype) if training else 0,
        "optimizer_state": numel_local * master_values * dtype_nbytes(master_dtype) if training else 0,
    }


def optimizer_step_time_s(
    numel_local: int,
    *,
    device: DeviceSpec,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    master_dtype: str = "fp32",
    gradient_dtype: str = "fp32",
) -> float:
    """Return the seconds of a fused optimizer step over ``numel_local`` parameters, limited by memory; 0.0 for none.

    Known error: an unfused step (``foreach``) passes over memory several times and takes about three times as long.
    """
    if numel_local < 0:
        raise ValueError(f"numel_local is {numel_local}; give 0 or more")
    if numel_local == 0:
        return 0.0
    each = optimizer_time_per_parameter_s(
        device=device, optimizer=optimizer, dtype=dtype, master_dtype=master_dtype, gradient_dtype=gradient_dtype
    )
    return numel_local * each + device.kernel_launch_s


def optimizer_time_per_parameter_s(
    *, device: DeviceSpec, optimizer: str, dtype: str, master_dtype: str, gradient_dtype: str
) -> float:
    """Return the seconds of a fused optimizer step per parameter, without the launch.

    The step reads the gradient, reads and writes the states and the master copy, and writes the parameter. If the
    dtypes are equal, the parameter is the master copy.
    """
    updated = (find_optimizer(optimizer).states + 1) * dtype_nbytes(master_dtype)
    nbytes = dtype_nbytes(gradient_dtype) + 2 * updated + (dtype_nbytes(dtype) if dtype != master_dtype else 0)
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
