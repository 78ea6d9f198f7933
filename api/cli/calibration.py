"""``shardplan calibrate``: measure this cluster under torchrun and write the file that describes it."""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import JobError

COMMAND = "torchrun --nproc-per-node 2 --no-python shardplan calibrate -o cluster.yaml"


def calibrate(output: Path, *, backend: str | None = None) -> str | None:
    """Measure the cluster with all processes of torchrun, write the cluster file, and return its text.

    Args:
        output: path of the cluster file, which rank 0 writes.
        backend: ``nccl`` or ``gloo``, which measures CPUs. None: nccl where torch sees a GPU, else gloo.

    Returns:
        The text of the file on rank 0, None on all other ranks.

    Raises:
        JobError: torchrun did not start this process, or the backend cannot be used.
        ClusterError: the device is unknown, or too little could be measured.
    """
    if "WORLD_SIZE" not in os.environ:
        raise JobError("calibrate measures several processes at once.", what_to_do=f"Start it so: {COMMAND}")
    if backend not in (None, "nccl", "gloo"):
        raise JobError(f"there is no backend {backend!r}.", what_to_do="Choose nccl or gloo.", field="backend")
    import torch
    import torch.distributed as dist

    from cost_model.calibrate import cluster_yaml, fit_cluster
    from executor.calibrate.kernels import measure

    has_gpu = torch.cuda.is_available()
    if backend == "nccl" and not has_gpu:
        raise JobError("nccl needs a GPU, and torch sees none.", what_to_do="Give --backend gloo.", field="backend")
    chosen = backend or ("nccl" if has_gpu else "gloo")
    device = torch.device("cpu")
    if chosen == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(chosen)
    try:
        measured = measure(device)
        if dist.get_rank() != 0:
            return None
        cluster, residuals = fit_cluster(measured)
        text = cluster_yaml(cluster, residuals, measured.notes)
        output.write_text(text, encoding="utf-8")
        return text
    finally:
        dist.destroy_process_group()
