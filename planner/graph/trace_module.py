"""`TracedModule`: a module's graph and the facts about the module that planning needs, without the module itself.

`trace_module` makes one from a module. `planner.wire` reads one from JSON, which another machine may have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from planner.errors import JobError, ModelError
from planner.graph.capture import ExampleInputs, quiet_export, to_meta
from planner.graph.example_inputs import (
    GivenInputs,
    batch_size_of,
    inputs_from_config,
    keeps_prompt,
    meta_inputs,
    with_batch,
    with_dtype,
)
from planner.graph.from_fx import trace
from planner.graph.layer_caches.caches_in_trace import check_tokens, trace_with_caches
from planner.graph.layer_caches.kept import has_caches
from planner.graph.op_graph import OpGraph, with_results
from planner.graph.opaque_trace import opaque_names, trace_with_opaque
from planner.graph.sample_loops import NoSampleLoops, SampleLoopError
from planner.graph.trace_errors import check_is_plain, check_trainable
from planner.model_rewrites import opaque_op
from planner.model_rewrites.cache_argument import without_cache
from planner.model_rewrites.fuse_ops import TRACED_OPS, fuse_ops
from planner.model_rewrites.fuse_projections import carried_tp_plan, count_fused_projections, fuse_projections
from planner.model_rewrites.image_sizes.encoders import encoders_of_sizes
from planner.model_rewrites.image_sizes.positions import with_position_ids
from planner.plan.fingerprint import model_fingerprint
from planner.plan.former_names import accepts_former_names
from planner.plan.job import Job
from planner.plan.job_spec import JobPhase

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

TRACE_BATCH = 99_991
"""Batch size at which a graph for any batch is traced: a prime that divides no other size in a model (`at_batch`)."""

BASE_BATCH = 12
"""Batch size at which the strategies of a graph for any batch are enumerated: divisible by 2, 3 and 4 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The FQNs in a module, in the module's order. A shared parameter or submodule occurs under each of its FQNs.

    Attributes:
        parameters: FQNs of all parameters, used or not.
        modules: FQNs of all submodules, beginning with "" for the root.
    """

    parameters: tuple[str, ...]
    modules: tuple[str, ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> ModuleNames:
        """Return the FQNs in ``module``."""
        return cls(
            parameters=tuple(name for name, _ in module.named_parameters(remove_duplicate=False)),
            modules=tuple(name for name, _ in module.named_modules(remove_duplicate=False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module's graph, and the facts about the module that planning needs.

    Attributes:
        name: name of the module's class.
        names: FQNs of its parameters and submodules.
        fingerprint: structural hash of the module.
        tp_plan: FQN pattern of modules -> tensor-parallel style, from the module's ``tp_plan`` (Hugging Face); None if
            it has none.
        graph: graph of one forward call.
        dtype: dtype of parameters and activations: "bf16", "fp16" or "fp32".
        samples: global batch size of the example inputs (their first dim).
        traced_batch: batch size of the graph.
        any_batch: whether the graph serves any batch (`at_batch`); otherwise it serves ``traced_batch`` only.
        phase: phase that the graph is for; in a graph for inference no value needs a gradient.
        has_kv_cache: whether layers keep keys and values, latents or states, in inference.
        fused_ops: whether fused ops replace chains of small ops (`planner.model_rewrites.fuse_ops`).
        fused_projections: whether projections are fused (`planner.model_rewrites.fuse_projections`).
    """

    name: str
    names: ModuleNames
    fingerprint: str
    tp_plan: Mapping[str, str] | None
    graph: OpGraph
    dtype: str
    samples: int
    traced_batch: int
    any_batch: bool
    phase: JobPhase = "training"
    has_kv_cache: bool = False
    fused_ops: bool = False
    fused_projections: bool = False


