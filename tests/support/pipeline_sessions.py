"""Sessions of a small model whose equal blocks can be cut into the stages of a pipeline."""

from __future__ import annotations

from typing import Any

from support.small_models import TINY_LLAMA

from api.requests.model_registry import load_model, quiet_libraries
from cost_model import ClusterSpec
from planner.session import PlanningSession

BATCH = 16
CONFIG: dict[str, Any] = {"hf_config": {**TINY_LLAMA, "num_hidden_layers": 5}}
SLOW: dict[str, Any] = {
    "nodes": 4,
    "devices_per_node": 1,
    "device": "toy",
    "inter_node": {"bandwidth_bytes_per_s": 1e7},
}
"""Nodes that have little to say to each other: gathering parameters takes longer than computing."""


def session_of(cluster: str | dict[str, Any], blocks: int = 5, **options: Any) -> PlanningSession:
    with quiet_libraries():
        source = load_model({"hf_config": {**CONFIG["hf_config"], "num_hidden_layers": blocks}}, seq=32)
    job = {"batch": BATCH, "seq": 32, "dtype": "fp32", **options}
    return PlanningSession(source.module, cluster=ClusterSpec.parse(cluster), **job)
