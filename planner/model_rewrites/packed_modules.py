"""Projections that read one tensor as one linear layer, in the place of those that a module of transformers has.

A packed weight has rows in an order that keeps together what one rank needs of all parts, so that splitting it over
ranks along its rows is splitting each part: a gate is followed by its factor; a head of keys by that of its values, and
preceded by the heads of queries that it serves (as Megatron packs them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

QUERY, KEY, VALUE = "q_proj", "k_proj", "v_proj"
GATE, FACTOR = "gate_proj", "up_proj"
PACKED_ATTENTION, PACKED_GATE = "qkv_proj", "gate_up_proj"


def packed_rows(parts: Mapping[str, torch.Tensor], groups: int) -> torch.Tensor:
    """Return ``parts`` [rows, ...] packed: group by group, in each a like share of every part, in their order."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts.values()], 1).flatten(0, 1)


def unpacked_rows(packed: torch.Tensor, rows: Mapping[str, int], groups: int) -> dict[str, torch.Tensor]:
    """Undo `packed_rows`: return the parts, which have ``rows``."""
    pieces = packed.unflatten(0, (groups, -1)).split([count // groups for count in rows.values()], 1)
    return {name: piece.flatten(0, 1) for name, piece in zip(rows, pieces, strict=True)}


class PackedGatedMLP(nn.Module):
    """``down_proj(act_fn(gate) * up)`` of an input whose gates and factors are one linear layer's."""

    def __init__(self, own: Any, gate_up_proj: nn.Linear, activation: str) -> None:
        """Take the activation and the last layer of ``own``.

        Args:
            own: the MLP in whose place this comes.
            gate_up_proj: its first two layers, packed with as many groups as there are gates.
            activation: name of ``own.act_fn``, in `planner.model_rewrites.fused_kernels.ACTIVATIONS`.
        """
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, own.down_proj
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = own.act_fn
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for ``x`` [..., width]."""
        gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        found: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return found


class PackedProjections:
    """Runs a packed layer of queries, keys and values once for those who ask for each of them in turn."""

    def __init__(self, layer: nn.Linear, shape: tuple[int, int, int]) -> None:
        """Take the ``layer``, and (heads of keys, heads of queries for each, width of a head)."""
        self._layer, self._shape = layer, shape
        self._input: torch.Tensor | None = None
        self._parts: dict[str, torch.Tensor] = {}

    def part(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the queries, keys or values of ``x`` [..., width]: [..., heads, width of a head]."""
        if self._input is not x or name not in self._parts:
            kv_heads, group, width = self._shape
            packed = self._layer(x).unflatten(-1, (kv_heads, group + 2, width))
            query, key, value = packed.split([group, 1, 1], -2)
            self._input = x
            # Copies: what of values is kept for the backward would keep all three.
            self._parts = {QUERY: query.flatten(-3, -2), KEY: key.squeeze(-2), VALUE: value.squeeze(-2).contiguous()}
        found = self._parts.pop(name)
        if not self._parts:
            self._input = None
        return found


class PartOfProjections:
    """Stands for one of the layers of an attention module that are packed."""

    def __init__(self, packed: PackedProjections, name: str) -> None:
        self._packed, self._name = packed, name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return this part of the packed layer's result."""
        return self._packed.part(self._name, x)
