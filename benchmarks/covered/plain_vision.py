"""Vision models written out in the manner of well-known families."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from covered.plain_sequence import block
from covered.plain_unusual import Make, Parts, Residual, mlp
from torch import Tensor, nn, randn

Activation = Callable[[], nn.Module]


def conv(
    size: int, after: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Activation = nn.ReLU
) -> nn.Module:
    """A convolution, its batch norm and an activation."""
    layer = nn.Conv2d(size, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), act())


def head(size: int, classes: int = 10) -> nn.Sequential:
    """Average pooling and a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, classes))


def images() -> tuple[Tensor]:
    """The arguments of most calls."""
    return (randn(8, 3, 32, 32),)


def basic(size: int, after: int, stride: int = 1) -> nn.Module:
    """Two convolutions and a shortcut."""
    shortcut = None if size == after and stride == 1 else conv(size, after, 1, stride, act=nn.Identity)
    body = Residual(conv(size, after, 3, stride), conv(after, after, act=nn.Identity), shortcut=shortcut)
    return nn.Sequential(body, nn.ReLU())


def bottleneck(size: int, after: int, middle: int, stride: int = 1, groups: int = 1, squeeze: int = 0) -> nn.Module:
    """Narrow, 3x3 (grouped), wide; with squeeze-and-excite if asked."""
    shortcut = None if size == after and stride == 1 else conv(size, after, 1, stride, act=nn.Identity)
    gate = [SqueezeExcite(middle, squeeze)] if squeeze else []
    body = (
        conv(size, middle, 1),
        conv(middle, middle, 3, stride, groups),
        *gate,
        conv(middle, after, 1, act=nn.Identity),
    )
    return nn.Sequential(Residual(*body, shortcut=shortcut), nn.ReLU())


class SqueezeExcite(nn.Module):
    """Channels gated by their means."""

    def __init__(self, size: int, middle: int, gate: Activation = nn.Sigmoid) -> None:
        super().__init__()
        self.reduce, self.expand, self.gate = nn.Conv2d(size, middle, 1), nn.Conv2d(middle, size, 1), gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))))


