"""``verify``: the collectives that one step of a plan runs, compared with the plan's estimate, on meta tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from executor.call_trace import CallTrace
from executor.collective_counter import CollectiveCounter, CollectiveKey, Counts, axes_by_group
from executor.redistribute import conjugate
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.run_context import PhaseTracker
from executor.shard import shard_on_meta
from executor.torch_internals.dtensor import fake_process_group, local_of, make_dtensor
from planner.errors import PlanError
from planner.model_rewrites.cache_argument import cache_argument
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.plan.estimate import ONCE_A_STEP
from planner.plan.sharding_plan import JobPhase, ShardingPlan

_MAX_MICRO_BATCHES = 2
"""Most micro-batches that ``verify`` runs: the third and later ones have the same collectives as the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Number of collectives per step with one phase, kind, mesh axis and ``bytes``, the full buffer of one call."""

    phase: str
    kind: str
    axis: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Collectives of one phase, kind, axis and size, whose number per step differs between the plan and the run."""

    phase: str
    kind: str
    axis: str
    bytes: int
    expected: int
    observed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The collectives of a step that the plan expects, the collectives that ran, and the differences."""

    expected: tuple[CollectiveCount, ...]
    observed: tuple[CollectiveCount, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        lists = {
            name: [dataclasses.asdict(row) for row in getattr(self, name)]
            for name in ("expected", "observed", "differences")
        }
        return {"equal": self.equal, **lists}


def verify(
    module: nn.Module, plan: ShardingPlan, example_inputs: Any, micro_batches: int | None = None
) -> VerifyReport:
    """Return a report that compares the collectives of one step under ``plan`` with the plan's estimate.

    A copy of ``module`` runs on meta tensors; ``module`` is not changed. A training step is the forward and backward of
    every micro-batch and the gradient reduction, without the optimizer. A prefill step is one forward. A decoding step
    is the forward of one token, with a key-value cache of as many tokens as the job says. The forward that fills the
    cache is not counted.

    Args:
        module: the plain module that the plan is for, on any device.
        plan: a plan with an estimate.
        example_inputs: a tuple of positional or a dict of keyword arguments; tensors have the shapes of one global
            micro-batch, and only their shapes and dtypes are read.
        micro_batches: number of micro-batches in a step; None: the plan's number.

    Raises:
        PlanError: the plan has no estimate, does not fit the module, has a pipeline, or assumes async tensor
            parallelism. `RunError`: the step fails.
    """
    plan.check_runs()
    return compare(expected_collectives(plan), observed_collectives(module, plan, example_inputs, micro_batches))


def expected_collectives(plan: ShardingPlan) -> Counts:
    """Return the collectives of one step in the plan's estimate.

    Raises:
        PlanError: the plan has no estimate.
    """
    if plan.estimate is None:
        raise PlanError("The plan has no estimate to verify.", what_to_do="Price it first: shardplan estimate.")
    expected: Counts = Counter()
    for item in plan.estimate.collectives:
        expected[CollectiveKey(phase=item.phase, kind=item.kind, axis=item.axis, bytes=item.bytes)] += item.count
    return expected


def compare(expected: Counts, observed: Counts) -> VerifyReport:
    """Return the report on the ``expected`` and ``observed`` numbers of collectives per step."""
    keys = sorted({key for key in (*expected, *observed) if expected[key] != observed[key]})
    return VerifyReport(
        expected=_sorted_counts(expected),
        observed=_sorted_counts(observed),
        differences=tuple(
            Difference(**dataclasses.asdict(key), expected=expected[key], observed=observed[key]) for key in keys
        ),
    )


def _sorted_counts(counts: Counts) -> tuple[CollectiveCount, ...]:
    return tuple(CollectiveCount(**dataclasses.asdict(key), count=counts[key]) for key in sorted(+counts))


def observed_collectives(
    module: nn.Module,
    plan: ShardingPlan,
    example_inputs: Any,
    micro_batches: int | None = None,
) -> Counts:
    """Return the collectives that rank 0 of a fake process group runs in one step.

    Args:
        module: as for ``verify``.
        plan: as for ``verify``.
        example_inputs: as for ``verify``.
        micro_batches: as for ``verify``.

    Raises:
        RunError: the step fails; the message names the module, the op and its shapes.
    """
    in_step = plan.micro_batches if micro_batches is None else micro_batches
    run = min(in_step, _MAX_MICRO_BATCHES)
    with ExitStack() as stack:
        stack.enter_context(fake_processes(plan.mesh.size))
        device_mesh = device_mesh_for(plan, device_type="cpu")
        stack.enter_context(unpacked_sequences())
        step = _Step(device_mesh, plan)
        model = step.sharded(module, dataclasses.replace(plan, micro_batches=run))
        batch = local_batch(_meta_inputs(example_inputs), device_mesh, plan)
        if plan.job.phase == "decode":
            batch = step.decoding_batch(model, batch)
        passes = [step.run_micro_batch(model, batch) for _ in range(run)]
    total: Counts = Counter()
    for index, counts in enumerate(passes):
        # The second pass stands for all later ones, except in phases that run once a step.
        times = in_step - 1 if index == 1 else 1
        for key, count in counts.items():
            total[key] += count if key.phase in ONCE_A_STEP else count * times
    return total


class _Step:
    """Runs one step of a plan on meta tensors, and counts its collectives."""

    def __init__(self, device_mesh: DeviceMesh, plan: ShardingPlan) -> None:
        self._device_mesh, self._plan = device_mesh, plan
        self._phases = PhaseTracker()
        self._counter = self._new_counter()
        self._trace = CallTrace(lambda: self._counter.last_op)

    def _new_counter(self) -> CollectiveCounter:
        return CollectiveCounter(axes_by_group(self._device_mesh), lambda: self._phases.phase)

    def sharded(self, module: nn.Module, plan: ShardingPlan) -> nn.Module:
        """Return a copy of ``module`` on meta, sharded as ``plan`` says."""
        with self._trace.reported("sharding the module"):
            model = shard_on_meta(_meta_copy(module, plan.job.phase), self._device_mesh, plan, self._phases)
            self._trace.attach(model)
        return model

    def decoding_batch(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the arguments of a decoding step, from those of one token."""
        self._counter = self._new_counter()
        with self._trace.reported("filling the cache"), self._counter:
            return _decoding_batch(model, batch, self._plan.job.seq or 0)

    def run_micro_batch(self, model: nn.Module, batch: Any) -> Counts:
        """Return the collectives of one micro-batch."""
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        self._counter = self._new_counter()
        with self._counter:
            with self._trace.reported("the forward"), torch.set_grad_enabled(self._plan.job.training):
                output = model(*args, **kwargs)
            if self._plan.job.training:
                with self._trace.reported("the backward"):
                    differentiated = _differentiated(output)
                    torch.autograd.backward(differentiated, list(map(_ones_like, differentiated)))
        return self._counter.counts


