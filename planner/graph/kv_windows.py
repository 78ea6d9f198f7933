"""Sliding windows of KV caches: how many tokens the cache of each attention layer keeps, as transformers says."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from torch import nn

from planner.graph.op_graph import ATTENTION, OpGraph, build_digraph


def kv_windows(module: nn.Module) -> dict[str, int]:
    """Return FQN of a layer of ``module`` -> the most tokens that its KV cache keeps, for layers that do not keep all.

    0 stands for a layer that reads the keys and values of an earlier one.
    """
    caches, config = sys.modules.get("transformers.cache_utils"), getattr(module, "config", None)
    if caches is None or config is None or not hasattr(config, "get_text_config"):
        return {}
    kinds, arguments = caches.get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    kept = {}
    for index, (kind, given) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "dummy":
            kept[index] = 0
        elif given.get("sliding_window"):
            kept[index] = given["sliding_window"] - 1  # the token of a step is the last of its window
    layers = {fqn: getattr(part, "layer_idx", None) for fqn, part in module.named_modules()}
    return {fqn: kept[index] for fqn, index in layers.items() if index in kept}


def with_kv_windows(graph: OpGraph, windows: Mapping[str, int]) -> OpGraph:
    """Return ``graph`` with ``kv_window`` set on the attention inside the layers in ``windows``."""
    if not windows:
        return graph

    def window_of(fqn: str) -> int | None:
        parts = fqn.split(".")
        names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((windows[name] for name in names if name in windows), None)

    ops = [
        dataclasses.replace(op, kv_window=window_of(graph.calls[op.call].fqn)) if op.target is ATTENTION else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, digraph=build_digraph(ops))
