"""`verification_of`: the result of running a step of a plan on fake processes, at its real shapes, on meta tensors.

A model of many equal blocks is run with 3 and with 4 of them. The collectives of n blocks are those of 3 blocks, and
n - 3 times what the fourth adds. Where kinds of blocks differ, each kind is lengthened on its own.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlanError, RunError
from planner.graph.capture import ExampleInputs, quiet_export
from planner.graph.example_inputs import batch_size_of, with_batch, with_dtype
from planner.graph.trace_module import TORCH_DTYPES
from planner.plan.estimate import Verification
from planner.plan.sharding_plan import ShardingPlan
from planner.verification.block_runs import BlockRun, find_block_runs
from planner.verification.shortened import shortened_copy
from planner.writing.fqn_entries import fold_names

if TYPE_CHECKING:
    from executor.verify import VerifyReport

_SHORT = 3
"""Groups that are kept of a run of equal blocks: a first one, a last one, and one between them."""

_NOT_WITHOUT_MODULE = "the planner got a graph without its module; shardplan verify runs the plan where the module is"

_one_at_a_time = threading.Lock()
"""Held while a plan runs: a process has one default process group."""


def verification_of(module: nn.Module | None, plan: ShardingPlan, inputs: ExampleInputs) -> Verification:
    """Return the result of running one step of ``plan`` on fake processes; ``module`` is not changed.

    Args:
        module: the module that the plan is for, on any device; None: there is only its graph.
        plan: a plan with an estimate.
        inputs: arguments of one call with the global batch.

    Raises:
        RunError: the step fails, or its collectives differ from those of the plan.
    """
    reason = _obstacle(plan) or (_NOT_WITHOUT_MODULE if module is None else None)
    if reason is not None:
        return Verification(outcome="not-run", reason=reason)
    assert module is not None
    arguments = micro_batch_arguments(plan, inputs)
    with _one_at_a_time:
        if (reason := _process_group_in_use(plan.mesh.size)) is not None:
            return Verification(outcome="not-run", reason=reason)
        with _undisturbed():
            return _run(module, plan, arguments)


def verified(
    module: nn.Module | None,
    plan: ShardingPlan,
    inputs: ExampleInputs,
    with_local_modules: Callable[[ShardingPlan, Mapping[str, str]], ShardingPlan],
) -> ShardingPlan:
    """Return ``plan`` with its local modules and its verification; without local modules if it does not run with them.

    Args:
        module: as for `verification_of`.
        plan: a plan with an estimate, without local modules.
        inputs: as for `verification_of`.
        with_local_modules: returns a plan with given local modules.

    Raises:
        RunError: as `verification_of`.
    """
    local = local_modules_of(module, plan, inputs)
    if local:
        changed = with_local_modules(plan, local)
        with suppress(PlanError):
            return dataclasses.replace(changed, verification=verification_of(module, changed, inputs))
    return dataclasses.replace(plan, verification=verification_of(module, plan, inputs))


def local_modules_of(module: nn.Module | None, plan: ShardingPlan, inputs: ExampleInputs) -> dict[str, str]:
    """Return FQN pattern -> how a module runs on local tensors (`executor.find_local_modules`); ``{}`` where none can.

    Args:
        module: as for `verification_of`.
        plan: a plan without local modules.
        inputs: as for `verification_of`.
    """
    if module is None or _obstacle(plan) is not None:
        return {}
    from executor.find_local_modules import find_local_modules

    arguments = micro_batch_arguments(plan, inputs)
    runs = find_block_runs(module, plan)
    short = shortened_copy(module, dict.fromkeys(runs, _SHORT)) if runs else module
    unnamed = _for_shorter(plan) if runs else plan
    with _one_at_a_time:
        if _process_group_in_use(plan.mesh.size) is not None:
            return {}
        with _undisturbed():
            try:
                texts = find_local_modules(short, unnamed, arguments)
            except PlanError:
                # Whether the plan runs is a question for verification.
                return {}
    for run in runs:
        texts |= dict(_in_all_groups(module, run, texts))
    return fold_names(texts, [fqn for fqn, _ in module.named_modules()])


def _in_all_groups(module: nn.Module, run: BlockRun, texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the local modules of the blocks that a shorter module does not have, as those of its last group."""
    names = [f"{run.fqn}.{name}" if run.fqn else name for name in module.get_submodule(run.fqn)._modules]
    for group in range(_SHORT, run.groups):
        for offset in range(run.period):
            known = names[run.first + (_SHORT - 1) * run.period + offset]
            for fqn, text in texts.items():
                if fqn == known or fqn.startswith(f"{known}."):
                    yield names[run.first + group * run.period + offset] + fqn.removeprefix(known), text


