"""100 plain torch modules of the kinds that people write, and 20 vision models in the manner of well-known families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from covered import plain_convolution, plain_sequence, plain_tabular, plain_unusual, plain_vision
from covered.plain_sequence import RMSNorm
from covered.plain_unusual import Make, Parts, Residual, mlp, parameter
from torch import Tensor, nn, randint, randn


@dataclass(frozen=True, slots=True)
class PlainCase:
    """A module: ``make()`` returns it and the arguments of one call (a tuple or a dict), for a batch of 8."""

    name: str
    kind: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]]


class Gated(Parts):
    """A linear layer into two halves, one the gate of the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x), dim=-1))


class TiedLayers(Parts):
    """Goes back through the transposed weight of its first layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x, self.layer.weight, self.layer.bias))
        return F.linear(hidden, self.layer.weight.t(), self.bias)


class ByHand(Parts):
    """Parameters of its own, by matmul and einsum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.first + self.bias)
        return torch.einsum("bi,kij,bj->bk", hidden, self.bilinear, hidden) + torch.matmul(hidden, self.last)


class Collections(Parts):
    """Weights in a ParameterList and a ParameterDict."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.silu(x @ weight) * self.scales["inner"]
        return F.linear(x, self.scales["out"])


class ManyHeads(Parts):
    """A head a task, in a ModuleDict; a dict of outputs."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {task: head(hidden) for task, head in self.heads.items()}


class CalledTwice(Parts):
    """One net on both sides of a pair, in both orders."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.net(torch.cat([a, b], -1)) - self.net(torch.cat([b, a], -1))


class SoftGate(Parts):
    """Three nets mixed by a softmax gate."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([net(x) for net in self.nets], -1)
        return (outputs * F.softmax(self.gate(x), -1).unsqueeze(1)).sum(-1)


class ComplexStream(Parts):
    """A residual stream of complex numbers with complex weights."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.real(x), self.imaginary(x))
        for weight in self.weights:
            turned = z @ torch.view_as_complex(weight)
            z = z + torch.polar(torch.tanh(turned.abs()), turned.angle())
        return self.head(torch.cat([z.real, z.imag], -1))


class Scores(NamedTuple):
    """What `ActorCritic` returns."""

    policy: Tensor
    value: Tensor


class ActorCritic(Parts):
    """Returns a named tuple."""

    def forward(self, x: Tensor) -> Scores:
        hidden = self.trunk(x)
        return Scores(policy=self.policy(hidden).log_softmax(-1), value=self.value(hidden).squeeze(-1))


class NestedInputs(Parts):
    """Takes dicts of lists."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        left, right = batch["views"]
        return self.net(torch.cat([left["features"], right["features"] * batch["weight"]], -1))


class WithOptions(Parts):
    """Keyword-only arguments, one of which may be None."""

    def forward(self, x: Tensor, *, mask: Tensor, context: Tensor | None = None, scale: float = 1.0) -> Tensor:
        pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        if context is not None:
            pooled = pooled + self.context(context)
        return self.head(pooled) * scale


class Tempered(Parts):
    """Takes a scalar tensor."""

    def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
        return F.softmax(self.net(x) / temperature, -1)


class LowRank(nn.Module):
    """A frozen linear layer with an update of low rank that is trained."""

    def __init__(self, size: int, after: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(size, after).requires_grad_(False)
        self.a, self.b = nn.Parameter(randn(rank, size) * 0.02), nn.Parameter(torch.zeros(after, rank))
        self.drop, self.scale = nn.Dropout(0.05), 16 / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.drop(x) @ self.a.T @ self.b.T * self.scale


class Modulated(Parts):
    """Features scaled and shifted by a condition, as in FiLM."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gamma, beta = self.film(condition)[:, None].chunk(2, -1)
        return self.head(F.relu((1 + gamma) * self.norm(self.net(x)) + beta))


class Hypernetwork(Parts):
    """Another net computes the weights of each sample's layer."""

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight, bias = self.weights(task).split([64 * 16, 16], -1)
        hidden = F.relu(torch.baddbmm(bias.unsqueeze(1), x.unsqueeze(1), weight.view(-1, 64, 16)))
        return self.head(hidden.squeeze(1))


class EulerSteps(Parts):
    """An ordinary differential equation in eight Euler steps."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(8):
            time = torch.full_like(x[:, :1], i / 8)
            x = x + self.field(torch.cat([x, time], 1)) / 8
        return self.head(x)


class Flow(Parts):
    """Affine coupling layers; the negative log likelihood."""

    def forward(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(x.shape[0])
        for net in self.nets:
            kept, changed = x.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([changed * scale.exp() + shift, kept], 1)
            log_det = log_det + scale.sum(1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(1) + log_det).mean()


class Autoencoder(Parts):
    """Its loss is the error of what it builds again."""

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class VariationalAutoencoder(Parts):
    """Samples its code; gives what it builds again and the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        again = self.decoder(code)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return again, F.mse_loss(again, x, reduction="sum") / x.shape[0] + divergence


class Siamese(Parts):
    """One net on two inputs; the loss of their cosine."""

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        return F.cosine_embedding_loss(self.net(a), self.net(b), same, margin=0.2)


class Triplets(Parts):
    """An anchor, what it shall be near to and what not."""

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return self.loss(self.net(anchor), self.net(near), self.net(far))


class Contrastive(Parts):
    """Two views of each sample among all views of the batch."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.net(torch.cat([a, b])), dim=1)
        scores = (z @ z.T) * self.log_scale.exp()
        scores = scores.masked_fill(torch.eye(z.shape[0], dtype=torch.bool, device=z.device), float("-inf"))
        places = torch.arange(z.shape[0], device=z.device)
        return F.cross_entropy(scores, places.roll(a.shape[0]))


class Adversaries(Parts):
    """A generator and a discriminator with both their losses."""

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        fake = self.generator(noise)
        judged = self.discriminator(torch.cat([real, fake.detach()])).squeeze(1)
        truth = torch.cat([torch.ones_like(judged[: len(real)]), torch.zeros_like(judged[len(real) :])])
        fooled = F.softplus(-self.discriminator(fake)).mean()
        return F.binary_cross_entropy_with_logits(judged, truth), fooled


class Smoothed(Parts):
    """Cross entropy with smoothed and ignored labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=-100)


