"""Tracing three of many equal blocks gives the graph that tracing all of them gives, or is not done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.graphs import canonical
from torch import nn

from planner.graph import from_fx as tracing
from planner.graph.capture import ExampleInputs, to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.fold import RepeatedBlocks, find_repeated_blocks, without_repeated_blocks

WIDTH = 8


class Block(nn.Module):
    """One op list with a nested module, a residual, and a buffer."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.factor = factor

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.inner(x) * self.scale * self.factor
        return x + (y if bias is None else y + bias)


class Deep(nn.Module):
    """Blocks in a row, then a head and a loss; subclasses say how the blocks are called."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.embed(x))).sum()


class Biased(Deep):
    """A tensor from outside, made once, goes to every block."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        bias = x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x, bias=bias)
        return x


class PassedOn(nn.Module):
    """Hands the first block's bias from block to block, as T5 does."""

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if makes else None

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, bias = pair
        if self.bias is not None:
            bias = self.bias * 2
        assert bias is not None
        return self.linear(x) + bias, bias


class PassingOn(Deep):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        pair: Any = (x, None)
        for block in self.blocks:
            pair = block(pair)
        return pair[0] * pair[1]


class AllOutputs(Deep):
    """What every block makes is used at the end."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return torch.stack(found).sum(0)


class FromTwoBefore(Deep):
    """Each block's result is added to that of the one after the next."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for block in self.blocks:
            x, before = block(x, bias=before), x
        return x


class ByIndex(Deep):
    """The fifth block is fed otherwise, which nothing in the block itself tells."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x.relu() if index == 4 else x)
        return x


class ByDepth(Deep):
    """Divides by the number of blocks that there are."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) / len(self.blocks)


class Twice(Deep):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(super().run(x))


def blocks(count: int, **kwargs: Any) -> list[nn.Module]:
    return [Block(**kwargs) for _ in range(count)]


def frozen() -> nn.Module:
    module = Deep(blocks(9))
    module.blocks[3].requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = Deep(blocks(9))
    module.blocks[7].inner[0].weight = module.blocks[1].inner[0].weight
    return module


def shared() -> nn.Module:
    """All blocks share one weight, which the model has under its own name too."""
    module = Deep(blocks(8))
    module.common = nn.Linear(WIDTH, 2 * WIDTH)
    for block in module.blocks:
        block.inner[0] = module.common
    return module


def inputs() -> ExampleInputs:
    return meta_inputs((torch.zeros(6, WIDTH),))


MODELS = {
    "one repeat": (lambda: Deep(blocks(7)), ["blocks 0 7"]),
    "a tensor for all": (lambda: Biased(blocks(6)), ["blocks 0 6"]),
    "a tensor passed on": (
        lambda: PassingOn([PassedOn(makes=True), *(PassedOn(makes=False) for _ in range(6))]),
        ["blocks 1 6"],
    ),
    "two kinds": (lambda: Deep([*blocks(5), *blocks(6, factor=2.0)]), ["blocks 0 5", "blocks 5 6"]),
    "another in between": (lambda: Deep([*blocks(5), nn.Tanh(), *blocks(5)]), ["blocks 0 5", "blocks 6 5"]),
    "a first and a last of their own": (lambda: Deep([nn.Tanh(), *blocks(5), nn.Tanh()]), ["blocks 1 5"]),
    "a sequence in a block": (lambda: Deep([nn.Sequential(*blocks(2)) for _ in range(5)]), ["blocks 0 5"]),
    "a sequence around": (lambda: nn.Sequential(nn.Tanh(), nn.Sequential(*blocks(6)), nn.Tanh()), ["1 0 6"]),
    "at the root": (lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), [" 0 6"]),
    "frozen in between": (frozen, ["blocks 4 5"]),
    "alternating": (lambda: Deep([block for _ in range(5) for block in (Block(), Block(2.0))]), []),
    "too few": (lambda: Deep(blocks(4)), []),
    "all outputs used": (lambda: AllOutputs(blocks(7)), []),
    "by the number of blocks": (lambda: ByDepth(blocks(7)), []),
    "called twice": (lambda: Twice(blocks(7)), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_folded_is_what_the_whole_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = MODELS[name]
    module = to_meta(make(), None)
    given = inputs()
    found = find_repeated_blocks(module, given)
    assert [f"{r.container} {r.first} {r.length}" for r in found] == expected
    folded = tracing._trace_folded(module, given)
    assert (folded is None) == (not expected)
    if folded is not None:
        monkeypatch.setattr(tracing, "_trace_folded", lambda module, inputs: None)
        assert canonical(folded) == canonical(tracing.trace(module, given))


@pytest.mark.parametrize(
    "make",
    [tied, shared, lambda: FromTwoBefore(blocks(7)), lambda: ByIndex(blocks(12)), lambda: ByIndex(blocks(6))],
    ids=["tied", "shared", "from two before", "fed otherwise, after a repeat", "fed otherwise"],
)
def test_whatever_is_folded_the_graph_is_that_of_the_whole(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two blocks are alike but for who they share with or what they are fed, no block may stand for another."""
    module = to_meta(make(), None)
    found = tracing.trace(module, inputs())
    monkeypatch.setattr(tracing, "_trace_folded", lambda module, inputs: None)
    assert canonical(found) == canonical(tracing.trace(module, inputs()))


def test_the_module_is_whole_again_afterwards() -> None:
    module = Deep(blocks(7))
    names = [name for name, _ in module.named_modules()]
    with without_repeated_blocks(module, [RepeatedBlocks(container="blocks", first=1, length=6)]):
        assert len(module.blocks) == 4
    assert [name for name, _ in module.named_modules()] == names