def micro_batch_arguments(plan: ShardingPlan, inputs: ExampleInputs) -> Any:
    """Return the arguments of a call with one micro-batch of ``plan``, in its dtype: a tuple, or a dict by keyword.

    Args:
        plan: a plan.
        inputs: arguments of one call, with the plan's global batch or another.
    """
    batch = batch_size_of(inputs)
    micro_batch = (plan.job.batch or batch) // plan.micro_batches
    resized = with_batch(with_dtype(inputs, TORCH_DTYPES[plan.job.dtype]), batch, micro_batch)
    return resized.args or dict(resized.kwargs)


def _obstacle(plan: ShardingPlan) -> str | None:
    """Return why the executor does not run ``plan``; None where it does."""
    if plan.pipeline is not None:
        return "pipelines are planned, not run yet"
    if plan.job.async_tp:
        return "async tensor parallelism is planned, not run yet"
    if plan.solver is not None and plan.solver.status == "given":
        return "a random plan is not verified"
    return None


def _process_group_in_use(size: int) -> str | None:
    """Return why there can be no fake process group of ``size`` ranks; None where there can."""
    if not dist.is_available():
        return "this torch has no torch.distributed"
    if dist.is_initialized() and (dist.get_backend() != "fake" or dist.get_world_size() != size):
        return f"a process group ({dist.get_backend()}) is initialised in this process; shardplan verify runs the plan"
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Return a context that leaves random state as it was, shows no warnings or errors, and lets autograd record."""
    with (
        quiet_export(),  # of what is tried, some fails
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


def _run(module: nn.Module, plan: ShardingPlan, arguments: Any) -> Verification:
    report = _report(module, plan, arguments)
    if not report.equal:
        raise _difference_error(report)
    return Verification(outcome="as-planned", kinds=len(report.expected))


def _difference_error(report: VerifyReport) -> RunError:
    first = report.differences[0]
    return RunError(
        f"the collectives that ran differ from the plan's in {len(report.differences)} kinds; the first is "
        f"{first.kind} of {first.bytes} bytes on {first.axis} in {first.phase}: "
        f"{first.expected} in the plan, {first.observed} ran.",
        what_to_do="Plan again, or plan for another mesh. If shardplan wrote the plan, please report this.",
    )


def _report(module: nn.Module, plan: ShardingPlan, arguments: Any) -> VerifyReport:
    """Return the comparison of the collectives that ran with those of ``plan``.

    A difference or a failure of a shorter module counts only if the whole module has one, or if the plan has local
    modules, without which it runs as well.

    Raises:
        PlanError: the step fails.
    """
    from executor.verify import compare, expected_collectives, observed_collectives

    expected = expected_collectives(plan)
    try:
        observed = _extrapolated(module, plan, arguments)
    except PlanError:
        if plan.local_modules:
            raise
        observed = None
    if observed is not None:
        report = compare(expected, observed)
        if report.equal or plan.local_modules:
            return report
    # A shorter module may differ for reasons of its own.
    return compare(expected, observed_collectives(module, plan, arguments))


def _extrapolated(module: nn.Module, plan: ShardingPlan, arguments: Any) -> Counter[Any] | None:
    """Return the collectives of one step, from runs of shorter modules; None where the module cannot be shortened.

    What one more group of a run of blocks adds is added for each group that was left out; runs of as many groups have
    one more at the same time.

    Raises:
        PlanError: a step fails.
    """
    from executor.verify import observed_collectives

    runs = find_block_runs(module, plan)
    if not runs:
        return None
    unnamed = _for_shorter(plan)

    def observed(longer: int | None = None) -> Counter[Any]:
        groups = {run: _SHORT + (run.groups == longer) for run in runs}
        return observed_collectives(shortened_copy(module, groups), unnamed, arguments)

    short = observed()
    total = short.copy()
    for groups in {run.groups for run in runs}:
        longer = observed(groups)
        for key in {*short, *longer}:
            total[key] += (groups - _SHORT) * (longer[key] - short[key])
    return total


def _for_shorter(plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` without the hash of the module's structure, which is that of the whole module."""
    fingerprint = {name: value for name, value in plan.fingerprint.items() if name != "model"}
    return dataclasses.replace(plan, fingerprint=fingerprint)
