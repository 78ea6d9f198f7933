"""Bags of embeddings: tables are split by rows or columns, bags over ranks; what does not run is not tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from executor.verify import verify
from planner import build_plan

BATCH, BAG, TABLES = 64, 4, 3
SLOW = {"nodes": 4, "devices_per_node": 1, "device": "toy"}


class Recommender(nn.Module):
    def __init__(self, flat: bool = False, **options: Any) -> None:
        super().__init__()
        self.flat = flat
        self.tables = nn.ModuleList(nn.EmbeddingBag(4096, 32, **options) for _ in range(TABLES))
        self.top = nn.Linear(32 * TABLES, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.flat:
            bags = [table(ids[:, i].reshape(-1), offsets) for i, table in enumerate(self.tables)]
        else:
            bags = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return nn.functional.binary_cross_entropy_with_logits(self.top(torch.cat(bags, 1))[:, 0], labels)


def inputs() -> tuple[torch.Tensor, ...]:
    ids = torch.zeros(BATCH, TABLES, BAG, dtype=torch.long)
    return ids, torch.arange(0, BATCH * BAG, BAG), torch.zeros(BATCH)


@pytest.mark.parametrize(
    ("flat", "options"),
    [
        (False, {"mode": "sum"}),
        (False, {"mode": "mean", "padding_idx": 0}),
        (False, {"mode": "max"}),
        (True, {"mode": "sum"}),
    ],
    ids=["sum", "mean, padded", "max", "offsets of the caller"],
)
def test_tables_are_computed_in_pieces_where_links_are_slow(flat: bool, options: dict[str, Any]) -> None:
    module = Recommender(flat, **options)
    plan = build_plan(module, cluster=SLOW, example_inputs=inputs(), dtype="fp32", micro_batches=1)
    assert plan.local_ops == ()
    (layout,) = [layout for name, layout in plan.plan.items() if name.startswith("tables")]
    assert any(isinstance(place, Shard) for place in layout)
    assert not any(name.startswith("tables") for name in plan.compute_plan), "no table is gathered"
    assert verify(module, plan, example_inputs=inputs()).equal


@pytest.mark.parametrize(
    "pin", ["tables.*.weight=S(0)@tp", "tables.*.weight=S(1)@tp", "tables.*.weight:used=R@dp"], ids=str
)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_every_layout_of_a_table_runs_as_planned(pin: str, mode: str) -> None:
    module = Recommender(mode=mode)
    plan = build_plan(
        module, cluster="1x4xtoy", mesh="dp=2,tp=2", example_inputs=inputs(), dtype="fp32", micro_batches=1, pins=[pin]
    )
    assert verify(module, plan, example_inputs=inputs()).equal