@accepts_former_names
def trace_module(
    module: nn.Module,
    *,
    example_inputs: GivenInputs = None,
    batch: int | None = None,
    seq: int | None = None,
    micro_batches: int | None = None,
    dtype: str = "bf16",
    phase: JobPhase = "training",
    fused_ops: bool = False,
    fused_projections: bool = False,
    opaque_modules: Iterable[str] | Mapping[str, str] = (),
) -> TracedModule:
    """Return the graph of ``module`` and the facts that planning needs; ``module`` may be on the meta device.

    ``module`` is not changed.

    Args:
        module: any module.
        example_inputs: arguments of one call with the global batch (tuple or dict); None makes them from the Hugging
            Face config.
        batch: samples in the global batch; None takes the batch size of the example inputs.
        seq: tokens per sample, for models that read tokens.
        micro_batches: micro-batches per step. None makes a graph that serves any number of micro-batches, unless the
            global batch is 1.
        dtype: dtype of parameters and activations.
        phase: phase of the jobs that the graph is for. Only training has micro-batches; a graph for inference serves
            any batch.
        fused_ops: whether the jobs that the graph is for use fused ops, as in `planner.plan.job.Job`.
        fused_projections: whether they use fused projections.
        opaque_modules: FQN patterns of modules that run as one op; a mapping says why (`ModelError.cause`). Those that
            cannot be traced need not be named.

    Raises:
        PlannerError: the module cannot be traced, its inputs cannot be made, or it has no projections to fuse.
    """
    inputs = resolve_inputs(module, example_inputs, batch=batch, seq=seq, phase=phase)
    samples = batch_size_of(inputs)
    counts = micro_batch_counts(batch or samples, micro_batches)
    is_fixed = phase == "training" and len(counts) == 1
    largest = (batch or samples) // counts[0]
    return trace_at_batch(
        module,
        inputs,
        largest if is_fixed else None,
        dtype,
        phase,
        largest=largest,
        fused_ops=fused_ops,
        fused_projections=fused_projections,
        opaque_modules=opaque_modules,
        seq=seq,
    )


