"""A module as planning knows it, however it came: traced here, or read from a document that was traced elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from planner.errors import JobError
from planner.graph.capture import ExampleInputs, quiet_export, to_meta
from planner.graph.example_inputs import (
    GivenInputs,
    batch_size_of,
    has_kv_cache,
    inputs_from_config,
    meta_inputs,
    with_batch,
    with_dtype,
)
from planner.graph.from_fx import trace
from planner.graph.op_graph import OpGraph
from planner.model_rewrites.fuse_ops import TRACED_OPS, fuse_ops
from planner.model_rewrites.fuse_projections import carried_tp_plan
from planner.plan.fingerprint import model_fingerprint
from planner.plan.former_names import accepts_former_names
from planner.plan.job import Job
from planner.plan.job_spec import JobPhase

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

TRACE_BATCH = 99_991
"""The batch at which a model is traced when the micro-batch is still open: a prime that divides no other size."""

BASE_BATCH = 12
"""The batch at which strategies are looked up then: even under axes of 2, 3 and 4 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """The FQNs of a module, in its own order; of what is shared, every one.

    Attributes:
        parameters: of all parameters, used or not.
        modules: of all submodules, the root's "" first.
    """

    parameters: tuple[str, ...]
    modules: tuple[str, ...]

    @classmethod
    def from_module(cls, module: nn.Module) -> ModuleNames:
        """Return the names in ``module``."""
        return cls(
            parameters=tuple(name for name, _ in module.named_parameters(remove_duplicate=False)),
            modules=tuple(name for name, _ in module.named_modules(remove_duplicate=False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModule:
    """A module's graph, and what planning needs to know of the module besides.

    Attributes:
        name: of its class.
        fingerprint: its structural hash.
        tp_plan: FQN pattern of modules -> style, where the module carries an expert's plan.
        graph: of one call.
        dtype: of parameters and activations: "bf16", "fp16" or "fp32".
        samples: first dim of the example inputs.
        traced_batch: first dim that the graph has.
        any_batch: whether the graph stands for any batch (`at_batch`), or for ``traced_batch`` alone.
        phase: what it was traced for: outside training nothing needs a gradient.
        has_kv_cache: whether it has a key-value cache of its own tokens.
        fused_ops: whether fused ops are in the place of the module's own code, where they do the same.
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
) -> TracedModule:
    """Return ``module`` as planning knows it; it stays as it is, and may be on the meta device.

    Args:
        module: any module.
        example_inputs: arguments of one call with the global batch (tuple or dict); None: made from a Hugging Face
            config.
        batch: samples per step in all; None takes the example inputs'.
        seq: tokens per sample, for models that read tokens.
        micro_batches: per step; None keeps it open, and the graph good for any batch where the batch is even.
        dtype: of parameters and activations.
        phase: of the jobs that it is traced for. Only training is cut into micro-batches; the graphs of the others are
            good for any batch.
        fused_ops: of the jobs that it is traced for, as in `planner.plan.job.Job`.

    Raises:
        PlannerError: it cannot be traced, or no inputs can be made for it.
    """
    inputs = resolve_inputs(module, example_inputs, batch=batch, seq=seq, phase=phase)
    samples = batch_size_of(inputs)
    counts = micro_batch_counts(batch or samples, micro_batches)
    alone = phase == "training" and len(counts) == 1
    return trace_at_batch(
        module, inputs, (batch or samples) // counts[0] if alone else None, dtype, phase, fused_ops=fused_ops
    )


def resolve_inputs(
    module: nn.Module | TracedModule, given: GivenInputs, *, batch: int | None, seq: int | None, phase: JobPhase
) -> ExampleInputs:
    """Return the given arguments of one call, or those that the module's config tells; none where it is traced already.

    Raises:
        PlannerError: none can be made, none may be given, or the module cannot decode.
    """
    if isinstance(module, TracedModule):
        if given is not None:
            advice = "Give them to trace_module, or the module itself here."
            raise JobError("a model that is traced already takes no example inputs.", what_to_do=advice)
        return ExampleInputs(args=(), kwargs={})
    if given is None:
        return inputs_from_config(module, batch=batch, seq=seq, phase=phase)
    if phase == "decode":
        advice = "Leave example_inputs out: those of a decoding step are made from a Hugging Face config."
        raise JobError("decoding is not planned from example inputs.", what_to_do=advice, field="phase")
    return meta_inputs(given)


def trace_at_batch(
    module: nn.Module,
    inputs: ExampleInputs,
    micro_batch: int | None,
    dtype: str,
    phase: JobPhase = "training",
    *,
    fused_ops: bool = False,
) -> TracedModule:
    """Return ``module`` traced at ``micro_batch`` alone, or at any batch where that is None.

    Raises:
        ModelError: it cannot be traced.
    """
    copy = to_meta(module, TORCH_DTYPES[dtype], trained=phase == "training")
    if fused_ops:
        fuse_ops(copy, TRACED_OPS)
    samples = batch_size_of(inputs)
    batch = TRACE_BATCH if micro_batch is None else micro_batch
    with quiet_export():
        graph = trace(copy, with_batch(with_dtype(inputs, TORCH_DTYPES[dtype]), samples, batch))
    if phase != "training":
        graph = _with_results(graph)
    return TracedModule(
        name=type(module).__name__,
        names=ModuleNames.from_module(module),
        fingerprint=model_fingerprint(module),
        tp_plan=carried_tp_plan(module),
        graph=graph,
        dtype=dtype,
        samples=samples,
        traced_batch=batch,
        any_batch=micro_batch is None,
        phase=phase,
        has_kv_cache=has_kv_cache(module),
        fused_ops=fused_ops,
    )


def _with_results(graph: OpGraph) -> OpGraph:
    """Return ``graph`` with what it computes marked as what the forward is run for."""
    outputs = tuple(
        dataclasses.replace(output, is_result=graph.values[output.value].kind == "activation")
        for output in graph.outputs
    )
    return dataclasses.replace(graph, outputs=outputs)


def micro_batch_counts(batch: int, micro_batches: int | None = None) -> list[int]:
    """Return the numbers of micro-batches to try, the fewest first: the given one, or all powers of two that divide
    ``batch``, and all that leave a power of two of samples in each.

    Raises:
        JobError: ``batch`` does not divide into ``micro_batches``.
    """
    if micro_batches is None:
        powers = [1 << exponent for exponent in range(batch.bit_length()) if batch % (1 << exponent) == 0]
        return sorted({*powers, *(batch // power for power in powers)})
    if micro_batches < 1 or batch % micro_batches:
        raise JobError(
            f"a batch of {batch} does not divide into {micro_batches} micro-batches.",
            what_to_do=f"Choose a number of micro-batches that divides {batch}.",
            field="micro_batches",
        )
    return [micro_batches]


def divisor_chains(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return numbers of micro-batches, as `micro_batch_counts` has them, in rows in which each divides the next."""
    rows: dict[int, list[int]] = {}
    for count in counts:
        rows.setdefault(count // (count & -count), []).append(count)
    return [tuple(row) for row in rows.values()]


def check_traced_for(module: TracedModule, batch: int, counts: list[int], job: Job) -> None:
    """Refuse a job that ``module`` was not traced for.

    Args:
        batch: samples per step in all.
        counts: numbers of micro-batches that are tried.
        job: says the rest.

    Raises:
        JobError: it was traced in another dtype, for another phase, with other ops, or at the batch of another job.
    """
    advice = "Trace the model for this job: trace_module(module, batch=..., micro_batches=..., dtype=..., phase=..., "
    advice += "fused_ops=...)."
    if module.phase != job.phase:
        detail = f"the graph of {module.name} was traced for {module.phase}, and the job is {job.phase}."
        raise JobError(detail, what_to_do=advice, field="phase")
    if module.dtype != job.dtype:
        detail = f"the graph of {module.name} was traced in {module.dtype}, and the job is in {job.dtype}."
        raise JobError(detail, what_to_do=advice, field="dtype")
    if module.fused_ops != job.fused_ops:
        has, wants = ("with" if fused else "without" for fused in (module.fused_ops, job.fused_ops))
        detail = f"the graph of {module.name} was traced {has} fused ops, and the job is {wants} them."
        raise JobError(detail, what_to_do=advice, field="fused_ops")
    wanted = batch // counts[0]
    if not module.any_batch and (len(counts) > 1 or wanted != module.traced_batch):
        sizes = f"{wanted} samples" if len(counts) == 1 else "micro-batches of any size"
        detail = f"the graph of {module.name} was traced with {module.traced_batch} samples, and the job needs {sizes}."
        raise JobError(detail, what_to_do=advice, field="batch")
