"""Notes on a plan: parameters that a call does not read are named."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner import build_plan


class Block(nn.Module):
    """A block with a part for images, which a call with text does not run."""

    def __init__(self, adapter: int) -> None:
        super().__init__()
        self.text, self.adapter = nn.Linear(16, 16), nn.Linear(16, adapter)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        x = x + self.text(x)
        return x if image is None else x + self.adapter(image).mean(-1, keepdim=True)


class Reader(nn.Module):
    def __init__(self, adapter: int = 16, tower: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(adapter) for _ in range(2))
        self.eyes = nn.ModuleDict({"tower": nn.Sequential(nn.Linear(16, tower), nn.Linear(tower, 16))})
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        image = None if image is None else self.eyes["tower"](image)
        for block in self.blocks:
            x = block(x, image)
        return self.head(x).square().mean()


def notes_on(module: nn.Module, **inputs: Tensor) -> list[str]:
    plan = build_plan(module, example_inputs=inputs, cluster="1x2xtoy", dtype="fp32", micro_batches=1)
    return [note for note in plan.notes if "does not read" in note]


def test_modules_that_a_call_does_not_run_are_named() -> None:
    x = torch.randn(8, 16)
    (note,) = notes_on(Reader(), x=x)
    # 4 of the 6 linear layers of 16 x 16, beside a head of 4.
    assert "a call with these inputs (x) does not read 64% of the parameters: blocks.*.adapter, eyes." in note
    assert notes_on(Reader(), x=x, image=x) == []


def test_few_parameters_that_are_not_read_are_not_worth_a_note() -> None:
    assert notes_on(Reader(adapter=1, tower=1), x=torch.randn(8, 16)) != []
    wide = Reader(adapter=1, tower=1)
    wide.head = nn.Linear(16, 4096)
    assert notes_on(wide, x=torch.randn(8, 16)) == []
