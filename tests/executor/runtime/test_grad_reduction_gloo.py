"""Gradients accumulate over micro-batches and are reduced in the job's dtype, on four real processes.

The unsharded model's gradient is a sum over ranks and micro-batches. In bf16, whose unit roundoff u is 2**-8, each
rounding adds an error of at most u times the magnitude of the partial sum. There is one rounding for each micro-batch,
and one for each further rank, in any order. So the error is at most (micro-batches + ranks - 1) u times the sum of the
magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.executor_cases import (
    BATCH,
    LLAMA_BLOCKS,
    Case,
    data_parallel,
    fully_sharded,
    loss_of,
    make_batch,
    make_model,
    replicated_on_tp,
    reshard_after_step,
    with_fsdp_groups,
)
from support.gloo import run_on_gloo
from torch import nn

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.runtime.unreduced_gradient import UnreducedGradient
from executor.shard import shard_module
from planner.plan.job import Job

RANKS = 4
UNIT_ROUNDOFF = 2.0**-8
WIRE = Job(dtype="fp32", master_dtype=None, optimizer="sgd", reduce_dtype="bf16")
"""A job that computes in fp32 and reduces in bf16."""
MLP = {"fc1": ("weight", "bias"), "fc2": ("weight", "bias")}

CASES: dict[str, Callable[[], Case]] = {
    "data-parallel mlp": lambda: data_parallel("mlp", job=WIRE),
    "data-parallel mlp, 4 micro-batches": lambda: data_parallel("mlp", job=WIRE, micro_batches=4),
    "data-parallel gpt2, tied, 2 micro-batches": lambda: data_parallel("gpt2", job=WIRE, micro_batches=2),
    "fully-sharded mlp, 3 micro-batches": lambda: fully_sharded("mlp", job=WIRE, micro_batches=3),
    "FSDP, 2 micro-batches": lambda: with_fsdp_groups(replicated_on_tp("mlp", job=WIRE, micro_batches=2), MLP),
    "FSDP, resharded after the step, 3 micro-batches": lambda: reshard_after_step(
        with_fsdp_groups(replicated_on_tp("llama", job=WIRE, micro_batches=3), LLAMA_BLOCKS)
    ),
}


@dataclass(frozen=True)
class Result:
    excess: float
    """The largest error above its bound, as a fraction of the bound; negative where all errors are below."""
    fp32_error: float
    """The largest difference from sums in fp32, as a fraction of the largest gradient."""
    amid: frozenset[torch.dtype]
    """Dtypes of gradients before the step's last backward."""
    after: frozenset[torch.dtype]


def label_count(family: str, batch: dict) -> int:
    """Return the number of labels that are not ignored."""
    labels = batch["labels"] if family == "mlp" else batch["labels"][:, 1:]
    return int((labels != -100).sum())