class ManyTasks(Parts):
    """Three losses, each weighed by a learned uncertainty."""

    def forward(self, x: Tensor, tags: Tensor, price: Tensor, box: Tensor) -> Tensor:
        hidden = self.trunk(x)
        tagging = F.binary_cross_entropy_with_logits(self.tags(hidden), tags, pos_weight=self.positive)
        pricing = F.l1_loss(self.price(hidden).squeeze(-1), price)
        losses = torch.stack([tagging, pricing, F.smooth_l1_loss(self.box(hidden), box, beta=0.5)])
        return (losses * torch.exp(-self.log_variance) + self.log_variance).sum()


def x(size: int = 64) -> Tensor:
    """A batch of vectors."""
    return randn(8, size)


def dropped() -> nn.Module:
    """Batch norms and dropout."""
    first = (nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5))
    return nn.Sequential(*first, nn.Linear(128, 64), nn.BatchNorm1d(64), nn.LeakyReLU(), nn.Linear(64, 10))


def by_hand() -> nn.Module:
    """The parts of `ByHand`."""
    parts = {"bilinear": nn.Parameter(randn(10, 32, 32) / 32), "last": parameter(32, 10)}
    return ByHand(first=parameter(64, 32), bias=nn.Parameter(torch.zeros(32)), **parts)


def collections() -> nn.Module:
    """The parts of `Collections`."""
    scales = nn.ParameterDict({"inner": torch.ones(64), "out": parameter(10, 64)})
    return Collections(weights=nn.ParameterList(parameter(64, 64) for _ in range(3)), scales=scales)


def complex_stream() -> nn.Module:
    """The parts of `ComplexStream`."""
    weights = nn.ParameterList(parameter(32, 32, 2) / 8 for _ in range(2))
    return ComplexStream(real=nn.Linear(64, 32), imaginary=nn.Linear(64, 32), weights=weights, head=nn.Linear(64, 10))


def modulated() -> nn.Module:
    """The parts of `Modulated`, for a condition of 16 numbers."""
    return Modulated(film=nn.Linear(16, 128), norm=nn.LayerNorm(64), net=mlp(64, 64), head=nn.Linear(64, 3))


def many_tasks() -> nn.Module:
    """The parts of `ManyTasks`."""
    heads = {"tags": nn.Linear(64, 5), "price": nn.Linear(64, 1), "box": nn.Linear(64, 4)}
    log_variance = nn.Parameter(torch.zeros(3))
    return ManyTasks(trunk=mlp(64, 128, 64), **heads, positive=torch.full((5,), 2.0), log_variance=log_variance)


def nested() -> dict[str, Any]:
    """The batch of `NestedInputs`."""
    return {"views": [{"features": x()}, {"features": x()}], "weight": torch.rand(8, 1)}


def trunk(kind: type[Parts], **heads: nn.Module) -> nn.Module:
    """A trunk of 64 features under heads."""
    return kind(trunk=nn.Sequential(*mlp(64, 128, 64), nn.ReLU()), **heads)


