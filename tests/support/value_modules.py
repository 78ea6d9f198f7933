"""Modules whose shapes or branches depend on values, so that no trace has them: they become opaque modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8


class LoopedExperts(nn.Module):
    """A mixture of experts as people write it: each expert takes the tokens that chose it."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return result.view_as(x)


class CountsForAChild(nn.Module):
    """Experts of which the module around reads how many rows each has; a module between them is never called itself."""

    class Matrices(nn.Module):
        """Multiplies the rows of each expert, one after the other, by its matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)

        def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
            return torch.cat([part @ weight for part, weight in zip(rows.split(counts), self.weight, strict=True)])

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.matrices = nn.Linear(16, 4), CountsForAChild.Matrices()

        def spread(self, tokens: Tensor) -> Tensor:
            weights, chosen = self.router(tokens).softmax(-1).max(-1)
            order = chosen.argsort(stable=True)
            counts = F.one_hot(chosen, 4).sum(0).tolist()
            mixed = self.matrices(tokens[order], counts) * weights[order, None]
            return torch.zeros_like(tokens).index_add(0, order, mixed)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = CountsForAChild.Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.experts.spread(x.flatten(0, 1)).view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixer, self.last = nn.Linear(16, 16), self.Mixer(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixer(self.first(x)))


class SparseModel(nn.Module):
    """Blocks with an attention that can be traced, and experts that cannot."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.experts = LoopedExperts(width)

        def forward(self, x: Tensor) -> Tensor:
            heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.experts(x)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.blocks = nn.ModuleList(self.Block(16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ExpertsOfHalves(nn.Module):
    """Experts of which the samples above 0 choose two, and those below 0 the other two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = LoopedExperts(16), nn.Linear(16, 16)
        self.experts.router.weight.data = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 16).clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(x))


class PositiveRows(nn.Module):
    """Takes the rows above 0, in the root; the loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden.index_put((hidden > 0,), hidden[hidden > 0].sqrt())
        return F.mse_loss(self.last(hidden.tanh()), target)


class CountedLabels(nn.Module):
    """Averages over the labels that count, whose number differs from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        return F.cross_entropy(self.head(x)[kept], labels[kept])


class TiedLabels(nn.Module):
    """Two tables and a head of one weight, in a forward that averages over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other, self.head = nn.Embedding(24, 16), nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.other.weight = self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        kept = labels != -100
        scores = self.head(self.table(ids) + self.other(ids.roll(1, 1)))
        return F.cross_entropy(scores[kept], labels[kept])


class PaddedLabels(nn.Module):
    """Averages over the labels that are no padding, which has a number of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        kept = labels != 4
        return -self.head(x)[kept].log_softmax(-1).gather(1, labels[kept][:, None]).mean()


class BranchesOnASum(nn.Module):
    """Takes another branch where the sum of the whole batch is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.one(hidden) if hidden.sum() > 0 else self.other(hidden)


class ScaledByStatistics(nn.Module):
    """A module that writes a buffer, and reads it as a Python number."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.largest.mul_(0.5).add_(0.5 * x.detach().abs().max())
            return x / max(self.largest.item(), 1e-3)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(16, 16), self.Scale(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x)))


class StretchesByAMask(nn.Module):
    """Stretches what a mask of its own leaves of each sample; nothing can be stretched where it leaves nothing."""

    class Stretch(nn.Module):
        """Stretches each sample to its whole length."""

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            lengths = [3 * int(count) for count in counts]
            rows = [F.interpolate(row[None, :length].mT, size=6).mT for row, length in zip(x, lengths, strict=True)]
            return torch.cat(rows)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stretch, self.last = nn.Linear(16, 16), self.Stretch(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
        return self.last(self.stretch(self.first(x), counts))


class EnergyAndForces(nn.Module):
    """Fits an energy and its derivative by the input, as models of molecules and of equations do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.energy = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor, forces: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(torch.tanh(self.inner(x)))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return F.mse_loss(-slope, forces) + energy.pow(2).mean()


def _labels(ignored: int = -100) -> Tensor:
    labels = torch.randint(0, 4, (BATCH, 6))
    labels[: BATCH // 2, 2:] = ignored
    return labels


def _unlike_halves() -> Tensor:
    samples = torch.rand(BATCH, 6, 16) + 0.1
    samples[BATCH // 2 :] *= -1
    return samples


VALUE_MODULES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "experts in a loop": lambda: (
        SparseModel(),
        (torch.randint(0, 24, (BATCH, 6)), torch.randint(0, 24, (BATCH, 6))),
    ),
    "counts for a child": lambda: (CountsForAChild(), (torch.randn(BATCH, 6, 16),)),
    "experts that some ranks do not use": lambda: (ExpertsOfHalves(), (_unlike_halves(),)),
    "rows found by values": lambda: (PositiveRows(), (torch.randn(BATCH, 16), torch.randn(BATCH, 4))),
    "a derivative by the input": lambda: (EnergyAndForces(), (torch.randn(BATCH, 16), torch.randn(BATCH, 16))),
    "labels that are counted": lambda: (CountedLabels(), (torch.randn(BATCH, 6, 16), _labels())),
    "a tied weight": lambda: (TiedLabels(), (torch.randint(0, 24, (BATCH, 6)), _labels())),
    "labels of which one is padding": lambda: (PaddedLabels(), (torch.randn(BATCH, 6, 16), _labels(4))),
    "a branch on a sum": lambda: (BranchesOnASum(), (torch.randn(BATCH, 16),)),
    "scaled by a buffer": lambda: (ScaledByStatistics(), (torch.randn(BATCH, 16),)),
    "stretched by a mask": lambda: (StretchesByAMask(), (torch.randn(BATCH, 6, 16),)),
}

LABELS_ALONE = ("labels that are counted", "a tied weight", "labels of which one is padding")
"""Those in which a mask selects elements for the loss alone (`planner.model_rewrites.selected_rows`)."""
