"""Plain convolutional modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from covered.plain_unusual import Make, Parts, Residual, mlp
from covered.plain_vision import basic, conv, head, images
from torch import Tensor, nn, randint, randn
from torch.nn.utils.parametrizations import weight_norm


class GatedDilated(nn.Module):
    """A causal dilated convolution with a gate, as in WaveNet; gives the residual stream and a skip."""

    def __init__(self, size: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(size, 2 * size, 2, dilation=dilation)
        self.out, self.skip, self.dilation = nn.Conv1d(size, size, 1), nn.Conv1d(size, size, 1), dilation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        y = torch.tanh(value) * torch.sigmoid(gate)
        return x + self.out(y), self.skip(y)


class WaveNet(Parts):
    """A stack of dilated convolutions whose skips are added up."""

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.head(F.relu(total))


class Chomp(nn.Module):
    """Cuts the padding on the right, so that a convolution is causal."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class UNet(Parts):
    """Two steps down and up with the encoder's features concatenated; upsamples by bilinear interpolation."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.avg_pool2d(second, 2))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.interpolate(self.up2(torch.cat([x, second], 1)), size=first.shape[-2:], mode="nearest")
        return self.head(self.up1(torch.cat([x, first], 1)))


class TextLines(Parts):
    """Convolutions, an LSTM over the columns and a CTC loss, for text in images."""

    def forward(self, images: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        columns = self.features(images).mean(2).permute(2, 0, 1)
        scores = self.head(self.lstm(columns)[0]).log_softmax(-1, dtype=torch.float32)
        sizes = torch.full_like(lengths, scores.shape[0])
        return F.ctc_loss(scores, labels, sizes, lengths, blank=0, zero_infinity=True)


class Detector(Parts):
    """Scores and boxes of three anchors a place, at two scales, with their losses."""

    def forward(self, images: Tensor, classes: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        first = self.features(images)
        levels = (first, self.coarser(first))
        scores = [
            score(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 5)
            for score, x in zip(self.scores, levels, strict=True)
        ]
        places = [
            place(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
            for place, x in zip(self.places, levels, strict=True)
        ]
        logits, found = torch.cat(scores, 1), torch.cat(places, 1)
        positive = (classes > 0).unsqueeze(-1)
        box_loss = (F.smooth_l1_loss(found, boxes, reduction="none") * positive).sum() / positive.sum().clamp(min=1)
        return {"classes": F.cross_entropy(logits.transpose(1, 2), classes), "boxes": box_loss}


def wavenet() -> nn.Module:
    """Four dilations, over 16 channels of input."""
    layers = nn.ModuleList(GatedDilated(64, 2**i) for i in range(4))
    return WaveNet(stem=nn.Conv1d(16, 64, 1), layers=layers, head=nn.Conv1d(64, 16, 1))


def tcn() -> nn.Module:
    """Temporal blocks with weight norm, and a head on the last step."""

    def layer(size: int, dilation: int) -> nn.Module:
        wide = weight_norm(nn.Conv1d(size, 64, 3, padding=2 * dilation, dilation=dilation))
        body = (wide, Chomp(2 * dilation), nn.ReLU(), nn.Dropout(0.1))
        return Residual(*body, shortcut=nn.Conv1d(size, 64, 1) if size != 64 else None)

    return nn.Sequential(layer(16, 1), layer(64, 2), layer(64, 4), nn.Conv1d(64, 10, 1))


def unet() -> nn.Module:
    """The parts of `UNet`."""
    parts = {
        "down1": conv(3, 16),
        "down2": conv(16, 32),
        "middle": conv(32, 64),
        "up2": conv(96, 32),
        "up1": conv(48, 16),
    }
    return UNet(**parts, head=nn.Conv2d(16, 3, 1))


def text_lines() -> nn.Module:
    """The parts of `TextLines`, for 36 characters and a blank."""
    features = nn.Sequential(conv(1, 32), nn.MaxPool2d(2), conv(32, 64), nn.MaxPool2d((2, 1)))
    return TextLines(features=features, lstm=nn.LSTM(64, 32, bidirectional=True), head=nn.Linear(64, 37))


def detector() -> nn.Module:
    """The parts of `Detector`, for four classes and the background."""
    scores = nn.ModuleList(nn.Conv2d(64, 15, 3, padding=1) for _ in range(2))
    places = nn.ModuleList(nn.Conv2d(64, 12, 3, padding=1) for _ in range(2))
    features = nn.Sequential(conv(3, 32, stride=2), conv(32, 64, stride=2))
    return Detector(features=features, coarser=conv(64, 64, stride=2), scores=scores, places=places)


def decoder() -> nn.Module:
    """From a latent vector to an image by transposed convolutions."""
    grow = (
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
    )
    return nn.Sequential(
        nn.Linear(64, 64 * 16), nn.Unflatten(1, (64, 4, 4)), *grow, nn.LeakyReLU(0.2), nn.Conv2d(16, 3, 1), nn.Tanh()
    )


def audio() -> nn.Module:
    """An autoencoder of waveforms, with a transposed convolution in one dimension."""
    encode = (nn.Conv1d(1, 32, 8, 4, 2), nn.ELU(), nn.Conv1d(32, 64, 4, 2, 1), nn.ELU())
    return nn.Sequential(*encode, nn.ConvTranspose1d(64, 32, 4, 2, 1), nn.ELU(), nn.ConvTranspose1d(32, 1, 8, 4, 2))


def norms() -> nn.Module:
    """Three normalizations that are not over the batch."""
    layers = [
        nn.Conv2d(3, 32, 3),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3),
        nn.InstanceNorm2d(32, affine=True),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 64, 3), nn.LocalResponseNorm(5), head(64))


def video() -> nn.Module:
    """Convolutions over space and time."""
    layers = (
        nn.Conv3d(3, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 32, (3, 1, 1)),
    )
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10))


def same() -> nn.Module:
    """String paddings."""
    layers = (
        nn.Conv2d(3, 32, 5, padding="same"),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding="same", dilation=2),
        nn.ReLU(),
    )
    return nn.Sequential(*layers, nn.Conv2d(32, 64, 3, padding="valid"), head(64))


def shuffle() -> nn.Module:
    """Twice the size: a pixel shuffle beside nearest upsampling."""
    up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(3, 3, 1))
    return Residual(
        nn.Conv2d(3, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 12, 3, padding=1), nn.PixelShuffle(2), shortcut=up
    )


def cnn() -> nn.Module:
    """A small classifier, flattened before its linear layers."""
    layers = (
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((3, 3)),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.25), *mlp(576, 128, 10))


CASES: tuple[tuple[str, str, Make], ...] = (
    ("WaveNet", "convolution", lambda: (wavenet(), (randn(8, 16, 32),))),
    ("temporal blocks, weight norm", "convolution", lambda: (tcn(), (randn(8, 16, 32),))),
    ("CNN", "convolution", lambda: (cnn(), images())),
    (
        "residual block with stride",
        "convolution",
        lambda: (nn.Sequential(conv(3, 32), basic(32, 64, 2), head(64)), images()),
    ),
    (
        "depthwise and grouped",
        "convolution",
        lambda: (
            nn.Sequential(conv(3, 32), conv(32, 32, groups=32), conv(32, 64, 1), conv(64, 64, groups=4), head(64)),
            images(),
        ),
    ),
    ("transposed decoder", "convolution", lambda: (decoder(), (randn(8, 64),))),
    ("video", "convolution", lambda: (video(), (randn(8, 3, 8, 16, 16),))),
    ("audio autoencoder", "convolution", lambda: (audio(), (randn(8, 1, 128),))),
    ("string padding", "convolution", lambda: (same(), images())),
    ("U-Net", "convolution", lambda: (unet(), images())),
    ("pixel shuffle", "convolution", lambda: (shuffle(), (randn(8, 3, 16, 16),))),
    ("group, instance and response norm", "normalization", lambda: (norms(), images())),
    (
        "text lines, CTC",
        "loss",
        lambda: (text_lines(), (randn(8, 1, 16, 32), randint(1, 37, (8, 5)), torch.full((8,), 5))),
    ),
    ("detector", "loss", lambda: (detector(), (*images(), randint(5, (8, 240)), randn(8, 240, 4)))),
)
"""14 cases: name, kind, and how the module and the arguments of one call are made."""
