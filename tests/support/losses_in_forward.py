"""Losses as people compute them in a forward, for `support.any_modules`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TeacherAndStudent(nn.Module):
    """A frozen teacher, run without gradients, and a student; returns the error between them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).tanh()
        return F.mse_loss(self.student(x), target)


class TwoLosses(nn.Module):
    """Returns two numbers, both of which are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).relu()
        return self.left(hidden).square().mean(), self.right(hidden).abs().mean()


class Shifted(nn.Module):
    """Shifts its labels by assignments, as encoder-decoders do, and averages over those that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        shifted = ids.new_zeros(ids.shape)
        shifted[..., 1:] = ids[..., :-1].clone()
        shifted[..., 0] = 3
        losses = F.cross_entropy(self.head(self.table(shifted)).flatten(0, 1), ids.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()


class Classifier(nn.Module):
    """Averages over the labels that are given, smoothed and weighted by class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
        self.loss = nn.CrossEntropyLoss(torch.arange(1.0, 6.0), ignore_index=2, label_smoothing=0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.body(x), labels)


class TwoTowers(nn.Module):
    """Compares each question of a batch with the answers of all others, in the forward that pools both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.questions, self.answers = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def pooled(self, tower: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        mask = (ids > 3).unsqueeze(-1)
        hidden = (tower(self.table(ids)) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return nn.functional.normalize(hidden, dim=-1)

    def forward(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        scores = self.pooled(self.questions, questions) @ self.pooled(self.answers, answers).t() * self.scale.exp()
        labels = torch.arange(scores.shape[0], device=scores.device)
        cross_entropy = nn.functional.cross_entropy
        return (cross_entropy(scores, labels) + cross_entropy(scores.t(), labels)) / 2


class Preferences(nn.Module):
    """Prefers one answer to another more than a frozen model does (DPO)."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.reference = (nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)) for _ in range(2))
        self.reference.requires_grad_(requires_grad=False)

    @staticmethod
    def log_probability(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        predicted = model(ids)[:, :-1].log_softmax(-1)
        return (predicted.gather(2, ids[:, 1:].unsqueeze(-1)).squeeze(-1) * mask[:, 1:]).sum(-1)

    def forward(self, better: Tensor, its_mask: Tensor, worse: Tensor, other_mask: Tensor) -> Tensor:
        def margin(model: nn.Module) -> torch.Tensor:
            first, second = (better, its_mask), (worse, other_mask)
            return self.log_probability(model, *first) - self.log_probability(model, *second)

        preferred = margin(self.model)
        with torch.no_grad():
            expected = margin(self.reference)
        return -nn.functional.logsigmoid(0.1 * (preferred - expected)).mean()


class OfTheBatch(nn.Module):
    """Compares classes by how much they overlap in the whole batch, with its mean taken off the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.body(x)
        scores = (scores - scores.mean(0, keepdim=True)) / scores.abs().mean()
        found, wanted = scores.softmax(-1), target.softmax(-1)
        overlap = (2 * (found * wanted).sum((0, 1)) + 1) / (found.sum(dim=[0, -2]) + wanted.sum((0, 1)) + 1)
        return 1 - overlap[1:].mean() + F.mse_loss(scores, target)