MODULES: tuple[tuple[str, str, Make], ...] = (
    ("MLP", "mlp", lambda: (mlp(64, 256, 256, 10), (x(),))),
    (
        "residual MLP",
        "mlp",
        lambda: (nn.Sequential(*(Residual(nn.LayerNorm(64), mlp(64, 256, 64)) for _ in range(3))), (x(),)),
    ),
    ("gated MLP", "mlp", lambda: (Gated(up=nn.Linear(64, 256), down=nn.Linear(128, 64)), (randn(8, 16, 64),))),
    ("batch norm and dropout", "normalization", lambda: (dropped(), (x(),))),
    ("RMS norm by hand", "normalization", lambda: (nn.Sequential(RMSNorm(64), *mlp(64, 256, 64), RMSNorm(64)), (x(),))),
    ("tied layers", "mlp", lambda: (TiedLayers(layer=nn.Linear(64, 32), bias=nn.Parameter(torch.zeros(64))), (x(),))),
    ("parameters by hand", "mlp", lambda: (by_hand(), (x(),))),
    ("ParameterList and ParameterDict", "mlp", lambda: (collections(), (x(),))),
    (
        "ModuleDict of heads",
        "mlp",
        lambda: (trunk(ManyHeads, heads=nn.ModuleDict({"age": nn.Linear(64, 1), "kind": nn.Linear(64, 7)})), (x(),)),
    ),
    ("module called twice", "mlp", lambda: (CalledTwice(net=mlp(128, 64, 1)), (x(), x()))),
    ("sizes that nothing divides", "mlp", lambda: (mlp(63, 127, 31, 3, activation=nn.Tanh), (x(63),))),
    (
        "softmax gate",
        "experts",
        lambda: (SoftGate(nets=nn.ModuleList(mlp(64, 128, 10) for _ in range(3)), gate=nn.Linear(64, 3)), (x(),)),
    ),
    ("complex stream", "mlp", lambda: (complex_stream(), (x(),))),
    (
        "named tuple output",
        "mlp",
        lambda: (trunk(ActorCritic, policy=nn.Linear(64, 6), value=nn.Linear(64, 1)), (x(),)),
    ),
    ("nested inputs", "mlp", lambda: (NestedInputs(net=mlp(128, 128, 10)), (nested(),))),
    (
        "keyword-only mask, no context",
        "mlp",
        lambda: (
            WithOptions(context=nn.Linear(16, 64).requires_grad_(False), head=mlp(64, 128, 10)),
            {"x": randn(8, 16, 64), "mask": torch.ones(8, 16), "context": None, "scale": 0.5},
        ),
    ),
    ("scalar tensor input", "mlp", lambda: (Tempered(net=mlp(64, 128, 10)), (x(), torch.tensor(0.7)))),
    ("LoRA", "mlp", lambda: (nn.Sequential(LowRank(64, 128), nn.ReLU(), LowRank(128, 64)), (randn(8, 16, 64),))),
    ("FiLM", "mlp", lambda: (modulated(), (randn(8, 16, 64), x(16)))),
    ("hypernetwork", "mlp", lambda: (Hypernetwork(weights=mlp(8, 32, 1040), head=nn.Linear(16, 3)), (x(), x(8)))),
    (
        "Euler steps",
        "mlp",
        lambda: (EulerSteps(field=mlp(65, 128, 64, activation=nn.Tanh), head=nn.Linear(64, 3)), (x(),)),
    ),
    ("coupling flow", "loss", lambda: (Flow(nets=nn.ModuleList(mlp(32, 64, 64) for _ in range(4))), (x(),))),
    ("autoencoder", "loss", lambda: (Autoencoder(encoder=mlp(64, 32, 8), decoder=mlp(8, 32, 64)), (x(),))),
    (
        "variational autoencoder",
        "loss",
        lambda: (VariationalAutoencoder(encoder=mlp(64, 128, 32), decoder=mlp(16, 128, 64)), (x(),)),
    ),
    ("siamese", "loss", lambda: (Siamese(net=mlp(64, 128, 32)), (x(), x(), torch.tensor([1.0, -1.0]).repeat(4)))),
    ("triplets", "loss", lambda: (Triplets(net=mlp(64, 128, 32), loss=nn.TripletMarginLoss(0.5)), (x(), x(), x()))),
    (
        "contrastive",
        "loss",
        lambda: (Contrastive(net=mlp(64, 128, 32), log_scale=nn.Parameter(torch.tensor(2.0))), (x(), x())),
    ),
    ("GAN", "loss", lambda: (Adversaries(generator=mlp(16, 128, 64), discriminator=mlp(64, 128, 1)), (x(), x(16)))),
    (
        "smoothed, ignored labels",
        "loss",
        lambda: (Smoothed(net=mlp(64, 257)), (randn(8, 16, 64), randint(257, (8, 16)))),
    ),
    ("weighed tasks", "loss", lambda: (many_tasks(), (x(), randint(2, (8, 5)).float(), randn(8), randn(8, 4)))),
)
"""30 cases: name, kind, and how the module and the arguments of one call are made."""

OTHERS = (plain_tabular.CASES, plain_sequence.CASES, plain_convolution.CASES, plain_unusual.CASES)

PLAIN: tuple[PlainCase, ...] = tuple(PlainCase(*case) for cases in (MODULES, *OTHERS) for case in cases)
VISION: tuple[PlainCase, ...] = tuple(PlainCase(*case) for case in plain_vision.VISION)
