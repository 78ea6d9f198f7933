"""Modules as people write them, each with the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.assigned_parts import Collected, Padded, Rolled, Rotated
from support.attentions import OneHead, Windows
from support.dataclass_modules import Dataclasses, Sample, ToldOf
from support.losses_in_forward import (
    Classifier,
    OfTheBatch,
    Preferences,
    Shifted,
    TeacherAndStudent,
    TwoLosses,
    TwoTowers,
)
from support.shared_parameters import CastsATiedVector, ReadsASibling, ReadsATiedBias, ReadsItsChild, UsesTwice
from torch import Tensor, nn
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

BATCH = 8

_BART_SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}

Made = tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]


class TwoStreams(nn.Module):
    """Layers that project a few vectors beside each sample's tokens, and mix both; nobody reads the last vectors."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.out = (nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, tokens: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
            queries, keys = self.query(tokens), self.key(vectors)
            of_vectors = self.query(vectors).sigmoid()
            mixed = self.out((queries @ keys.mT).softmax(-1) @ keys)
            return tokens + mixed, vectors * of_vectors

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(4, 16))
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.vectors.expand(x.shape[0], -1, -1)
        for layer in self.layers:
            x, vectors = layer(x, vectors)
        return x.square().mean()


class SharedQueries(nn.Module):
    """Learned queries, the same for all samples, that attend to each sample's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 16))
        self.query, self.key, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        mixed = (self.query(queries) @ self.key(x).mT).softmax(-1) @ x
        return self.last(queries + mixed).square().mean()


class ScoresAndPlaces(nn.Module):
    """Lists of heads, which FSDP takes for blocks, that read the same features at two scales, as detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.coarser = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.scores, self.places = (nn.ModuleList(nn.Conv2d(16, n, 1) for _ in range(2)) for n in (8, 4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.features(x)
        levels = (first, self.coarser(first))
        scores = [score(level).flatten(2) for score, level in zip(self.scores, levels, strict=True)]
        places = [place(level).flatten(2) for place, level in zip(self.places, levels, strict=True)]
        return torch.cat(scores, 2).square().mean() + torch.cat(places, 2).abs().mean()


class MaskOfItsType(nn.Module):
    """Makes a mask in the dtype of its activations, which needs no gradient, and gives it to a child."""

    class Mixed(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x @ x.mT - 100.0 * (1.0 - mask[None])).softmax(-1) @ x

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Linear(16, 16), self.Mixed()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().type_as(hidden)
        return self.mixed(hidden, mask).square().mean()


class SelfAttention(nn.Module):
    """torch's attention, given one tensor three times."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class CausalTranslator(nn.Module):
    """torch's Transformer, with a mask whose values its code looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.net(source, target, tgt_mask=mask)


class Recurrent(nn.Module):
    """A recurrent layer with a given initial state [layers, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.gru(x, state)[0])


class Residual(nn.Module):
    """An identity on one branch, so that the branches may be laid out differently."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.body = nn.Identity(), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


class Bags(nn.Module):
    """Sums of embeddings, for recommendation."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(24, 16, mode="sum"), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


class Looped(nn.Module):
    """Calls one block several times, as ALBERT does; the first call gets a tensor without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.block(x)
        return F.smooth_l1_loss(x, x.detach().roll(1, -1))


class Masked(nn.Module):
    """An encoder-decoder of transformers, which makes masks of its own, and leaves those out that mask nothing."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _BART_SIZES.items()}
        config = BartConfig(vocab_size=32, d_model=16, max_position_embeddings=16, dropout=0.0, **sizes)
        self.model = BartForConditionalGeneration(config)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


class Causal(nn.Module):
    """A decoder of transformers, called as in most loops: with a mask, and without a word on its cache."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, labels=ids).loss


class Complex(nn.Module):
    """Mixes by a Fourier transform, and turns in the complex plane, by weights that it reads as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.turns = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        turns = torch.view_as_complex(self.turns)
        turned = torch.view_as_complex(self.first(x).unflatten(-1, (8, 2))) * (1 + 2j)
        turned = turned * turns + turned.conj() * turns.conj()
        mixed = torch.fft.fft(torch.view_as_real(turned).flatten(-2), dim=1).real
        return self.last(mixed)


class ListsOfLists(nn.Module):
    """Stages of blocks, of which the inner lists are never called; the blocks of one are called past their hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))
        self.last = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage:
                x = block(x).tanh()
        for block in self.last:
            x = block.forward(x).tanh()
        return x


