"""The check that a model's attention can run in the kernel that a job asks for."""

from __future__ import annotations

from cost_model.hardware.devices import DeviceSpec
from planner.graph.op_graph import ATTENTION, Op, OpGraph
from planner.plan.job import Job
from planner.plan.techniques import kernel_fault, no_kernel, raise_faults
from planner.strategies.context_parallel import dropout_of

_LARGEST_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8
"""Head dims that torch passes to FlashAttention-3, in elements: the largest, and the number that divides all of them.

From torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (``check_head_dim_size_flash``).
"""


def check_kernel(job: Job, device: DeviceSpec, graph: OpGraph) -> None:
    """Check that the job's attention kernel runs on ``device``, and that it can run every attention op of ``graph``.

    Raises:
        JobError: the kernel does not run, or cannot run one of the ops.
    """
    kernel = job.attention_kernel
    if kernel is None:
        return
    fault = kernel_fault(kernel, device, job.dtype)
    reasons = [reason for op in graph.ops if op.target is ATTENTION and (reason := _reason(op, graph)) is not None]
    if fault is None and reasons:
        fault = no_kernel(kernel, reasons[0])
    raise_faults([] if fault is None else [fault])


def _reason(op: Op, graph: OpGraph) -> str | None:
    """Return why FlashAttention-3 cannot run an attention op; None: it can."""
    query, key, value, *masks = (graph.values[name] for name in op.inputs)
    widths = {tensor.shape[-1] for tensor in (query, key, value)}
    if len(query.shape) != 4:
        return f"takes tensors of four dims, and attention of this model has {len(query.shape)} ({op.name})"
    if dropout_of(op):
        return f"has no dropout, as attention of this model has ({op.name})"
    if masks:
        return f"takes no mask, as attention of this model has ({op.name})"
    if len(widths) > 1 or max(widths) > _LARGEST_HEAD_DIM or max(widths) % _HEAD_DIM_MULTIPLE:
        return f"does not run these head dims: {', '.join(map(str, sorted(widths)))} ({op.name})"
    return None
