"""Our planner against meta-pytorch/autoparallel on one machine in one run: seconds by stage, peak memory, their ratio.

    git clone https://github.com/meta-pytorch/autoparallel /tmp/autoparallel
    python benchmarks/autoparallel.py --checkout /tmp/autoparallel
    python benchmarks/autoparallel.py --checkout /tmp/autoparallel --mesh 64 --layers 2

Both plan Llama-3 8B for training at 8,192 tokens, each in a process of its own. The mesh is given, since autoparallel
needs one. Autoparallel's stages are tracing forward and backward, building its optimizer (strategies and their prices),
and solving (which builds its program). Neither plan is applied. Autoparallel prices by the name of the local GPU;
without a GPU, the script gives the name of an H100.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from search import measure_apart
from search_cases import Row

SEQ, VOCAB, LAYERS = 8192, 128256, 32
MESHES = {"32x8": (32, 8), "64": (64,)}
TIME_LIMIT_S = 1800.0

_THEIRS = """
import json, os, resource, sys, time
shape, layers, seq, vocab = json.loads(sys.argv[1])
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from autoparallel._testing.models.llama3 import Transformer, TransformerModelArgs
from autoparallel.api import AutoParallel
from autoparallel import api, optimize_sharding

size = 1
for length in shape:
    size *= length
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cpu":
    torch.cpu.get_device_name = torch.cuda.get_device_name = lambda *args: "NVIDIA H100 80GB HBM3"
mesh = torch.distributed.device_mesh.init_device_mesh(kind, tuple(shape), mesh_dim_names=("dp", "tp")[: len(shape)])
batch = 2 * shape[0]
stages = {}

def timed(owner, name, stage):
    original = getattr(owner, name)
    def run(*args, **kwargs):
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            stages[stage] = stages.get(stage, 0.0) + time.perf_counter() - started
    setattr(owner, name, run)

timed(AutoParallel, "build_model_graph", "trace")
timed(optimize_sharding.ShardingOptimizer, "__init__", "enumerate")
timed(AutoParallel, "optimize_placement", "solve")
with torch.device("meta"):
    model = Transformer(TransformerModelArgs(
        dim=4096, n_layers=layers, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024,
        rope_theta=500000, vocab_size=vocab, max_seq_len=seq,
    ))
started, cpu_started = time.perf_counter(), sum(os.times()[:4])
inputs = lambda: torch.randint(0, vocab, (batch, seq), device=kind)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with AutoParallel(model, inputs, mesh, policy, repeated_subgraphs=True) as planner:
    planner.add_parameter_memory_constraint(low=None, high=None)
    data = (Shard(0),) + (Replicate(),) * (len(shape) - 1)
    planner.add_input_constraints([data])
    planner.add_output_constraints([data if len(shape) == 1 else (Shard(0), Shard(2))])
    planner.optimize_placement(verbose=False)
    stages["all"], cpu_s = time.perf_counter() - started, sum(os.times()[:4]) - cpu_started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"stages": stages, "cpu_s": cpu_s, "peak_mb": peak * 1024 / 1e6}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Wall time, CPU time and memory of one planner.

    Attributes:
        stages: seconds by stage, "all" among them.
        cpu_s: processor seconds, solvers in other processes included.
        peak_mb: peak resident set of the planner's process.
    """

    stages: Mapping[str, float]
    cpu_s: float
    peak_mb: float


def theirs(checkout: Path, shape: Sequence[int], layers: int) -> Measured:
    """Return the measurement of autoparallel.

    Raises:
        SystemExit: it failed; the message has the end of its output.
    """
    request = json.dumps([list(shape), layers, SEQ, VOCAB])
    done = subprocess.run(
        [sys.executable, "-c", _THEIRS, request], cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        output = "\n".join(done.stderr.splitlines()[-15:])
        raise SystemExit(f"autoparallel in {checkout} failed with exit code {done.returncode}:\n{output}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def ours(shape: Sequence[int], layers: int) -> Measured:
    """Return the measurement of our planner."""
    devices = 1
    for length in shape:
        devices *= length
    mesh = ",".join(f"{name}={length}" for name, length in zip(("dp", "tp"), shape, strict=False))
    row = Row(
        name="against autoparallel", group="autoparallel", preset="llama-3.1-8b", devices=devices, batch=2 * shape[0],
        seq=SEQ, layers=layers, mesh=mesh, micro_batches=1, ac="full",
    )  # fmt: skip
    outcome = measure_apart(row, TIME_LIMIT_S)
    if not outcome.stages:
        raise SystemExit(f"our planner: {outcome.answer}")
    return Measured(stages={**outcome.stages, "all": outcome.seconds}, cpu_s=outcome.cpu_s, peak_mb=outcome.peak_mb)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="folder of a clone of meta-pytorch/autoparallel")
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="again for more; all where left out")
    parser.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args(argv)
    if not (arguments.checkout / "autoparallel" / "api.py").is_file():
        parser.error(f"{arguments.checkout} is no checkout of autoparallel: it has no autoparallel/api.py")
    return arguments


def main() -> int:
    """Run both on every mesh and print the table."""
    arguments = parse_arguments()
    table = Table(box=None, padding=(0, 2, 0, 0), title=f"Llama-3 8B, {arguments.layers} layers, seq {SEQ}")
    for name in ("mesh", "planner", "all, s", "CPU, s", "stages, s", "peak MB", "autoparallel / ours"):
        table.add_column(name, no_wrap=True)
    for name in arguments.mesh or MESHES:
        shape = MESHES[name]
        mine, other = ours(shape, arguments.layers), theirs(arguments.checkout.resolve(), shape, arguments.layers)
        ratio = f"{other.stages['all'] / mine.stages['all']:.1f}x, of CPU time {other.cpu_s / mine.cpu_s:.1f}x"
        for planner, found, last in (("shardplan", mine, ""), ("autoparallel", other, ratio)):
            parts = ", ".join(
                f"{stage.removesuffix('_s')} {s:.2f}" for stage, s in found.stages.items() if stage != "all"
            )
            table.add_row(
                name, planner, f"{found.stages['all']:.2f}", f"{found.cpu_s:.2f}", parts, f"{found.peak_mb:.0f}", last
            )
    Console(highlight=False, width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
