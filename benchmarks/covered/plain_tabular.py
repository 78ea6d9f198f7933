"""Plain modules over categories, sets and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from covered.plain_unusual import Make, Parts, mlp
from torch import Tensor, nn, randint, randn


class Recommender(Parts):
    """Bags of categories and numbers, multiplied in pairs, in the manner of DLRM."""

    def forward(self, numbers: Tensor, categories: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bags = [bag(*bag_of) for bag, *bag_of in zip(self.bags, categories, offsets, strict=True)]
        features = torch.stack([self.bottom(numbers), *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.triu_indices(features.shape[1], features.shape[1], 1, device=numbers.device)
        return torch.sigmoid(self.top(torch.cat([features[:, 0], products[:, rows, columns]], 1)))


class WideAndDeep(Parts):
    """A weight for each value of each feature, beside a net on one embedding a feature; a loss on the clicks."""

    def forward(self, categories: Tensor, numbers: Tensor, clicks: Tensor) -> Tensor:
        embedded = [embed(categories[:, i]) for i, embed in enumerate(self.embeddings)]
        wide = sum(weight(categories[:, i]) for i, weight in enumerate(self.weights))
        logits = wide + self.deep(torch.cat([*embedded, numbers], 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), clicks)


class FactorizationMachine(Parts):
    """Products in pairs of the embeddings of all fields, in one table with an offset a field."""

    def forward(self, fields: Tensor) -> Tensor:
        places = fields + self.offsets
        v = self.embed(places)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return torch.sigmoid(self.bias + self.linear(places).sum((1, 2)) + pairs)


class TwoTowers(Parts):
    """Users against the items of the batch, with a correction for popular items."""

    def forward(self, users: Tensor, history: Tensor, items: Tensor, frequency: Tensor) -> Tensor:
        user = self.user(torch.cat([self.users(users), self.items(history).mean(1)], -1))
        scores = F.normalize(user, dim=-1) @ F.normalize(self.item(self.items(items)), dim=-1).T / 0.05
        return F.cross_entropy(scores - frequency.log(), torch.arange(users.shape[0], device=users.device))


class BagOfWords(Parts):
    """The mean embedding of the words that are not padding."""

    def forward(self, words: Tensor) -> Tensor:
        real = (words != 0).unsqueeze(-1)
        return self.head((self.embed(words) * real).sum(1) / real.sum(1).clamp(min=1))


class GraphConvolution(Parts):
    """Two convolutions over a dense adjacency, normalized by degree."""

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        linked = adjacency + torch.eye(adjacency.shape[-1], device=nodes.device)
        scale = linked.sum(-1).rsqrt()
        linked = scale.unsqueeze(-1) * linked * scale.unsqueeze(-2)
        return self.last(linked @ F.relu(self.first(linked @ nodes))).mean(1)


class EdgeNetwork(Parts):
    """Messages along edges, weighed by a softmax over the edges of a node: scatter_add and index_add."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.embed(nodes)
        pairs = torch.cat([h[source], h[target]], -1)
        weights = self.score(pairs).squeeze(-1).clamp(-10, 10).exp()
        total = weights.new_zeros(nodes.shape[0]).scatter_add(0, target, weights)
        messages = self.message(pairs) * (weights / total[target]).unsqueeze(-1)
        return self.head(F.relu(h + torch.zeros_like(h).index_add_(0, target, messages)))