def with_fused_projections(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the meta device with fused projections; ``module`` itself if it has them already.

    Raises:
        ModelError: the module has no projections that can be fused.
    """
    if count_fused_projections(module):
        return module
    fused = fuse_projections(to_meta(module, None))
    if not count_fused_projections(fused):
        raise ModelError(
            f"{type(module).__name__} has no projections that can be fused, as transformers' decoders have them.",
            what_to_do="Leave fused-projections out of the techniques.",
        )
    return fused


def resolve_inputs(
    module: nn.Module | TracedModule,
    example_inputs: GivenInputs,
    *,
    batch: int | None,
    seq: int | None,
    phase: JobPhase,
) -> ExampleInputs:
    """Return the arguments of one call: ``example_inputs``, or arguments made from the module's config.

    A `TracedModule` needs no arguments: the result is empty.

    Raises:
        PlannerError: the config describes no inputs, inputs are given where none are accepted, or the module cannot
            decode.
    """
    if isinstance(module, TracedModule):
        if example_inputs is not None:
            advice = "Give them to trace_module, or give the module in place of the TracedModule."
            raise JobError("a model that is traced already takes no example inputs.", what_to_do=advice)
        return ExampleInputs(args=(), kwargs={})
    if example_inputs is None:
        return inputs_from_config(module, batch=batch, seq=seq, phase=phase)
    if phase == "decode":
        advice = "Leave example_inputs out: those of a decoding step are made from the Hugging Face config."
        raise JobError("decoding cannot be planned from example inputs.", what_to_do=advice, field="phase")
    inputs = meta_inputs(example_inputs)
    return ExampleInputs(args=inputs.args, kwargs=with_position_ids(module, inputs.args, inputs.kwargs))


def trace_at_batch(
    module: nn.Module,
    inputs: ExampleInputs,
    micro_batch: int | None,
    dtype: str,
    phase: JobPhase = "training",
    *,
    largest: int = 1,
    fused_ops: bool = False,
    fused_projections: bool = False,
    opaque_modules: Iterable[str] | Mapping[str, str] = (),
    seq: int | None = None,
) -> TracedModule:
    """Return ``module`` traced with ``micro_batch`` samples; None makes a graph that serves any batch.

    A module whose forward takes the batch apart, by a loop over samples or into groups of them, has no such graph. It
    is traced with ``largest`` samples.

    Raises:
        ModelError: the module cannot be traced, has parts that no trace reads, or has no projections to fuse.
        UnmatchedKeyError: no module matches a pattern of ``opaque_modules``.
    """
    check_is_plain(module)
    if fused_projections:
        module = with_fused_projections(module)
    causes = opaque_modules if isinstance(opaque_modules, Mapping) else dict.fromkeys(opaque_modules, "")
    opaque = opaque_names(module, causes)
    copy = to_meta(module, TORCH_DTYPES[dtype], trained=phase == "training")
    if fused_ops:
        fuse_ops(copy, TRACED_OPS)
    samples = batch_size_of(inputs)
    if phase == "training":
        inputs = ExampleInputs(args=inputs.args, kwargs=without_cache(module.forward, inputs.args, inputs.kwargs))
    typed = with_dtype(inputs, TORCH_DTYPES[dtype])
    keeps = phase == "decode" or (phase == "prefill" and keeps_prompt(module))
    few = with_batch(typed, samples, 2)
    opaque |= dict.fromkeys(encoders_of_sizes(copy, few.args, few.kwargs), "it reads the sizes of images")

    def traced() -> tuple[OpGraph, int | None]:
        with quiet_export():
            if micro_batch is None:
                return _traced_at_any_batch(copy, typed, samples, largest, opaque)
            return _traced(copy, typed, samples, micro_batch, opaque), micro_batch

    if keeps:
        call, earlier = with_batch(typed, samples, 1).kwargs, (seq or 0) if phase == "decode" else None
        graph, served = trace_with_caches(module, copy, call, traced, earlier=earlier)
    else:
        graph, served = traced()
    graph = with_results(graph, training=phase == "training")
    if phase == "training":
        check_trainable(graph)
    return TracedModule(
        name=type(module).__name__,
        names=ModuleNames.from_module(module),
        fingerprint=model_fingerprint(module),
        tp_plan=carried_tp_plan(module),
        graph=graph,
        dtype=dtype,
        samples=samples,
        traced_batch=served or TRACE_BATCH,
        any_batch=served is None,
        phase=phase,
        has_kv_cache=keeps and has_caches(graph),
        fused_ops=fused_ops,
        fused_projections=count_fused_projections(module) > 0,
    )


def _traced_at_any_batch(
    module: nn.Module, inputs: ExampleInputs, samples: int, largest: int, opaque: Mapping[str, str]
) -> tuple[OpGraph, int | None]:
    """Return the graph of ``module`` for any batch and None; or, where there is none, that for ``largest`` and that.

    It is for ``largest`` samples where the forward takes the batch apart: a graph for any batch is refused then, or it
    has the whole module as one op.
    """
    refused: SampleLoopError | ModelError | None = None
    graph = None
    try:
        with NoSampleLoops(TRACE_BATCH):
            graph = _traced(module, inputs, samples, TRACE_BATCH, opaque)
        if "" in opaque or not _is_one_op(graph):
            return graph, None
    except (SampleLoopError, ModelError) as error:
        refused = error
    try:
        at_largest = _traced(module, inputs, samples, largest, opaque)
    except ModelError:
        if isinstance(refused, ModelError):
            raise refused from None
        if graph is None:
            raise
        return graph, None
    return (at_largest, largest) if graph is None or not _is_one_op(at_largest) else (graph, None)


def _is_one_op(graph: OpGraph) -> bool:
    """Return whether the whole model is one opaque module."""
    return any(op.target_name == opaque_op.OP_NAME and not graph.calls[op.call].fqn for op in graph.ops)


def _traced(
    module: nn.Module, inputs: ExampleInputs, samples: int, batch: int, opaque: Mapping[str, str] | None = None
) -> OpGraph:
    """Return the graph of ``module``, called with ``batch`` samples like the ``samples`` in ``inputs``.

    Args:
        opaque: FQN of a module that is opaque in any case -> why.
    """

    def traced() -> OpGraph:
        return trace(module, with_batch(inputs, samples, batch))

    if opaque:
        return trace_with_opaque(module, inputs, samples, batch, traced, named=opaque)
    try:
        return traced()
    except ModelError as error:
        if batch != samples:
            with suppress(ModelError):
                return trace(module, with_batch(inputs, samples, batch, in_later_dims=True))
        return trace_with_opaque(module, inputs, samples, batch, traced, error=error)


def micro_batch_counts(batch: int, micro_batches: int | None = None) -> list[int]:
    """Return the numbers of micro-batches to try, in ascending order.

    If ``micro_batches`` is given, it is the only one. Otherwise these are the powers of two that divide ``batch``, and
    the numbers for which the micro-batch size is such a power.

    Raises:
        JobError: ``batch`` is not divisible by ``micro_batches``.
    """
    if micro_batches is None:
        powers = [1 << exponent for exponent in range(batch.bit_length()) if batch % (1 << exponent) == 0]
        return sorted({*powers, *(batch // power for power in powers)})
    if micro_batches < 1 or batch % micro_batches:
        raise JobError(
            f"a batch of {batch} is not divisible into {micro_batches} micro-batches.",
            what_to_do=f"Choose a number of micro-batches that divides {batch}.",
            field="micro_batches",
        )
    return [micro_batches]


def divisor_chains(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return ``counts`` (see `micro_batch_counts`), grouped into chains in which each count divides the next."""
    by_odd_part: dict[int, list[int]] = {}
    for count in counts:
        by_odd_part.setdefault(count // (count & -count), []).append(count)
    return [tuple(chain) for chain in by_odd_part.values()]


def check_traced_for(module: TracedModule, batch: int, counts: list[int], job: Job) -> None:
    """Check that ``module`` was traced for ``job``.

    Args:
        module: the traced model.
        batch: samples in the global batch.
        counts: numbers of micro-batches that are tried.
        job: the job.

    Raises:
        JobError: the graph was traced for another phase, dtype or micro-batch size, or without the job's fused ops or
            projections.
    """
    advice = "Trace the model for this job: trace_module(module, batch=..., micro_batches=..., dtype=..., phase=..., "
    advice += "fused_ops=..., fused_projections=...)."
    if module.phase != job.phase:
        detail = f"the graph of {module.name} was traced for {module.phase}, and the job is {job.phase}."
        raise JobError(detail, what_to_do=advice, field="phase")
    if module.dtype != job.dtype:
        detail = f"the graph of {module.name} was traced in {module.dtype}, and the job is in {job.dtype}."
        raise JobError(detail, what_to_do=advice, field="dtype")
    check_tokens(module.graph, module.name, job.seq)
    if module.fused_ops != job.fused_ops:
        module_has, job_has = ("with" if fused else "without" for fused in (module.fused_ops, job.fused_ops))
        detail = f"the graph of {module.name} was traced {module_has} fused ops, and the job is {job_has} them."
        raise JobError(detail, what_to_do=advice, field="fused_ops")
    if job.fused_projections and not module.fused_projections:
        detail = f"the graph of {module.name} was traced without fused projections, and the job has them."
        raise JobError(detail, what_to_do=advice, field="fused_projections")
    micro_batch = batch // counts[0]
    if not module.any_batch and (len(counts) > 1 or micro_batch != module.traced_batch):
        sizes = f"{micro_batch} samples" if len(counts) == 1 else "micro-batches of any size"
        detail = f"the graph of {module.name} was traced with {module.traced_batch} samples, and the job needs {sizes}."
        raise JobError(detail, what_to_do=advice, field="batch")
