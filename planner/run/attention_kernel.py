"""The check that a model's attention can run in the kernel that a job asks for."""

from __future__ import annotations

from cost_model.hardware.devices import DeviceSpec
from cost_model.kernels.attention import runs_kernel
from planner.errors import JobError
from planner.graph.op_graph import OpGraph
from planner.plan.job import Job
from planner.profile.profile import ATTENTION
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
    reason = None
    if not runs_kernel(kernel, device):
        reason = f"{device.name} does not run"
    elif job.dtype == "fp32":
        reason = "does not run in fp32"
    else:
        for op in graph.ops:
            if op.target is ATTENTION:
                query, key, value, *masks = (graph.values[name] for name in op.inputs)
                widths = {tensor.shape[-1] for tensor in (query, key, value)}
                if dropout_of(op):
                    reason = f"has no dropout, as attention of this model has ({op.name})"
                elif masks:
                    reason = f"takes no mask, as attention of this model has ({op.name})"
                elif len(widths) > 1 or max(widths) > _LARGEST_HEAD_DIM or max(widths) % _HEAD_DIM_MULTIPLE:
                    reason = f"does not run these head dims: {', '.join(map(str, sorted(widths)))} ({op.name})"
    if reason is not None:
        raise JobError(
            f"attention_kernel is {kernel!r}, which {reason}.",
            what_to_do="Leave attention_kernel out: torch chooses a kernel that runs.",
            field="attention_kernel",
        )
