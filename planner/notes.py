"""What a person should know of a plan that its figures do not say."""

from __future__ import annotations

from collections.abc import Iterator

from planner.candidates import TracedModel
from planner.fused_note import fused_note
from planner.opened_plan import WITHOUT_LOSS, gives_no_loss
from planner.run import Run
from planner.traced_module import TracedModule

NOT_OVERLAPPED = (
    "the plan assumes that tensor-parallel communication inside a node runs in pieces beside matrix products, which "
    "cannot be run here: without --tensor-overlap (tensor_overlap=False) it is priced as it runs."
)


def notes_on(run: Run, module: TracedModule, traced: TracedModel, batch: int) -> Iterator[str]:
    """Yield what is worth knowing of a plan of ``run``; ``batch`` is the global one, in samples."""
    if run.job.training and gives_no_loss(traced):
        yield WITHOUT_LOSS
    if run.job.phase == "prefill" and not module.decodes:
        yield "no key-value cache is counted: the model has none, or one of latents."
    if run.job.tensor_overlap:
        yield NOT_OVERLAPPED
    if run.job.fused:
        yield fused_note(module.graph)
    micro_batch = batch // run.micro_batches
    sizes = [size for size in run.mesh.shape if size > 1]
    if run.job.training and sizes and all(micro_batch % size for size in sizes):
        yield f"no axis of the mesh {run.mesh} divides {micro_batch} samples: none splits the batch evenly."
    if run.batch_axes:
        names = ", ".join(run.mesh.names[axis] for axis in run.batch_axes)
        yield (
            f"of the mesh {run.mesh}, {names} was tried for the batch alone, with parameters computed whole on it: the "
            "gap is over such plans."
        )
