"""Notes on a plan: facts for a reader that the plan's figures do not show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from cost_model.kernels.optimizers import OPTIMIZERS
from planner.graph.layer_caches.decoding_step import state_path
from planner.graph.op_graph import OpGraph
from planner.graph.trace_module import TracedModule
from planner.model_rewrites import fused_kernels
from planner.model_rewrites.cache_argument import CROSS
from planner.plan.job import Job
from planner.plan.patterns import match_keys
from planner.plan.ports import PortSpec, ports_of
from planner.pricing.run_spec import Run
from planner.profile.shared_input_linears import gradient_sums
from planner.run.model_analysis import ModelAnalysis
from planner.strategies.local_ops import opaque_causes, opaque_splits
from planner.writing.fqn_entries import fold_names
from planner.writing.loss import NO_LOSS_NOTE, returns_no_loss

ASYNC_TP_NOTE = (
    "the plan assumes async tensor parallelism: communication inside a node is overlapped, in pieces, with GEMMs. "
    "shard_module cannot run it; plan without the technique async-tp for a plan that it can."
)
SAMPLE_LOOP_NOTE = (
    "the forward takes its batch apart, so that only plans with {count} micro-batch(es) a step were searched: give "
    "micro_batches for another number."
)


LATENTS_NOTE = (
    "the cache holds latents, and every step computes the keys and values of all tokens from them, as transformers "
    "does: an engine that multiplies queries by the projection instead is faster."
)
UNLIKE_DEVICES = "the devices differ, and all ranks do as much as the least of them can. What is not used"
ENCODER_NOTE = (
    "a step of decoding does not run the encoder, nor compute its keys and values: their weights are in memory, but "
    "what a new batch costs before its first step is not in the time."
)
UNREAD_NOTE = (
    "a call with these inputs ({inputs}) does not read {share:.0%} of the parameters: {names}. They have layouts, and "
    "what they compute is not in the plan. Give example_inputs of a call that reads them, such as one with images."
)
_MUCH_UNREAD = 0.02
"""Share of the parameters from which on a note says that they are not read; a pooler that a loss leaves out is less."""

OPAQUE_NOTE = (
    "each of these runs as one op: {names}. It is split by samples only, or not at all where it says (whole). What it "
    "costs assumes random values."
)


def notes_on(run: Run, module: TracedModule, traced: ModelAnalysis, batch: int) -> Iterator[str]:
    """Yield the notes on a plan of ``run``; ``batch`` is the number of samples in the global batch."""
    if run.job.training and returns_no_loss(traced):
        yield NO_LOSS_NOTE
    if run.cluster.waste:
        yield f"{UNLIKE_DEVICES}: {'; '.join(map(str, run.cluster.waste))}."
    if run.job.phase == "prefill" and not module.has_kv_cache:
        yield "no key-value cache is counted: the model has none, or what it keeps is not known."
    kept = [op.cache for op in traced.graph.ops if op.cache is not None]
    windows = [cache.window for cache in kept if cache.window]
    if windows:
        yield (
            f"{len(windows)} attention layers keep at most {max(windows):,} tokens of each "
            "sequence, as in transformers: an engine that keeps all tokens in all layers has a larger cache."
        )
    if run.job.phase == "decode" and any(cache.latents for cache in kept):
        yield LATENTS_NOTE
    splits = fold_names(opaque_splits(traced.graph), module.names.modules)
    if splits:
        yield _note_on_opaque(splits, opaque_causes(traced.graph))
    if any(CROSS in (state_path(op) or "") for op in traced.graph.ops):
        yield ENCODER_NOTE
    else:
        yield from _note_on_unread(traced.graph, module)
    optimizer = OPTIMIZERS[run.job.optimizer]
    if run.job.training and optimizer.not_on_dtensor is not None:
        yield f"shard_module does not run {optimizer.title}: {optimizer.not_on_dtensor}."
    if run.job.async_tp:
        yield ASYNC_TP_NOTE
    if run.job.fused_ops:
        yield fused_ops_note(module.graph)
    micro_batch = batch // run.micro_batches
    if not module.any_batch and run.job.micro_batches is None and micro_batch > 1:
        yield SAMPLE_LOOP_NOTE.format(count=run.micro_batches)
    sizes = [size for size in run.mesh.shape if size > 1]
    if run.job.training and sizes and all(micro_batch % size for size in sizes):
        yield f"no axis of the mesh {run.mesh} splits the batch: none divides a micro-batch's samples ({micro_batch})."
    if run.batch_axes:
        names = ", ".join(run.mesh.names[axis] for axis in run.batch_axes)
        yield (
            f"on the mesh {run.mesh}, {names} splits the batch only, with parameters replicated on it in compute: "
            "the gap is over such plans."
        )


def _note_on_opaque(splits: Mapping[str, str], causes: Mapping[str, str]) -> str:
    """Return the note on opaque modules.

    Args:
        splits: pattern of modules -> how they are split.
        causes: FQN of a module -> why it is opaque.
    """
    if "" in splits:
        how = "split by samples only" if splits[""] else "not split at all"
        cause = f": {causes['']}" if causes.get("") else ""
        return f"the whole model runs as one op{cause}. It is {how}; what it costs assumes random values."
    matches = match_keys(splits, causes)
    names = []
    for name, split in splits.items():
        found = dict.fromkeys(causes[fqn] for fqn in matches[name] if causes[fqn])
        names.append(f"{name}{'' if split else ' (whole)'}{f', since {next(iter(found))}' if found else ''}")
    return OPAQUE_NOTE.format(names="; ".join(names))


def _note_on_unread(graph: OpGraph, module: TracedModule) -> Iterator[str]:
    """Yield a note on parameters that no op of ``graph`` reads, if they are many."""
    read = {name for op in graph.ops for name in op.inputs}
    sizes = {names: math.prod(graph.values[value].shape) for value, names in graph.parameters.items()}
    unread = {names: sizes[names] for value, names in graph.parameters.items() if value not in read}
    share = sum(unread.values()) / max(sum(sizes.values()), 1)
    if share < _MUCH_UNREAD:
        return
    of_read = {part for names in sizes.keys() - unread.keys() for name in names for part in _around(name)}
    # Of each parameter, the outermost module around it in which nothing is read.
    outermost = {next(part for part in _around(name) if part not in of_read) for names in unread for name in names}
    inputs = ", ".join(model_input.path for model_input in graph.inputs)
    folded = list(fold_names(dict.fromkeys(sorted(outermost)), (*module.names.modules, *_names(graph))))
    more = f" and {len(folded) - _NAMED} more" if len(folded) > _NAMED else ""
    yield UNREAD_NOTE.format(inputs=inputs, share=share, names=", ".join(folded[:_NAMED]) + more)


def _names(graph: OpGraph) -> list[str]:
    return [name for names in graph.parameters.values() for name in names]


def _around(name: str) -> list[str]:
    """Return the modules around a parameter, the outermost first, and the parameter."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


