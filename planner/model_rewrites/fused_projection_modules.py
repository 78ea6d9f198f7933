"""Fused QKV and fused gate-up modules, which replace the separate projections of a transformers module.

The rows of a fused weight are interleaved as in Megatron-LM, so that sharding the fused weight on dim 0 shards every
projection on dim 0. In a gate-up weight, row i of the gate is followed by row i of up. In a QKV weight, each key head
is preceded by the query heads that it serves and followed by its value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

QUERY, KEY, VALUE = "q_proj", "k_proj", "v_proj"
GATE, UP = "gate_proj", "up_proj"
FUSED_QKV, FUSED_GATE_UP = "qkv_proj", "gate_up_proj"


def interleave_rows(parts: Mapping[str, torch.Tensor], groups: int) -> torch.Tensor:
    """Return the rows of ``parts``, each ``[rows, ...]``, interleaved in one tensor.

    The result is ``groups`` groups of rows; group i holds the i-th ``1 / groups`` of each part, in the order of
    ``parts``.
    """
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts.values()], 1).flatten(0, 1)


def split_rows(fused: torch.Tensor, rows: Mapping[str, int], groups: int) -> dict[str, torch.Tensor]:
    """Return the parts of ``fused``, the inverse of `interleave_rows`; ``rows`` is the number of rows of each part."""
    pieces = fused.unflatten(0, (groups, -1)).split([count // groups for count in rows.values()], 1)
    return {name: piece.flatten(0, 1) for name, piece in zip(rows, pieces, strict=True)}


class FusedGateUpMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)``, where one linear layer computes gate and up."""

    def __init__(self, mlp: Any, gate_up_proj: nn.Linear, activation: str) -> None:
        """Take ``down_proj`` and ``act_fn`` from ``mlp``.

        Args:
            mlp: the module that is replaced.
            gate_up_proj: the fused layer, with rows interleaved in as many groups as the gate has rows.
            activation: the name of ``mlp.act_fn``, a key of `planner.model_rewrites.fused_kernels.ACTIVATIONS`.
        """
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, mlp.down_proj
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for ``x`` ``[..., width]``, of the same shape."""
        gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        output: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class FusedQKV:
    """Runs a fused QKV layer once for the three projections that an attention module calls in turn."""

    def __init__(self, layer: nn.Linear, shape: tuple[int, int, int]) -> None:
        """Take the fused ``layer`` and its ``shape``: (KV heads, query heads per KV head, head dim)."""
        self._layer, self._shape = layer, shape
        self._input: torch.Tensor | None = None
        self._outputs: dict[str, torch.Tensor] = {}

    def projection(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the queries, keys or values of ``x`` ``[..., width]``: ``[..., heads, head dim]``."""
        if self._input is not x or name not in self._outputs:
            kv_heads, group, width = self._shape
            qkv = self._layer(x).unflatten(-1, (kv_heads, group + 2, width))
            query, key, value = qkv.split([group, 1, 1], -2)
            self._input = x
            # A copy of the values: autograd saves them, and a view would keep the whole QKV tensor alive.
            self._outputs = {QUERY: query.flatten(-3, -2), KEY: key.squeeze(-2), VALUE: value.squeeze(-2).contiguous()}
        output = self._outputs.pop(name)
        if not self._outputs:
            self._input = None
        return output


class FusedQKVOutput:
    """Replaces one of the three projections of an attention module whose QKV is fused."""

    def __init__(self, qkv: FusedQKV, name: str) -> None:
        self._qkv, self._name = qkv, name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this projection's part of the fused layer's result."""
        return self._qkv.projection(self._name, x)
