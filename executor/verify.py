"""``verify``: does a plan run the collectives that it says, no more and no fewer? Without a GPU and without values."""

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

from executor.collective_counter import CollectiveCounter, Counts, Row, axes_by_group
from executor.redistribute import conjugate
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.run_context import PhaseClock
from executor.shard import shard_with_clock
from executor.torch_internals import fake_process_group, local_of, make_dtensor
from planner.errors import PlanError
from planner.model_rewrites.cache_argument import cache_argument
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.plan.estimate import ONCE_A_STEP
from planner.plan.sharding_plan import JobPhase, ShardingPlan

_RUN_AT_MOST = 2
"""Micro-batches that are run: from the second on they are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """A row of a report: ``count`` calls per step that agree in everything else; ``bytes`` is of one call."""

    phase: str
    kind: str
    axis: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Collectives of which the plan expects another number than ran."""

    phase: str
    kind: str
    axis: str
    bytes: int
    expected: int
    observed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a plan says that a step runs, what ran, and where the two differ."""

    expected: tuple[CollectiveCount, ...]
    observed: tuple[CollectiveCount, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
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
    """Return how the collectives of one step under ``plan`` compare with the plan's estimate.

    One step is every micro-batch's forward and backward and the reduction of gradients, on meta tensors; the optimizer
    is not run. In prefill it is the forward, in decoding the forward of one token behind as many as the job says, which
    ran through the model before, uncounted. ``module`` itself is neither changed nor read.

    Args:
        module: that the plan is for, plain, on any device.
        plan: with an estimate.
        example_inputs: a tuple of positional or a dict of keyword arguments; tensors have the shapes of one global
            micro-batch, and no more is read of them than shape and dtype.
        micro_batches: of a step; None is the plan's number.

    Raises:
        PlanError: the plan has no estimate, does not fit the module, or has a pipeline.
    """
    plan.check_runs()
    if plan.estimate is None:
        raise PlanError("The plan has no estimate to verify.", what_to_do="Price it first: shardplan estimate.")
    expected: Counts = Counter()
    for item in plan.estimate.collectives:
        expected[Row(phase=item.phase, kind=item.kind, axis=item.axis, bytes=item.bytes)] += item.count
    return compare(expected, observed_collectives(module, plan, example_inputs, micro_batches))


def compare(expected: Counts, observed: Counts) -> VerifyReport:
    """Return the report on two countings."""
    rows = sorted({row for row in (*expected, *observed) if expected[row] != observed[row]})
    return VerifyReport(
        expected=_listed(expected),
        observed=_listed(observed),
        differences=tuple(
            Difference(**dataclasses.asdict(row), expected=expected[row], observed=observed[row]) for row in rows
        ),
    )


def _listed(counts: Counts) -> tuple[CollectiveCount, ...]:
    return tuple(CollectiveCount(**dataclasses.asdict(row), count=counts[row]) for row in sorted(+counts))


def observed_collectives(
    module: nn.Module, plan: ShardingPlan, example_inputs: Any, micro_batches: int | None = None
) -> Counts:
    """Return the collectives of one step, run on rank 0 of fake processes; arguments as for ``verify``."""
    wanted = plan.micro_batches if micro_batches is None else micro_batches
    run = min(wanted, _RUN_AT_MOST)
    clock = PhaseClock()
    with ExitStack() as stack:
        stack.enter_context(_ranks(plan.mesh.size))
        device_mesh = device_mesh_for(plan, device_type="cpu")
        stack.enter_context(unpacked_sequences())
        shown = dataclasses.replace(plan, micro_batches=run)
        model = shard_with_clock(_meta_copy(module, plan.job.phase), device_mesh, shown, clock)
        batch = local_batch(_meta_inputs(example_inputs), device_mesh, plan)
        if plan.job.phase == "decode":
            batch = _behind_a_prompt(model, batch, plan.job.seq or 0)
        passes = [_run_once(model, batch, plan, device_mesh, clock) for _ in range(run)]
    total: Counts = Counter()
    for index, counts in enumerate(passes):
        # The second stands for all that follow it; some gathers run in the first alone, reductions after the last.
        times = wanted - 1 if index == 1 else 1
        for row, count in counts.items():
            total[row] += count if row.phase in ONCE_A_STEP else count * times
    return total


def _run_once(model: nn.Module, batch: Any, plan: ShardingPlan, device_mesh: DeviceMesh, clock: PhaseClock) -> Counts:
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    counter = CollectiveCounter(axes_by_group(device_mesh), lambda: clock.phase)
    with counter:
        if plan.job.training:
            loss = _loss(model(*args, **kwargs))
            loss.backward(_ones_like(loss))
        else:
            with torch.no_grad():
                model(*args, **kwargs)
    return counter.counts


def _behind_a_prompt(model: nn.Module, batch: Any, tokens: int) -> dict[str, Any]:
    """Return the arguments of a decoding step, with a cache of ``tokens`` of each sequence.

    Args:
        model: sharded, with a key-value cache as transformers has them.
        batch: by keyword; ``input_ids`` holds one token of each of this rank's sequences.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise PlanError("A decoding step needs input_ids, by keyword.", what_to_do='Give {"input_ids": ...}.')
    cache = cache_argument(model)
    if cache is None:
        raise PlanError(f"{type(model).__name__} takes no cache.", what_to_do="Verify the plan of its prefill.")
    given = {**batch, "use_cache": True}
    prompt = {**given, "input_ids": batch["input_ids"].expand(-1, tokens)}
    with torch.no_grad():
        return {**given, cache: getattr(model(**prompt), cache) if tokens else None}


def _ones_like(loss: torch.Tensor) -> torch.Tensor:
    if not isinstance(loss, DTensor):
        return torch.ones_like(loss)
    ones = torch.ones_like(local_of(loss))
    return make_dtensor(ones, loss.device_mesh, conjugate(tuple(loss.placements)), loss.shape, loss.stride())


def _loss(output: Any) -> torch.Tensor:
    """Return the loss among what a module returned, or its first result."""
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None:
        loss = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    assert isinstance(loss, torch.Tensor)
    return loss


@contextmanager
def _ranks(size: int) -> Iterator[None]:
    """Within it there is a process group of ``size`` ranks; one that is initialised already must have that size.

    Raises:
        PlanError: it has another.
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
    """Return a copy with parameters and buffers on meta, as it runs in ``phase``; ties stay tied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    found: nn.Module = copy.deepcopy(module, memo)
    return found if phase == "training" else found.eval()


def _meta_inputs(example_inputs: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), example_inputs
    )