_FUSED = "run as fused ops: "
_JOINED = "shared-input linear layers accumulate their input's gradient in the GEMM"
NOTHING_FUSED = "no module was replaced by a fused op: none computes what a fused op computes."


def fused_ops_note(graph: OpGraph) -> str:
    """Return the number of fused ops by kind, and of shared-input linear layers, as text."""
    counts = Counter(op.target_name for op in graph.ops if op.target_name in fused_kernels.NAMES)
    parts = ", ".join(f"{count} {name.split('.')[1]}" for name, count in sorted(counts.items()))
    shared_count = sum(bool(shared.gemm_sums) for shared in gradient_sums(graph, shared_input_linears=True).values())
    summary = NOTHING_FUSED if not parts else f"{_FUSED}{parts}."
    return f"{summary} {shared_count} {_JOINED}." if shared_count else summary


def without_fused_ops_note(notes: Iterable[str]) -> Iterator[str]:
    """Yield the notes that are not on fused ops."""
    yield from (note for note in notes if not note.startswith((NOTHING_FUSED, _FUSED)))


_REALLGATHERED = "all-gathered again in the backward, in place of being saved: "
_NOTHING_REALLGATHERED = "no input is all-gathered again in the backward."
_NAMED = 4
"""Largest number of keys that the note names; further keys are counted."""


def with_reallgather_note(notes: Iterable[str], input_plan: Mapping[str, PortSpec], job: Job) -> tuple[str, ...]:
    """Return ``notes`` with an up-to-date note on the inputs that ``input_plan`` all-gathers again in backward.

    Args:
        job: the plan's job. If it asks for re-all-gather and no input is all-gathered again, the note says so.
    """
    keys = [key for key, spec in input_plan.items() if any(port.reallgather for _, port in ports_of(spec))]
    other_notes = tuple(note for note in notes if not note.startswith((_REALLGATHERED, _NOTHING_REALLGATHERED)))
    if not keys:
        return (*other_notes, _NOTHING_REALLGATHERED) if job.reallgather else other_notes
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return (*other_notes, f"{_REALLGATHERED}{', '.join(keys[:_NAMED])}{more}.")