def inverted(
    size: int, after: int, stride: int = 1, act: Activation = nn.ReLU6, squeeze: bool = False, grow: int = 4
) -> nn.Module:
    """An inverted residual: wide, depthwise, narrow without activation."""
    wide = grow * size
    gate = [SqueezeExcite(wide, size // 4, nn.Hardsigmoid)] if squeeze else []
    body = (
        conv(size, wide, 1, act=act),
        conv(wide, wide, 3, stride, wide, act),
        *gate,
        conv(wide, after, 1, act=nn.Identity),
    )
    return Residual(*body) if size == after and stride == 1 else nn.Sequential(*body)


class DenseLayer(Parts):
    """Concatenates its new features to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def dense(size: int, layers: int, grow: int = 16) -> list[nn.Module]:
    """A dense block and the transition that halves it."""

    def layer(i: int) -> nn.Module:
        norms = nn.BatchNorm2d(size + i * grow), nn.BatchNorm2d(4 * grow)
        narrow = nn.Conv2d(size + i * grow, 4 * grow, 1, bias=False)
        body = (norms[0], nn.ReLU(), narrow, norms[1], nn.ReLU(), nn.Conv2d(4 * grow, grow, 3, padding=1, bias=False))
        return DenseLayer(body=nn.Sequential(*body))

    after = size + layers * grow
    return [*(layer(i) for i in range(layers)), conv(after, after // 2, 1), nn.AvgPool2d(2)]


class Permute(nn.Module):
    """Permutes dims."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


class Scale(nn.Module):
    """A learned scale of channels, the last dim."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((size,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def convnext_block(size: int) -> nn.Module:
    """A large depthwise convolution, and an MLP with channels last."""
    net = (Permute(0, 2, 3, 1), nn.LayerNorm(size), *mlp(size, 4 * size, size, activation=nn.GELU), Scale(size))
    return Residual(nn.Conv2d(size, size, 7, padding=3, groups=size), *net, Permute(0, 3, 1, 2))


def patches(size: int = 64, patch: int = 8) -> nn.Module:
    """Tokens of an image's patches."""
    return nn.Sequential(nn.Conv2d(3, size, patch, patch), nn.Flatten(2), Permute(0, 2, 1))


class VisionTransformer(nn.Module):
    """Patches with a class token (and one for distillation, with its own head) and learned positions."""

    def __init__(self, distilled: bool = False) -> None:
        super().__init__()
        extra = 2 if distilled else 1
        self.patches, self.blocks, self.norm = patches(), nn.Sequential(block(), block()), nn.LayerNorm(64)
        self.extra = nn.Parameter(torch.zeros(1, extra, 64))
        self.positions = nn.Parameter(torch.randn(1, 16 + extra, 64) * 0.02)
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(extra))

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = self.patches(images)
        x = torch.cat([self.extra.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = self.norm(self.blocks(x))
        outputs = tuple(linear(x[:, i]) for i, linear in enumerate(self.heads))
        return outputs if len(outputs) > 1 else outputs[0]


class WindowAttention(nn.Module):
    """Attention in windows of a (batch, height, width, size), rolled by half a window if asked, with its mask."""

    def __init__(self, size: int, side: int, window: int = 4, shift: int = 0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.window, self.shift, self.table = window, shift, nn.Parameter(torch.zeros((2 * window - 1) ** 2, 4))
        place = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        offset = place[:, None] - place[None, :] + window - 1
        self.register_buffer("index", offset[..., 0] * (2 * window - 1) + offset[..., 1])
        band = torch.bucketize(torch.arange(side), torch.tensor([side - window, side - shift]), right=True) * bool(
            shift
        )
        region = self.split((3 * band[:, None] + band[None, :]).view(1, side, side, 1)).squeeze(-1)
        self.register_buffer("mask", (region[:, None, :] != region[:, :, None]) * -100.0)

    def split(self, x: Tensor) -> Tensor:
        """The windows, as a batch of sequences."""
        batch, side, _, size = x.shape
        x = x.view(batch, side // self.window, self.window, side // self.window, self.window, size)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, size = x.shape
        y = self.split(torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(y).view(y.shape[0], y.shape[1], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index].permute(2, 0, 1) + self.mask.repeat(batch, 1, 1).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
        y = self.out(y.reshape(y.shape[0], -1, size))
        many = side // self.window
        y = y.view(batch, many, many, self.window, self.window, size).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(y.reshape(batch, side, side, size), (self.shift, self.shift), (1, 2))


class ReducedAttention(nn.Module):
    """Attention of all places to keys and values of a reduced image."""

    def __init__(self, size: int, ratio: int = 2) -> None:
        super().__init__()
        self.norm, self.reduce = nn.GroupNorm(1, size), nn.Conv2d(size, size, ratio, ratio)
        self.q, self.kv, self.out = nn.Linear(size, size), nn.Linear(size, 2 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h.flatten(2).transpose(1, 2)).unflatten(-1, (4, -1)).transpose(1, 2)
        kv = self.kv(self.reduce(h).flatten(2).transpose(1, 2))
        k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in kv.chunk(2, -1))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).reshape(x.shape)


class PoolMixer(nn.Module):
    """A place's neighbourhood mean, less itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x


class ConvolutionsThenBlocks(Parts):
    """Convolutions, then transformer layers over the places."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(x)
        tokens = x.flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


def mixer_block() -> nn.Module:
    """An MLP over 16 tokens and an MLP over 64 channels."""
    over_tokens = (nn.LayerNorm(64), Permute(0, 2, 1), mlp(16, 32, 16, activation=nn.GELU), Permute(0, 2, 1))
    return nn.Sequential(Residual(*over_tokens), Residual(nn.LayerNorm(64), mlp(64, 256, 64, activation=nn.GELU)))


def channel_mlp(size: int) -> nn.Module:
    """A residual MLP of 1x1 convolutions."""
    return Residual(nn.GroupNorm(1, size), nn.Conv2d(size, 4 * size, 1), nn.GELU(), nn.Conv2d(4 * size, size, 1))


def swin_block(size: int, side: int, shift: int) -> nn.Module:
    """Window attention and an MLP."""
    net = mlp(size, 4 * size, size, activation=nn.GELU)
    return nn.Sequential(WindowAttention(size, side, shift=shift), Residual(nn.LayerNorm(size), net))


class PatchMerging(Parts):
    """Four neighbours become one place of twice the size."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduce(self.norm(x))


def resnet18() -> nn.Module:
    """Four stages of two basic blocks."""
    stages = [
        m for i, o, s in ((16, 16, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2)) for m in (basic(i, o, s), basic(o, o))
    ]
    return nn.Sequential(conv(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1), *stages, head(128))


def bottlenecks(groups: int = 1, wide: int = 1, squeeze: int = 0) -> nn.Module:
    """Three stages of bottlenecks: of ResNet-50, of ResNeXt (groups), of a wide ResNet, of RegNet (also squeezed)."""
    stages = []
    for size, after, stride in ((32, 64, 1), (64, 128, 2), (128, 256, 2)):
        middle = wide * after // 4
        stages += [
            bottleneck(size, after, middle, stride, groups, squeeze),
            bottleneck(after, after, middle, 1, groups, squeeze),
        ]
    return nn.Sequential(conv(3, 32, 3, 2), *stages, head(256))


def vgg() -> nn.Module:
    """Pairs of convolutions and pooling, and a wide classifier with dropout."""
    pairs = [m for i, o in ((3, 16), (16, 32), (32, 64)) for m in (conv(i, o), conv(o, o), nn.MaxPool2d(2))]
    return nn.Sequential(*pairs, nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(True), nn.Dropout(), nn.Linear(256, 10))


def alexnet() -> nn.Module:
    """Large kernels first, response norm, and two dropped-out linear layers."""
    first = (nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2))
    second = (nn.Conv2d(32, 64, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(
        *first, *second, nn.Dropout(), nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 10)
    )


def mobilenet(act: Activation = nn.ReLU6, squeeze: bool = False, grow: int = 4) -> nn.Module:
    """Inverted residuals: of version 2, of version 3 (hard-swish, squeezed), of EfficientNet (SiLU, squeezed, wide)."""
    shapes = ((16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1))
    blocks = [inverted(size, after, stride, act, squeeze, grow) for size, after, stride in shapes]
    return nn.Sequential(conv(3, 16, 3, 2, act=act), *blocks, conv(40, 160, 1, act=act), head(160))


def densenet() -> nn.Module:
    """Two dense blocks of three layers."""
    return nn.Sequential(conv(3, 32, 3, 2), *dense(32, 3), *dense(40, 3), nn.BatchNorm2d(44), nn.ReLU(), head(44))


def convnext() -> nn.Module:
    """Two stages; a strided convolution between them."""
    stages = (convnext_block(32), convnext_block(32), nn.GroupNorm(1, 32), nn.Conv2d(32, 64, 2, 2), convnext_block(64))
    return nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.GroupNorm(1, 32), *stages, head(64))


def mlp_mixer() -> nn.Module:
    """Two mixer layers; the mean of the tokens is classified."""
    pool = (Permute(0, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(patches(), mixer_block(), mixer_block(), nn.LayerNorm(64), *pool)


def swin() -> nn.Module:
    """Two stages: windows and rolled windows, merged patches, one window."""
    first = (nn.Conv2d(3, 32, 4, 4), Permute(0, 2, 3, 1), swin_block(32, 8, 0), swin_block(32, 8, 2))
    merge = PatchMerging(norm=nn.LayerNorm(128), reduce=nn.Linear(128, 64, bias=False))
    return nn.Sequential(*first, merge, swin_block(64, 4, 0), nn.LayerNorm(64), Permute(0, 3, 1, 2), head(64))


def pvt() -> nn.Module:
    """Two stages of attention to a reduced image."""
    first = (nn.Conv2d(3, 32, 4, 4), ReducedAttention(32, 4), channel_mlp(32))
    return nn.Sequential(*first, nn.Conv2d(32, 64, 2, 2), ReducedAttention(64, 2), channel_mlp(64), head(64))


def poolformer() -> nn.Module:
    """Two stages of pooling as the mixer."""

    def stage(size: int) -> tuple[nn.Module, ...]:
        return (Residual(nn.GroupNorm(1, size), PoolMixer()), channel_mlp(size))

    return nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), *stage(32), nn.Conv2d(32, 64, 3, 2, 1), *stage(64), head(64))


def efficientformer() -> nn.Module:
    """A convolutional stem, pooling in the first stage, attention over tokens in the last."""
    first = (Residual(PoolMixer()), Residual(conv(32, 128, 1, act=nn.GELU), conv(128, 32, 1, act=nn.Identity)))
    stem = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), *first, conv(32, 64, 3, 2, act=nn.Identity))
    return ConvolutionsThenBlocks(
        convolutions=stem, blocks=block(), positions=torch.zeros(1, 16, 64), head=nn.Linear(64, 10)
    )


def coatnet() -> nn.Module:
    """Inverted residuals with squeeze-and-excite, then transformer layers over the places."""
    stem = nn.Sequential(
        conv(3, 32, 3, 2, act=nn.GELU), inverted(32, 32, 1, nn.GELU, True), inverted(32, 64, 2, nn.GELU, True)
    )
    parts = {"convolutions": stem, "blocks": nn.Sequential(block(), block()), "head": nn.Linear(64, 10)}
    return ConvolutionsThenBlocks(**parts, positions=nn.Parameter(torch.randn(1, 64, 64) * 0.02))


VISION: tuple[tuple[str, str, Make], ...] = (
    ("resnet18", "vision", lambda: (resnet18(), images())),
    ("resnet50", "vision", lambda: (bottlenecks(), images())),
    ("resnext", "vision", lambda: (bottlenecks(groups=8, wide=2), images())),
    ("wide resnet", "vision", lambda: (bottlenecks(wide=2), images())),
    ("densenet", "vision", lambda: (densenet(), images())),
    ("vgg", "vision", lambda: (vgg(), images())),
    ("alexnet", "vision", lambda: (alexnet(), images())),
    ("mobilenet v2", "vision", lambda: (mobilenet(), images())),
    ("mobilenet v3", "vision", lambda: (mobilenet(nn.Hardswish, squeeze=True), images())),
    ("efficientnet", "vision", lambda: (mobilenet(nn.SiLU, squeeze=True, grow=6), images())),
    ("convnext", "vision", lambda: (convnext(), images())),
    ("regnet", "vision", lambda: (bottlenecks(groups=4, wide=4, squeeze=8), images())),
    ("mlp-mixer", "vision", lambda: (mlp_mixer(), images())),
    ("vit", "vision", lambda: (VisionTransformer(), images())),
    ("deit", "vision", lambda: (VisionTransformer(distilled=True), images())),
    ("swin", "vision", lambda: (swin(), images())),
    ("pvt", "vision", lambda: (pvt(), images())),
    ("poolformer", "vision", lambda: (poolformer(), images())),
    ("efficientformer", "vision", lambda: (efficientformer(), images())),
    ("coatnet", "vision", lambda: (coatnet(), images())),
)
"""20 models: name, kind, and how the module and the arguments of one call are made."""