def rows_of(batch: dict, rank: int, ranks: int) -> dict:
    size = BATCH // ranks
    return {k: v[size * rank : size * (rank + 1)] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def gradient_sums(family: str, batches: list[dict], ranks: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return name -> (the unsharded model's gradient, the sum of the magnitudes of its addends)."""
    model = make_model(family)
    sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for batch in batches:
        for rank in range(ranks):
            rows = rows_of(batch, rank, ranks)
            weight = label_count(family, rows) / label_count(family, batch) / len(batches)
            if not weight:
                continue
            model.zero_grad()
            (loss_of(model(**rows)) * weight).backward()
            for name, parameter in model.named_parameters():
                gradient, magnitude = sums[name]
                gradient += parameter.grad
                magnitude += parameter.grad.abs()
    return sums


def run_case(name: str) -> Result:
    case = CASES[name]()
    model = make_model(case.family)
    mesh = device_mesh_for(case.plan)
    shard_module(model, mesh, case.plan)
    batches = [make_batch(case.family, seed=index) for index in range(case.plan.micro_batches)]
    amid: set[torch.dtype] = set()
    for batch in batches:
        amid.update(dtypes(model))
        loss = loss_of(model(**local_batch(batch, mesh, case.plan))) / len(batches)
        loss.backward()
    placements = next(iter(case.plan.input_plan["input"].values())).layout
    ranks = RANKS if placements[1].is_shard() else RANKS // 2
    sums = gradient_sums(case.family, batches, ranks)
    largest = max(gradient.abs().max().item() for gradient, _ in sums.values())
    roundings = len(batches) + ranks - 1
    excess, error = -1.0, 0.0
    for fqn, parameter in model.named_parameters():
        exact, magnitude = sums[fqn]
        # The error of fp32 itself, with sums in another order, is relative to the largest gradient.
        bound = roundings * UNIT_ROUNDOFF * magnitude + 1e-6 * largest
        difference = (parameter.grad.full_tensor() - exact).abs()
        excess = max(excess, (difference / bound - 1).max().item())
        error = max(error, difference.max().item() / largest)
    return Result(excess=excess, fp32_error=error, amid=frozenset(amid), after=frozenset(dtypes(model)))


def dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of gradients; of unreduced ones, those in which they accumulate."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {g.accumulated_dtype if isinstance(g, UnreducedGradient) else g.dtype for g in gradients}


def run_mixed(rank: int) -> list[tuple[frozenset[torch.dtype], frozenset[torch.dtype]]]:
    """Return the dtypes of gradients amid and after a step in bf16, by dtype of parameters and of the reduction."""
    by_job = []
    for master, reduced in (("fp32", "bf16"), ("fp32", "fp32"), (None, "fp32"), (None, "bf16")):
        job = Job(dtype="bf16", master_dtype=master, optimizer="sgd", reduce_dtype=reduced)
        case = data_parallel("mlp", job=job, micro_batches=2)
        model = make_model("mlp").to(torch.bfloat16 if master is None else torch.float32)
        mesh = device_mesh_for(case.plan)
        shard_module(model, mesh, case.plan)
        batches = []
        for seed in range(2):
            batch = make_batch("mlp", seed=seed)
            batches.append({**batch, "x": batch["x"].to(torch.bfloat16)})
        seen = []
        for batch in batches:
            loss_of(model(**local_batch(batch, mesh, case.plan))).backward()
            seen.append(frozenset(dtypes(model)))
        by_job.append((seen[0], seen[1]))
    return by_job


def run_cases(rank: int, names: list[str]) -> tuple[dict[str, Result], list]:
    return {name: run_case(name) for name in names}, run_mixed(rank)


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Result], list]:
    return run_on_gloo(run_cases, RANKS, list(CASES))[0]


@pytest.mark.parametrize("name", CASES)
def test_errors_are_within_the_bound_of_the_dtypes_rounding(results: tuple[dict[str, Result], list], name: str) -> None:
    assert results[0][name].excess <= 0
    # Sums in fp32 would have smaller errors.
    assert results[0][name].fp32_error > 1e-5


@pytest.mark.parametrize("name", CASES)
def test_reduced_gradients_have_their_parameters_dtype(results: tuple[dict[str, Result], list], name: str) -> None:
    assert results[0][name].after == {torch.float32}


def test_unreduced_gradients_have_the_reductions_dtype(results: tuple[dict[str, Result], list]) -> None:
    by_case = results[0]
    assert by_case["data-parallel mlp, 4 micro-batches"].amid == {torch.bfloat16}
    assert by_case["data-parallel gpt2, tied, 2 micro-batches"].amid == {torch.bfloat16}
    # fully_shard has reduced its gradients in every backward; the others are unreduced.
    assert by_case["FSDP, 2 micro-batches"].amid == {torch.float32, torch.bfloat16}


def test_dtypes_of_gradients_by_dtype_of_parameters(results: tuple[dict[str, Result], list]) -> None:
    bf16, fp32 = frozenset({torch.bfloat16}), frozenset({torch.float32})
    assert results[1] == [(bf16, fp32), (fp32, fp32), (fp32, bf16), (bf16, bf16)]