def _decoding_batch(model: nn.Module, batch: Any, tokens: int) -> dict[str, Any]:
    """Return the keyword arguments of a decoding step, including a cache of ``tokens`` tokens of each sequence.

    Args:
        model: a sharded model that takes a key-value cache as transformers' models do.
        batch: keyword arguments; ``input_ids`` holds one token of each of this rank's sequences.
        tokens: number of tokens in the cache; with 0 the cache argument is None.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise PlanError("A decoding step needs input_ids, by keyword.", what_to_do='Give {"input_ids": ...}.')
    cache = cache_argument(model)
    if cache is None:
        raise PlanError(f"{type(model).__name__} takes no cache.", what_to_do="Verify the plan of its prefill.")
    arguments = {**batch, "use_cache": True}
    prompt = {**arguments, "input_ids": batch["input_ids"].expand(-1, tokens)}
    with torch.no_grad():
        return {**arguments, cache: getattr(model(**prompt), cache) if tokens else None}


def _ones_like(loss: torch.Tensor) -> torch.Tensor:
    if not isinstance(loss, DTensor):
        return torch.ones_like(loss)
    ones = torch.ones_like(local_of(loss))
    return make_dtensor(ones, loss.device_mesh, conjugate(tuple(loss.placements)), loss.shape, loss.stride())


def _differentiated(output: Any) -> list[torch.Tensor]:
    """Return what a step differentiates: the loss in a module's output, else all its numbers, else all its tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    results = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    results = list({id(result): result for result in results}.values())
    return [result for result in results if result.dim() == 0] or results


@contextmanager
def fake_processes(size: int) -> Iterator[None]:
    """Return a context with a fake process group of ``size`` ranks: the current group, or a new one if there is none.

    Raises:
        PlanError: the current process group has another size, or is not fake.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(fake_process_group(size))
        elif dist.get_world_size() != size or dist.get_backend() != "fake":
            raise PlanError(
                f"verify needs {size} fake processes, but a process group of {dist.get_world_size()} "
                f"({dist.get_backend()}) is initialised.",
                what_to_do="Call it before init_process_group, or in another process.",
            )
        yield


def _meta_copy(module: nn.Module, phase: JobPhase) -> nn.Module:
    """Return a copy of ``module`` on meta, in eval mode unless ``phase`` is training; tied parameters stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    copied: nn.Module = copy.deepcopy(module, memo)
    return copied if phase == "training" else copied.eval()


def _meta_inputs(example_inputs: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), example_inputs
    )