class DeepSet(Parts):
    """A sum over the members of a set that the mask keeps."""

    def forward(self, members: Tensor, mask: Tensor) -> Tensor:
        return self.rho((self.phi(members) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


class PointNet(Parts):
    """Points turned by a learned 3x3, features by 1x1 convolutions, and their maximum."""

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(3, device=points.device)
        turn = self.turn(points.max(-1).values).view(-1, 3, 3) + eye
        features = self.features(torch.bmm(turn, points)).amax(-1)
        return self.head(features).log_softmax(-1), (turn @ turn.transpose(1, 2) - eye).norm(dim=(1, 2))


def recommender() -> nn.Module:
    """The parts of `Recommender`, for three features."""
    bags = nn.ModuleList(nn.EmbeddingBag(size, 32, mode="sum") for size in (257, 100, 64))
    return Recommender(bottom=mlp(13, 64, 32), bags=bags, top=mlp(38, 64, 1))


def bags() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Arguments of `Recommender`: three categories a sample of each feature."""
    return randn(8, 13), [randint(64, (24,)) for _ in range(3)], [torch.arange(0, 24, 3) for _ in range(3)]


def wide_and_deep() -> nn.Module:
    """The parts of `WideAndDeep`, for three features and five numbers."""
    embeddings = nn.ModuleList(nn.Embedding(size, 16) for size in (257, 100, 31))
    weights = nn.ModuleList(nn.Embedding(size, 1) for size in (257, 100, 31))
    return WideAndDeep(embeddings=embeddings, weights=weights, deep=mlp(53, 128, 64, 1))


def factorization_machine() -> nn.Module:
    """The parts of `FactorizationMachine`, for four fields of 64 values."""
    parts = {"linear": nn.Embedding(256, 1), "bias": nn.Parameter(torch.zeros(1))}
    return FactorizationMachine(embed=nn.Embedding(256, 16), offsets=64 * torch.arange(4), **parts)


def two_towers() -> nn.Module:
    """The parts of `TwoTowers`."""
    tables = {"users": nn.Embedding(257, 32), "items": nn.Embedding(500, 32)}
    return TwoTowers(**tables, user=mlp(64, 128, 32), item=mlp(32, 64, 32))


def edge_network() -> nn.Module:
    """The parts of `EdgeNetwork`."""
    return EdgeNetwork(
        embed=nn.Linear(64, 32), score=nn.Linear(64, 1), message=nn.Linear(64, 32), head=nn.Linear(32, 3)
    )


def point_net() -> nn.Module:
    """The parts of `PointNet`."""
    features = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1))
    return PointNet(turn=mlp(3, 32, 9), features=features, head=mlp(128, 64, 10))


CASES: tuple[tuple[str, str, Make], ...] = (
    ("DLRM with bags", "embedding", lambda: (recommender(), bags())),
    (
        "wide and deep",
        "embedding",
        lambda: (wide_and_deep(), (randint(31, (8, 3)), randn(8, 5), randint(2, (8,)).float())),
    ),
    ("factorization machine", "embedding", lambda: (factorization_machine(), (randint(64, (8, 4)),))),
    (
        "two towers",
        "embedding",
        lambda: (two_towers(), (randint(257, (8,)), randint(500, (8, 16)), randint(500, (8,)), torch.rand(8) + 0.1)),
    ),
    (
        "embedding with max_norm",
        "embedding",
        lambda: (
            BagOfWords(embed=nn.Embedding(257, 64, padding_idx=0, max_norm=1.0), head=nn.Linear(64, 3)),
            (randint(257, (8, 16)),),
        ),
    ),
    (
        "embedding with sparse gradient",
        "embedding",
        lambda: (BagOfWords(embed=nn.Embedding(257, 64, sparse=True), head=nn.Linear(64, 3)), (randint(257, (8, 16)),)),
    ),
    (
        "graph convolution, dense",
        "graph",
        lambda: (
            GraphConvolution(first=nn.Linear(64, 64), last=nn.Linear(64, 10)),
            (randn(8, 16, 64), (torch.rand(8, 16, 16) > 0.7).float()),
        ),
    ),
    ("graph attention over edges", "graph", lambda: (edge_network(), (randn(8, 64), randint(8, (2, 40))))),
    (
        "deep set",
        "set",
        lambda: (
            DeepSet(phi=mlp(64, 128, 64), rho=mlp(64, 64, 10)),
            (randn(8, 16, 64), (torch.arange(16) < 12).float().repeat(8, 1)),
        ),
    ),
    ("PointNet", "set", lambda: (point_net(), (randn(8, 3, 32),))),
)
"""10 cases: name, kind, and how the module and the arguments of one call are made."""