class Gaussian(nn.Module):
    """Samples nothing, but has a distribution, which checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -torch.distributions.Normal(self.mean(x), F.softplus(self.spread(x))).log_prob(y).mean()


class Skips(nn.Module):
    """Blocks that hand on a state and a part of the result; the last state is not used: its layer has no gradient."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.skip, self.state = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.gelu(self.up(x))
            return x + self.state(hidden), self.skip(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return total.square().mean()


class Filled(nn.Module):
    """Fills a tensor step by step, as recurrences are often written; a child does the filling."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(16, 16)

        def forward(self, out: Tensor, state: Tensor, step: int) -> Tensor:
            state = torch.tanh(self.cell(state))
            out[:, step] = state
            return state

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = self.Step(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, state = torch.zeros(x.shape, device=x.device, dtype=x.dtype), x[:, 0]
        for step in range(x.shape[1]):
            state = self.step(out, state + x[:, step], step)
        return self.head(out)


class Scanned(nn.Module):
    """Adds to slices of a copy of its input, between two other layers."""

    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x.clone()
            for step in range(1, x.shape[1]):
                out[:, step] += out[:, step - 1] / 2
            return out

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scan, self.last = nn.Linear(16, 32), self.Scan(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scan(self.first(x)))


def _rows(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape)


def _padded(length: int) -> Tensor:
    """Return a mask in which every other sample has one token of padding."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[::2, -1] = 0
    return mask


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.ConvTranspose2d(8, 4, 4, stride=2, output_padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _activated() -> nn.Module:
    """Return linear layers with activations as mobile networks and detectors have them."""
    kinds = nn.Hardswish, nn.ReLU6, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU
    layers = [layer for kind in kinds for layer in (nn.Linear(16, 16), kind(inplace=True))]
    return nn.Sequential(*layers, nn.Softplus(), nn.Linear(16, 8))


MODULES: dict[str, Callable[[], Made]] = {
    "a child's weight": lambda: (ReadsItsChild(), (_rows(16),)),
    "a sibling's weight": lambda: (ReadsASibling(), (_rows(16),)),
    "a tied bias": lambda: (ReadsATiedBias(), (_rows(16),)),
    "a tied vector that is cast": lambda: (CastsATiedVector(), (torch.randint(0, 24, (BATCH, 6)),)),
    "two streams": lambda: (TwoStreams(), (_rows(6, 16),)),
    "shared queries": lambda: (SharedQueries(), (_rows(6, 16),)),
    "scores and places": lambda: (ScoresAndPlaces(), (_rows(3, 16, 16),)),
    "a mask of its type": lambda: (MaskOfItsType(), (_rows(6, 16),)),
    "one weight twice": lambda: (UsesTwice(), (_rows(16),)),
    "a teacher without gradients": lambda: (TeacherAndStudent(), (_rows(16),)),
    "two losses": lambda: (TwoLosses(), (_rows(16),)),
    "self-attention": lambda: (SelfAttention(), (_rows(8, 16),)),
    "encoder layers": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2),
        (_rows(8, 16),),
    ),
    "translator": lambda: (CausalTranslator(), (_rows(8, 16), _rows(4, 16))),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(4, 8, 3, padding="same"), nn.ReLU(), nn.Conv1d(8, 4, 3)),
        (_rows(4, 16),),
    ),
    "conv3d": lambda: (nn.Conv3d(4, 8, (1, 2, 2), stride=(1, 2, 2), bias=False), (_rows(4, 2, 8, 8),)),
    "convolutions, norm of groups, pooling": lambda: (_convolutions(), (_rows(4, 16, 16),)),
    "GRU with a state": lambda: (Recurrent(), (_rows(6, 16), torch.randn(1, BATCH, 16))),
    "LSTM": lambda: (nn.LSTM(16, 16, num_layers=2), (torch.randn(6, BATCH, 16),)),
    "identity": lambda: (Residual(), (_rows(4, 16),)),
    "a block in a loop": lambda: (Looped(), (_rows(4, 16),)),
    "shifted labels and a mask": lambda: (Shifted(), (torch.randint(0, 24, (BATCH, 6)), torch.rand(BATCH, 6))),
    "a smoothed loss": lambda: (Classifier(), (_rows(16), torch.randint(0, 5, (BATCH,)))),
    "statistics of the batch": lambda: (OfTheBatch(), (_rows(6, 16), _rows(6, 4))),
    "an encoder-decoder with padding": lambda: (
        Masked(),
        (torch.randint(3, 32, (BATCH, 6)), _padded(6), torch.randint(3, 32, (BATCH, 4))),
    ),
    "a decoder with padding": lambda: (Causal(), (torch.randint(3, 32, (BATCH, 6)), _padded(6))),
    "preferences": lambda: (
        Preferences(),
        (torch.randint(32, (8, 6)), torch.ones(8, 6), torch.randint(32, (8, 6)), torch.ones(8, 6)),
    ),
    "two towers": lambda: (TwoTowers(), (torch.randint(32, (8, 6)), torch.randint(32, (8, 6)))),
    "complex numbers": lambda: (Complex(), (_rows(4, 16),)),
    "lists of lists": lambda: (ListsOfLists(), (_rows(4, 16),)),
    "a distribution": lambda: (Gaussian(), (_rows(16), _rows(4))),
    "a layer without a gradient": lambda: (Skips(), (_rows(4, 16),)),
    "a tensor that a child fills": lambda: (Filled(), (_rows(4, 16),)),
    "a scan in place": lambda: (Scanned(), (_rows(4, 16),)),
    "dataclasses": lambda: (Dataclasses(), (Sample(_rows(16), _rows(16), "name"),)),
    "rotated features": lambda: (Rotated(), (_rows(4, 16),)),
    "rolled tokens": lambda: (Rolled(), (_rows(4, 16),)),
    "collected steps": lambda: (Collected(), (_rows(4, 16),)),
    "one head": lambda: (OneHead(), (_rows(4, 16),)),
    "windows": lambda: (Windows(), (_rows(4, 16),)),
    "padded features": lambda: (Padded(), (_rows(4, 16),)),
    "activations in place": lambda: (_activated(), (_rows(16),)),
    "classes that torch was told of": lambda: (ToldOf(), (_rows(16),)),
    "bags": lambda: (Bags(), (torch.randint(0, 24, (BATCH, 3)),)),
}
