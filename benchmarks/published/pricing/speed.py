"""Milliseconds to price one parallel configuration of a transformer, time and memory together.

    cd benchmarks && python -m published.pricing.speed

The target is 2 ms; Calculon takes 16.5 ms. Every configuration differs from all others, so that no cache has its price.
The best of several rounds is printed, since other processes may share the core.
"""

from __future__ import annotations

import sys
import time

from cost_model.configuration.memory import step_memory
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.step import step_time
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec

TARGET_MS = 2.0
CALCULON_MS = 16.5
"""Milliseconds per configuration of Calculon."""
ROUNDS, CONFIGURATIONS = 5, 200
LLAMA_70B = TransformerSpec(
    layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256
)  # fmt: skip


def configurations(first_seq: int) -> list[ParallelSpec]:
    """Return `CONFIGURATIONS` configurations of 64 devices, each with its own sequence length."""
    degrees = [(1, 64, 1), (8, 8, 1), (4, 4, 4), (8, 1, 8), (2, 16, 2)]
    return [
        ParallelSpec(
            micro_batch=1, micro_batches=32, seq=first_seq + 8 * number, shard=shard, zero=3 if shard > 1 else 0,
            tensor=tensor, sequence_parallel=True, pipeline=pipeline,
        )
        for number in range(CONFIGURATIONS)
        for tensor, shard, pipeline in [degrees[number % len(degrees)]]
    ]  # fmt: skip


def main() -> int:
    """Measure and print; return 1 where the target is missed."""
    cluster = ClusterSpec.parse("8x8xh100-sxm-80gb")
    best_ms = float("inf")
    for number in range(ROUNDS):
        parallels = configurations(2048 + 8 * CONFIGURATIONS * number)
        start = time.perf_counter()
        for parallel in parallels:
            step_time(LLAMA_70B, parallel, cluster)
            step_memory(LLAMA_70B, parallel, cluster)
        best_ms = min(best_ms, (time.perf_counter() - start) / len(parallels) * 1e3)
    print(
        f"{best_ms:.3f} ms for a configuration; target {TARGET_MS} ms; {CALCULON_MS / best_ms:.0f} x Calculon's speed"
    )
    return 0 if best_ms <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
