"""The process from which gloo ranks and the service's processes are forked: it imports what they need, once for all."""

from __future__ import annotations

import multiprocessing

# A fork server is not told where the tests are, so that what they import is named here.
_FAMILIES = ("bert", "gpt2", "llama", "mixtral", "t5", "vit")


def preload() -> None:
    """Name the imports; without effect once a process was forked."""
    multiprocessing.set_forkserver_preload(
        [
            *("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "pytest"),
            *("executor.shard", "planner", "api.jobs.solve", "api.http.work.functions"),
            *("transformers.generation.utils", "transformers.models.auto.modeling_auto"),
            *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
        ]
    )
