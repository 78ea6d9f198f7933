"""Train a tiny Llama as a plan says, beside the unsharded model, and show that both compute the same.

    shardplan plan examples/tiny_llama.json --cluster 1x4xtoy --mesh dp=2,tp=2 \\
        --batch 8 --seq 32 --dtype fp32 -o plan.json
    torchrun --nproc-per-node 4 examples/train.py plan.json

Rank 0 trains the whole model as well, on the same batches, and prints both losses and the largest difference between
their gradients. Exit code 0: they agree; 1: they do not; 2: the plan cannot be run here.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from executor.resolve.batch import local_batch
from executor.resolve.mesh import device_mesh_for
from executor.shard import shard_module
from planner import fuse_projections
from planner.errors import PlannerError
from planner.plan.sharding_plan import ShardingPlan

CONFIG = Path(__file__).with_name("tiny_llama.json")
IGNORED = -100
"""The label that cross entropy leaves out."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LEARNING_RATE = {"sgd": 0.1, "adamw": 1e-3}
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.05}
"""Largest difference that passes, by the dtype that the plan computes in; the unsharded model computes in fp32."""

Batch = dict[str, Any]


def make_batch(batch: int, seq: int, vocabulary: int, step: int) -> Batch:
    """Return the global batch of ``step``, [batch, seq], the same on every rank: rows that count up from anywhere.

    Rows ignore different numbers of labels, so that the ranks do too: a mean of the ranks' means would be wrong.
    """
    generator = torch.Generator().manual_seed(step)
    ids = (torch.randint(vocabulary, (batch, 1), generator=generator) + torch.arange(seq)) % vocabulary
    ignored = torch.randint(seq // 2, (batch, 1), generator=generator)
    labels = ids.masked_fill(torch.arange(seq) < ignored, IGNORED)
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield ``batch`` in ``count`` equal parts."""
    parts = {name: value.chunk(count) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    for index in range(count):
        yield {**batch, **{name: part[index] for name, part in parts.items()}}


def train_step(model: nn.Module, batches: Sequence[Batch], device: torch.device) -> float:
    """Accumulate the gradients of one step in ``model``, and return the step's loss."""
    total = 0.0
    for batch in batches:
        inputs = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        # The mean of the micro-batches' means: the executor scales nothing.
        loss = model(**inputs).loss / len(batches)
        loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    return total


def gradient_difference(model: nn.Module, reference: nn.Module | None) -> float:
    """Return the largest difference between gradients, over the largest gradient; on ranks without reference, 0."""
    wanted = {} if reference is None else dict(reference.named_parameters())
    largest_difference, largest = 0.0, 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        # Every rank takes part in gathering, rank 0 compares.
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if reference is not None and whole is not None:
            expected = wanted[name].grad
            assert expected is not None
            largest_difference = max(largest_difference, (whole - expected).abs().max().item())
            largest = max(largest, expected.abs().max().item())
    return largest_difference / largest if largest else 0.0


def train(plan: ShardingPlan, mesh: DeviceMesh, device: torch.device, arguments: argparse.Namespace) -> bool:
    """Train, print what rank 0 sees, and tell whether the sharded run is the unsharded one's equal."""
    rank = dist.get_rank()
    tolerance = TOLERANCE[plan.job.dtype] if arguments.tolerance is None else arguments.tolerance
    config = LlamaConfig.from_json_file(CONFIG)
    # Every rank has other values to begin with: rank 0's are the ones that count.
    torch.manual_seed(rank)
    model = LlamaForCausalLM(config).train().to(device)
    if plan.job.fused_projections:
        fuse_projections(model)  # shard_module would do it; the unsharded model is to have the same parameters
    reference = copy.deepcopy(model) if rank == 0 else None
    shard_module(model, mesh, plan)

    make_optimizer, rate = OPTIMIZERS[arguments.optimizer], LEARNING_RATE[arguments.optimizer]
    runs = [one for one in (model, reference) if one is not None]
    optimizers = [make_optimizer(one.parameters(), lr=rate) for one in runs]
    worst = 0.0
    if rank == 0:
        print(f"{'step':>4}  {'sharded loss':>13}  {'unsharded loss':>14}  {'difference':>10}  {'of gradients':>12}")
    for step in range(arguments.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert plan.job.batch is not None
        assert plan.job.seq is not None
        batch = make_batch(plan.job.batch, plan.job.seq, config.vocab_size, step)
        whole = list(micro_batches(batch, plan.micro_batches))
        loss = train_step(model, [local_batch(one, mesh, plan) for one in whole], device)
        expected = loss if reference is None else train_step(reference, whole, device)
        of_gradients = gradient_difference(model, reference)
        # AdamW divides a gradient by its own size, so that rounding moves weights whose gradient is almost 0.
        worst = max(worst, abs(loss - expected), 0.0 if arguments.optimizer == "adamw" else of_gradients)
        if rank == 0:
            print(f"{step:4}  {loss:13.7f}  {expected:14.7f}  {abs(loss - expected):10.1e}  {of_gradients:12.1e}")
        for optimizer in optimizers:
            optimizer.step()
    verdict = torch.tensor([worst], device=device)
    dist.broadcast(verdict, src=0)
    equal = bool(verdict.item() <= tolerance)
    if rank == 0:
        said = "the unsharded run's" if equal else "NOT the unsharded run's"
        print(f"mesh {plan.mesh}: these are {said} numbers; largest difference {worst:.1e}, {tolerance:.0e} may be")
    return equal


def why_not(plan: ShardingPlan, name: str) -> str | None:
    """Return why the plan called ``name`` cannot be run by these processes, None if it can."""
    command = f"torchrun --nproc-per-node {plan.mesh.size} examples/train.py {name}"
    if "WORLD_SIZE" not in os.environ:
        return f"this is one process on its own; start {plan.mesh.size} of them: {command}"
    started = int(os.environ["WORLD_SIZE"])
    if started != plan.mesh.size:
        return f"{name} is for the mesh {plan.mesh}, {plan.mesh.size} processes, but {started} were started: {command}"
    if plan.job.batch is None or plan.job.seq is None:
        return f"{name} does not say its batch and sequence length; make it with `shardplan plan`"
    return None


def main() -> int:
    """Run the example; see the module's docstring for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan file for examples/tiny_llama.json")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="with adamw, only losses are judged")
    parser.add_argument("--tolerance", type=float, help="largest difference that passes; 1e-5 for an fp32 plan")
    arguments = parser.parse_args()
    try:
        plan = ShardingPlan.load(arguments.plan)
        refusal = why_not(plan, arguments.plan)
        if refusal is None:
            return run(plan, arguments)
    except PlannerError as error:
        refusal = str(error)
    if os.environ.get("RANK", "0") == "0":
        print(f"train.py: {refusal}", file=sys.stderr)
    return 2


def run(plan: ShardingPlan, arguments: argparse.Namespace) -> int:
    """Return the exit code of training on the processes that torchrun started."""
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # full_tensor() below gathers one axis after the other, and says so on every rank: it only serves to show gradients.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        equal = train(plan, device_mesh_for(plan, device_type=device.type), device, arguments)
        dist.barrier()  # a rank that leaves early may take the others' connections with it
    finally:
        dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
