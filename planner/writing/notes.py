"""What a person should know of a plan that its figures do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from planner.graph.op_graph import OpGraph
from planner.graph.trace_module import TracedModule
from planner.model_rewrites import fused_kernels
from planner.plan.job import Job
from planner.plan.ports import PortSpec, ports_of
from planner.pricing.run_spec import Run
from planner.profile.shared_input_linears import gradient_sums
from planner.run.model_analysis import ModelAnalysis
from planner.writing.loss import NO_LOSS_NOTE, returns_no_loss

ASYNC_TP_NOTE = (
    "the plan assumes that tensor-parallel communication inside a node runs in pieces beside matrix products, which "
    "cannot be run here: without --async-tp (async_tp=False) it is priced as it runs."
)


def notes_on(run: Run, module: TracedModule, traced: ModelAnalysis, batch: int) -> Iterator[str]:
    """Yield what is worth knowing of a plan of ``run``; ``batch`` is the global one, in samples."""
    if run.job.training and returns_no_loss(traced):
        yield NO_LOSS_NOTE
    if run.job.phase == "prefill" and not module.has_kv_cache:
        yield "no key-value cache is counted: the model has none, or one of latents."
    if run.job.async_tp:
        yield ASYNC_TP_NOTE
    if run.job.fused_ops:
        yield fused_ops_note(module.graph)
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


_FUSED = "run as fused ops: "
_JOINED = "linear layers add up gradients in their products"
NOTHING_FUSED = "nothing of the model is fused: it has no part whose code does what a fused op does."


def fused_ops_note(graph: OpGraph) -> str:
    """Say how many ops of a model are fused, by kind, and in how many linear layers gradients are joined."""
    counts = Counter(op.target_name for op in graph.ops if op.target_name in fused_kernels.NAMES)
    parts = ", ".join(f"{count} {name.split('.')[1]}" for name, count in sorted(counts.items()))
    joined = sum(bool(shared.gemm_sums) for shared in gradient_sums(graph, shared_input_linears=True).values())
    said = NOTHING_FUSED if not parts else f"{_FUSED}{parts}."
    return f"{said} Beside that {joined} {_JOINED}." if joined else said


def without_fused_ops_note(notes: Iterable[str]) -> Iterator[str]:
    """Yield the notes that say something else."""
    yield from (note for note in notes if not note.startswith((NOTHING_FUSED, _FUSED)))


_REGATHERED = "gathered again for the backward, and not kept until then: "
_NOTHING_REGATHERED = "nothing is gathered again for the backward."
_NAMED = 4
"""Keys that are named; the others are counted."""


def with_reallgather_note(notes: Iterable[str], input_plan: Mapping[str, PortSpec], job: Job) -> tuple[str, ...]:
    """Return ``notes`` with one on what ``input_plan`` has gathered again, in place of an earlier one.

    Args:
        job: the plan's; where it asked for this, and nothing came of it, the note says so.
    """
    keys = [key for key, spec in input_plan.items() if any(port.reallgather for _, port in ports_of(spec))]
    others = tuple(note for note in notes if not note.startswith((_REGATHERED, _NOTHING_REGATHERED)))
    if not keys:
        return (*others, _NOTHING_REGATHERED) if job.reallgather else others
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return (*others, f"{_REGATHERED}{', '.join(keys[:_NAMED])}{more}.")
