"""``verify``: the collectives that one step of a plan runs, compared with the plan's estimate, on meta tensors."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from executor.collective_counter import CollectiveKey, Counts
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.step_on_meta import StepOnMeta, fake_processes, meta_inputs
from planner.errors import PlanError
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.model_rewrites.image_sizes.positions import with_position_ids
from planner.model_rewrites.tree_paths import tensors_in
from planner.plan.estimate import ONCE_A_STEP
from planner.plan.sharding_plan import ShardingPlan

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

    def __str__(self) -> str:
        """Return what ``shardplan verify`` prints."""
        return str(importlib.import_module("api.render.plan").verification_text(self.to_dict()))

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
            parallelism; or the inputs have the samples of a whole step. `RunError`: the step fails.
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
    _check_samples(plan.job.batch, in_step, example_inputs)
    with ExitStack() as stack:
        stack.enter_context(fake_processes(plan.mesh.size))
        device_mesh = device_mesh_for(plan, device_type="cpu")
        stack.enter_context(unpacked_sequences())
        step = StepOnMeta(device_mesh, plan)
        model = step.sharded(module, dataclasses.replace(plan, micro_batches=run))
        inputs = meta_inputs(example_inputs)
        if isinstance(inputs, Mapping):
            inputs = with_position_ids(module, (), inputs)
        batch = local_batch(inputs, device_mesh, plan)
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


def _check_samples(batch: int | None, micro_batches: int, example_inputs: Any) -> None:
    tensors = tensors_in(example_inputs)
    lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    samples = (batch or 0) // micro_batches
    if micro_batches > 1 and batch in lengths and samples not in lengths:
        raise PlanError(
            f"The example inputs have {batch} samples, which are those of a step; a micro-batch has {samples}.",
            what_to_do=f"Give inputs of {samples} samples.",
        )
