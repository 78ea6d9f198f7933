"""Plain modules of unusual build: wrapped, parametrized, in other dtypes, with control flow by values; experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, randint, randn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

Make = Callable[[], tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]]


class Parts(nn.Module):
    """A module of the attributes that it is given: children, parameters, buffers (from tensors), values."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


class Residual(nn.Module):
    """The sum of a branch and a shortcut."""

    def __init__(self, *body: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body[0] if len(body) == 1 else nn.Sequential(*body)
        self.shortcut = shortcut if shortcut is not None else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.body(x)


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these sizes with an activation between them."""
    layers = [layer for size, after in pairwise(sizes) for layer in (nn.Linear(size, after), activation())]
    return nn.Sequential(*layers[:-1])


def parameter(*shape: int) -> nn.Parameter:
    """A parameter with values of the scale that a linear layer has."""
    return nn.Parameter(randn(*shape) * shape[-1] ** -0.5)


class RunningMean(Parts):
    """Centres its input by a running mean, which the forward pass updates."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.steps.add_(1)
        return self.net(x - self.mean)


class Distilled(Parts):
    """A student that learns from a frozen teacher, by KL divergence."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / 2, -1)
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), target, reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, labels)


class Autocast(Parts):
    """Runs its body in bfloat16 and its head in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            hidden = self.body(x)
        return self.head(hidden.float())


class Checkpointed(Parts):
    """Blocks whose activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class PerSample(Parts):
    """A bilinear score of two vectors, written for one sample and mapped over the batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def score(a: Tensor, b: Tensor) -> Tensor:
            return torch.tanh(self.weight @ a).dot(b)

        return torch.vmap(score)(self.net(x), y)


class Ensemble(Parts):
    """Four members with stacked weights, run by torch.func over one skeleton."""

    def forward(self, x: Tensor) -> Tensor:
        def member(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.func.functional_call(self.skeleton, {"weight": weight, "bias": bias}, (x,))

        return self.head(torch.vmap(member)(self.weight, self.bias).relu().mean(0))


class InItsOwnDtype(Parts):
    """Casts its input to the dtype of its weights, and its output back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.net[0].weight.dtype)).to(x.dtype)


class BranchOnSum(Parts):
    """Takes one of two branches by the sign of a sum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        return self.left(hidden) if hidden.sum() > 0 else self.right(hidden)


class ScaledByItem(Parts):
    """Divides by the largest magnitude, read to Python."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        largest = hidden.detach().abs().max().item()
        return self.head(hidden / max(largest, 1.0))


class Foreground(Parts):
    """Runs its net only on the rows that the mask keeps, found by nonzero."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows = keep.nonzero().squeeze(1)
        return self.head(x).index_add(0, rows, self.net(x[rows]))


class TokenSelection(Parts):
    """Keeps the eight tokens of the highest score, in their order, and pools them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.score(x).squeeze(-1)
        chosen = scores.topk(8, dim=1).indices.sort(dim=1).values
        kept = x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        weights = scores.gather(1, chosen).softmax(1)
        return self.head((kept * weights.unsqueeze(-1)).sum(1)), scores.sort(1, descending=True).values


class MaskedModelling(Parts):
    """Puts image features in the places of a text's image tokens, and masks the pooling."""

    def forward(self, tokens: Tensor, features: Tensor, image: Tensor, padding: Tensor) -> Tensor:
        hidden = self.embed(tokens).masked_scatter(image.unsqueeze(-1), self.project(features))
        scores = self.score(hidden).squeeze(-1).masked_fill(padding, float("-inf")).softmax(-1)
        return self.head(torch.einsum("bs,bsd->bd", scores, hidden))

    @staticmethod
    def example() -> tuple[Tensor, ...]:
        """Arguments of a call: four image tokens a row, the last four positions padding."""
        position = torch.arange(16).expand(8, 16)
        return randint(257, (8, 16)), randn(32, 48), position < 4, position >= 12


class Prototypes(Parts):
    """Classes by the distance to prototypes, in a permuted order of features."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x).index_select(1, self.order)
        return -torch.cdist(hidden, self.prototypes)


class WithHistogram(Parts):
    """Gives the net a histogram of all values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        histogram = torch.histc(x.detach(), bins=16, min=-3.0, max=3.0) / x.numel()
        return self.net(torch.cat([x, histogram.expand(x.shape[0], -1)], 1))


class ExpertsByIndex(Parts):
    """Two of four experts a token; each runs on the tokens that a boolean index gives it."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        weights, y = weights / weights.sum(-1, keepdim=True), torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            chosen_here = chosen == i
            mine = chosen_here.any(-1)
            y[mine] += expert(tokens[mine]) * (weights * chosen_here).sum(-1)[mine].unsqueeze(-1)
        return y.view_as(x)


class DenseExperts(Parts):
    """Every expert on every token, mixed by the router's weights."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("bsd,edf->bsef", x, self.up) + self.bias)
        return torch.einsum("bsef,efd,bse->bsd", hidden, self.down, self.router(x).softmax(-1))


class ExpertsWithCapacity(Parts):
    """Two of four experts a token, sent by one-hot tensors; tokens over an expert's capacity are dropped."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(-1)
        weights, chosen = gates.topk(2, -1)
        sent = F.one_hot(chosen, 4)
        place = ((sent.flatten(0, 1).cumsum(0) - 1).view_as(sent) * sent).sum(-1)
        slots = F.one_hot(place.clamp(max=self.capacity), self.capacity + 1)[..., : self.capacity]
        combine = torch.einsum("tk,tke,tkc->tec", weights, sent.to(x.dtype), slots.to(x.dtype))
        inputs = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), tokens)
        outputs = torch.bmm(F.relu(torch.bmm(inputs, self.up)), self.down)
        balance = 4 * (gates.mean(0) * sent[:, 0].to(x.dtype).mean(0)).sum()
        return torch.einsum("tec,ecd->td", combine, outputs).view_as(x), balance


@dataclass
class Prediction:
    """What `Classifier` returns."""

    logits: Tensor
    loss: Tensor | None = None


class Classifier(Parts):
    """Returns a dataclass that is no pytree."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Prediction:
        logits = self.net(x)
        return Prediction(logits, None if labels is None else F.cross_entropy(logits, labels))


class Halting(Parts):
    """Repeats one layer until the mean change is small, ten times at most."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(10):
            after = torch.tanh(self.layer(state) + x)
            if (after - state).abs().mean() < 0.05:
                break
            state = after
        return self.head(state)


def initialised() -> nn.Module:
    """A lazy model that one call initialised."""
    net = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(10))
    net(randn(8, 64))
    return net


def checkpointed(reentrant: bool) -> nn.Module:
    """Blocks under one of the two kinds of activation checkpoint."""
    blocks = nn.ModuleList(Residual(nn.LayerNorm(64), mlp(64, 256, 64)) for _ in range(3))
    return Checkpointed(stem=nn.Linear(32, 64), blocks=blocks, head=nn.Linear(64, 10), reentrant=reentrant)


def in_dtype(dtype: torch.dtype) -> nn.Module:
    """A net in another dtype than its input has."""
    return InItsOwnDtype(net=mlp(64, 128, 128, 10, activation=nn.GELU).to(dtype))


def ensemble() -> nn.Module:
    """Four members over one skeleton that is not trained."""
    skeleton = nn.Linear(64, 128).requires_grad_(False)
    return Ensemble(skeleton=skeleton, weight=parameter(4, 128, 64), bias=parameter(4, 128), head=nn.Linear(128, 10))


def branches() -> nn.Module:
    """A stem and its two branches."""
    return BranchOnSum(stem=nn.Linear(64, 64), left=mlp(64, 128, 10), right=nn.Linear(64, 10))


def masked_modelling() -> nn.Module:
    """An embedding with image features of 48 numbers."""
    parts = {"embed": nn.Embedding(257, 64), "project": nn.Linear(48, 64)}
    return MaskedModelling(**parts, score=nn.Linear(64, 1), head=nn.Linear(64, 10))


def distilled() -> nn.Module:
    """A wide teacher, frozen, and a narrow student."""
    return Distilled(teacher=mlp(64, 256, 256, 10).eval().requires_grad_(False), student=mlp(64, 64, 10))


def experts(kind: type[Parts], **parts: object) -> nn.Module:
    """A mixture of four experts of hidden size 128: of one of the two kinds with stacked weights."""
    return kind(router=nn.Linear(64, 4), up=parameter(4, 64, 128), down=parameter(4, 128, 64), **parts)


def experts_by_index() -> nn.Module:
    """The parts of `ExpertsByIndex`."""
    return ExpertsByIndex(router=nn.Linear(64, 4), experts=nn.ModuleList(mlp(64, 128, 64) for _ in range(4)))


def rows() -> tuple[Tensor]:
    """The arguments of most calls: a batch of vectors."""
    return (randn(8, 64),)


CASES: tuple[tuple[str, str, Make], ...] = (
    ("spectral norm", "wrapped", lambda: (nn.Sequential(spectral_norm(nn.Linear(64, 128)), *mlp(128, 128, 1)), rows())),
    (
        "running mean in a buffer",
        "normalization",
        lambda: (RunningMean(net=mlp(64, 128, 10), mean=torch.zeros(64), steps=torch.tensor(0)), rows()),
    ),
    ("distillation from a frozen teacher", "loss", lambda: (distilled(), (randn(8, 64), randint(10, (8,))))),
    ("lazy layers, initialised", "wrapped", lambda: (initialised(), rows())),
    (
        "lazy layers, not initialised",
        "wrapped",
        lambda: (nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.LazyLinear(10)), rows()),
    ),
    ("autocast inside forward", "wrapped", lambda: (Autocast(body=mlp(64, 256, 64), head=nn.Linear(64, 10)), rows())),
    ("checkpoint inside forward", "wrapped", lambda: (checkpointed(False), (randn(8, 16, 32),))),
    ("reentrant checkpoint inside forward", "wrapped", lambda: (checkpointed(True), (randn(8, 16, 32),))),
    (
        "vmap over the batch",
        "wrapped",
        lambda: (PerSample(net=mlp(64, 128, 64), weight=parameter(64, 64)), (randn(8, 64), randn(8, 64))),
    ),
    ("ensemble by torch.func", "wrapped", lambda: (ensemble(), rows())),
    ("float64 module", "wrapped", lambda: (in_dtype(torch.float64), rows())),
    ("bfloat16 module", "wrapped", lambda: (in_dtype(torch.bfloat16), rows())),
    ("torch.compile", "wrapped", lambda: (torch.compile(mlp(64, 128, 10), backend="aot_eager"), rows())),
    ("torch.jit.script", "wrapped", lambda: (torch.jit.script(mlp(64, 128, 10)), rows())),
    ("branch on a sum", "control flow", lambda: (branches(), rows())),
    (
        "loop until the change is small",
        "control flow",
        lambda: (Halting(layer=nn.Linear(64, 64), head=nn.Linear(64, 10)), rows()),
    ),
    (
        "scaled by an item",
        "control flow",
        lambda: (ScaledByItem(stem=mlp(64, 128, 64), head=nn.Linear(64, 10)), rows()),
    ),
    (
        "rows found by nonzero",
        "control flow",
        lambda: (Foreground(net=mlp(64, 128, 10), head=nn.Linear(64, 10)), (randn(8, 64), torch.arange(8) % 3 > 0)),
    ),
    (
        "tokens chosen by top-k and sort",
        "control flow",
        lambda: (TokenSelection(score=nn.Linear(64, 1), head=nn.Linear(64, 10)), (randn(8, 32, 64),)),
    ),
    ("image tokens by masked_scatter", "control flow", lambda: (masked_modelling(), MaskedModelling.example())),
    (
        "distances to prototypes",
        "mlp",
        lambda: (Prototypes(net=mlp(64, 128, 32), order=torch.randperm(32), prototypes=parameter(5, 32)), rows()),
    ),
    ("histogram of the input", "mlp", lambda: (WithHistogram(net=mlp(80, 128, 10)), rows())),
    (
        "dataclass output",
        "mlp",
        lambda: (Classifier(net=mlp(64, 128, 10)), {"x": randn(8, 64), "labels": randint(10, (8,))}),
    ),
    ("experts by boolean index", "experts", lambda: (experts_by_index(), (randn(8, 32, 64),))),
    ("dense experts", "experts", lambda: (experts(DenseExperts, bias=parameter(4, 128)), (randn(8, 32, 64),))),
    ("experts with capacity", "experts", lambda: (experts(ExpertsWithCapacity, capacity=96), (randn(8, 32, 64),))),
)
"""26 cases: name, kind, and how the module and the arguments of one call are made."""
