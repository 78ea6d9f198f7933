"""Predicted peak memory of plans against torch's MemTracker, by model, plan and checkpointing.

    python benchmarks/memory.py                  # 12 models x {none, selective, full} x {DP, FSDP, NO-RESHARD, TP}
    python benchmarks/memory.py --model llama --ac full --plan FSDP --roles
    python benchmarks/memory.py --micro-batches 2 --reduce-dtype bf16 --dtype bf16
    python benchmarks/memory.py --fused-ops

A baseline planner plans every model on 4 devices ("toy": no flash attention, no reserve). One training step of the
sharded module runs as rank 0 of 4 fake processes, on small real tensors on the CPU: their values are wrong, since no
other rank communicates, but their sizes are right. (Under FakeTensorMode DTensor's strided shards fail, and on meta
`fully_shard` never frees all-gathered parameters.)

The second step is measured, as in steady training: the optimizer's state exists, and the gradients of the step before
are freed (`zero_grad(set_to_none=True)`). It ends with the backward, since a fused optimizer, as on GPUs, allocates no
tensors. The loop holds this rank's part of the batch, as a data loader yields it (`local_batch` returns views, which
hold the whole batch), and of the outputs the loss only; a loop that also holds the logits needs their bytes in
addition. Plan and step use torch's MATH backend of attention.

MemTracker counts bytes of live tensors at the end of each op: no allocator, no workspace inside an op. Its module hooks
keep the gradients of a module's inputs alive until all of these exist (in T5, across blocks). No user's step does so;
with `StepTracker` the hooks fire at the first gradient.

Exit code 1 where an error is above the target.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch
from memory_models import BATCH, CASES, Case, inputs_of
from rich.console import Console
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker

from cost_model.kernels.optimizer_memory import RESERVE_ROLES
from executor import shard_module
from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.torch_internals.dtensor import fake_process_group
from planner import PlanningSession, ShardingPlan
from planner.errors import PlannerError
from planner.model_rewrites.eager_masks import unpacked_sequences
from planner.writing.reprice import estimate_plan

TARGET = 0.03
RANKS = 4
PLANS = {
    "DP": ("data-parallel", "dp=4"),
    "FSDP": ("fully-sharded", "dp=4"),
    "NO-RESHARD": ("fully-sharded", "dp=4"),
    "TP": ("tensor-parallel", "tp=4"),
}
"""NO-RESHARD is FSDP without resharding after forward: until backward, or for the step with several micro-batches."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The peak of one combination, measured and predicted, in bytes by role."""

    measured: Mapping[str, int]
    predicted: Mapping[str, int]

    @property
    def measured_bytes(self) -> int:
        """The measured peak."""
        return sum(self.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """The predicted peak, without the reserve for context, NCCL and the allocator."""
        return sum(self.predicted.values())

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_bytes / self.measured_bytes - 1


class StepTracker(MemTracker):
    """MemTracker that keeps no gradients alive, and accepts modules whose parameters are casts or frozen.

    torch's MemTracker keeps the gradients of a module's inputs alive until all of them exist. It also hooks parameters,
    which fails for casts, since they are no leaves.
    """

    def __enter__(self) -> Self:
        any_gradient = functools.partial(register_multi_grad_hook, mode="any")
        self._patched = patch.object(mod_tracker, "register_multi_grad_hook", any_gradient)
        self._patched.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._patched.stop()

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        hookable = all(parameter.is_leaf and parameter.requires_grad for parameter in module.parameters())
        return super()._track_module_params_and_buffers(module, install_grad_hooks and hookable)


def planned(
    case: Case,
    plan_name: str,
    ac: str,
    dtype: str,
    micro_batches: int = 1,
    reduce_dtype: str = "fp32",
    fused_ops: bool = False,
) -> tuple[nn.Module, ShardingPlan]:
    """Return the model of ``case``, and its plan by the entry ``plan_name`` of ``PLANS``."""
    planner, mesh = PLANS[plan_name]
    module = case.make().train()
    session = PlanningSession(
        module,
        cluster=f"1x{RANKS}xtoy",
        example_inputs=inputs_of(case),
        micro_batches=micro_batches,
        ac=ac,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        memory_gb=100,
        tp_plan=case.tp_plan,
        fused_ops=fused_ops,
    )
    plan = session.plan(planner=planner, mesh=mesh)
    if plan_name == "NO-RESHARD":
        field = "keep_gathered" if micro_batches == 1 else "keep_gathered_for_step"
        unsharded = dataclasses.replace(plan, **{field: tuple(plan.fully_shard)})
        plan = estimate_plan(module, unsharded, example_inputs=inputs_of(case))
    return module, plan


def measure(module: nn.Module, plan: ShardingPlan, inputs: Mapping[str, Any], tracker: MemTracker) -> dict[str, int]:
    """Return the bytes at the peak of a step in steady training, by MemTracker's roles; ``module`` is changed."""
    with fake_process_group(plan.mesh.size), unpacked_sequences():
        mesh = device_mesh_for(plan, device_type="cpu")
        model = shard_module(module, mesh, plan, src_data_rank=None)
        batches = [
            {name: _apart(leaf) for name, leaf in local_batch(micro_batch, mesh, plan).items()}
            for micro_batch in _micro_batches(inputs, plan.micro_batches)
        ]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for batch in batches:
            _pass(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        inputs_held = (leaf for batch in batches for leaf in batch.values() if isinstance(leaf, torch.Tensor))
        tracker.track_external(model, optimizer, *inputs_held)
        with tracker:
            for batch in batches:
                _pass(model, batch)
                tracker.reset_mod_stats()  # it rejects a module's second forward; peaks remain
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(role, "value", role)): n for role, n in snapshot.items() if role != "Total"}


