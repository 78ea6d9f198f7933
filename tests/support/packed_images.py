"""A small model whose images are packed: a table says the size of each, in patches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MARK = 1
"""The token that stands for four patches of an image."""


class PackedEncoder(nn.Module):
    """Attention over the patches of each image, by a loop over images, and one feature for each four patches."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch, self.out = nn.Linear(12, width), nn.Linear(4 * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))

    def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
        x = self.patch(patches)
        rows = [torch.arange(t * h * w, device=x.device) / (h * w) for t, h, w in sizes.tolist()]
        x = x + torch.cat(rows).to(x.dtype)[:, None]
        lengths = sizes.prod(-1).tolist()
        for layer in self.layers:
            images = (torch.split(each, lengths) for each in layer(x).chunk(3, -1))
            attended = [
                F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]
                for q, k, v in zip(*images, strict=True)
            ]
            x = x + torch.cat(attended)
        return self.out(x.view(-1, 4 * x.shape[-1]))


class SeesImages(nn.Module):
    """A model whose text has a mark for each feature of its images."""

    def __init__(self, vocabulary: int = 64, width: int = 16) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(vocabulary, width), PackedEncoder(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor, labels: Tensor) -> Tensor:
        features = torch.cat(torch.split(self.encoder(patches, sizes), (sizes.prod(-1) // 4).tolist()), dim=0)
        x = self.with_features(self.embed(ids), ids == MARK, features)
        logits = self.head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def with_features(self, x: Tensor, marks: Tensor, features: Tensor) -> Tensor:
        """Return the embeddings ``x`` with the features in place of the marks."""
        return x.masked_scatter(marks.unsqueeze(-1), features)


class AddsToMarks(SeesImages):
    """Adds the features to the embeddings of the marks, as Qwen3-VL does in its first layers."""

    def with_features(self, x: Tensor, marks: Tensor, features: Tensor) -> Tensor:
        x = x.clone()
        x[marks, :] = x[marks, :] + features
        return x


def inputs(samples: int = 8, sizes: tuple[tuple[int, int, int], ...] = ((1, 2, 4), (1, 4, 4))) -> dict[str, Any]:
    """Return the arguments of a call with images of these sizes, frames x height x width, in each sample."""
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor(sizes * samples)
    pieces = int(torch.tensor(sizes).prod(-1).sum())
    ids = torch.randint(2, 64, (samples, 16), generator=generator)
    ids[:, 2 : 2 + pieces // 4] = MARK
    return {
        "ids": ids,
        "patches": torch.randn(samples * pieces, 12, generator=generator),
        "sizes": table,
        "labels": torch.randint(0, 64, (samples, 16), generator=generator),
    }