def _micro_batches(inputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the arguments of each of ``count`` calls."""
    size = BATCH // count
    return [
        {
            name: leaf[size * i : size * (i + 1)] if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in inputs.items()
        }
        for i in range(count)
    ]


def _apart(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _pass(model: nn.Module, batch: Mapping[str, Any]) -> None:
    # As in most training loops, only the loss is held, not the logits.
    loss = model(**batch).loss
    loss.backward(torch.ones_like(loss))


def outcome(
    case: Case,
    plan_name: str,
    ac: str,
    dtype: str,
    tracker: MemTracker | None = None,
    *,
    micro_batches: int = 1,
    reduce_dtype: str = "fp32",
    fused_ops: bool = False,
) -> Outcome:
    """Return the peak of one combination, measured and predicted."""
    module, plan = planned(case, plan_name, ac, dtype, micro_batches, reduce_dtype, fused_ops)
    assert plan.estimate is not None
    predicted = {role: nbytes for role, nbytes in plan.estimate.memory.items() if role not in RESERVE_ROLES}
    measured = measure(module, plan, inputs_of(case), tracker or StepTracker())
    return Outcome(measured=measured, predicted=predicted)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(CASES), help="again for more; all where left out")
    parser.add_argument("--plan", action="append", choices=tuple(PLANS), help="likewise")
    parser.add_argument("--ac", action="append", choices=MODES, help="likewise")
    parser.add_argument(
        "--dtype", default="fp32", choices=("fp32", "bf16"), help="of compute; parameters are stored in fp32"
    )
    parser.add_argument("--micro-batches", type=int, default=1, choices=(1, 2), help="of a step")
    parser.add_argument(
        "--reduce-dtype", default="fp32", choices=("fp32", "bf16"), help="that gradients are reduced in"
    )
    parser.add_argument("--fused-ops", action="store_true", help="with fused ops, as they run on a CPU: step by step")
    parser.add_argument("--roles", action="store_true", help="show the peaks by role as well")
    return parser.parse_args(argv)


def _roles(roles: Mapping[str, int]) -> str:
    return ", ".join(f"{role} {nbytes / 1e6:.3f}" for role, nbytes in roles.items() if nbytes)


def main() -> int:
    """Print a line for every combination; return 1 where an error is above the target or a combination did not run."""
    arguments = parse_arguments()
    warnings.simplefilter("ignore")
    console = Console(highlight=False, width=120)
    errors: list[float] = []
    failed = 0
    for model in arguments.model or CASES:
        for plan in arguments.plan or PLANS:
            for ac in arguments.ac or MODES:
                title = f"{model:11} {plan:10} {ac:10}"
                try:
                    result = outcome(
                        CASES[model],
                        plan,
                        ac,
                        arguments.dtype,
                        micro_batches=arguments.micro_batches,
                        reduce_dtype=arguments.reduce_dtype,
                        fused_ops=arguments.fused_ops,
                    )
                except (PlannerError, RuntimeError) as error:
                    failed += 1
                    console.print(f"{title} did not run: {str(error).splitlines()[0]}")
                    continue
                errors.append(result.error)
                mark = "" if abs(result.error) <= TARGET else "  above the target"
                sizes = (
                    f"measured {result.measured_bytes / 1e6:8.3f} MB  predicted {result.predicted_bytes / 1e6:8.3f} MB"
                )
                console.print(f"{title} {sizes}  {result.error:+7.2%}{mark}")
                if arguments.roles:
                    console.print(
                        f"    measured: {_roles(result.measured)}",
                        f"    predicted: {_roles(result.predicted)}",
                        sep="\n",
                    )
    within = sum(abs(error) <= TARGET for error in errors)
    mean = sum(map(abs, errors)) / max(len(errors), 1)
    worst = max(map(abs, errors), default=0.0)
    console.print(
        f"{within} of {len(errors)} within {TARGET:.0%}; mean {mean:.2%}, worst {worst:.2%}; {failed} did not run"
    )
    return 0 if within == len(errors) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
