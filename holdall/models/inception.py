"""Inception-v3 (Szegedy et al., arXiv 1512.00567), with its auxiliary classifier, whose loss counts 0.4, as in torchvision.

The trunk is a chain: five convolutions, two poolings and eleven mixed layers. Branches fork and join inside a mixed layer; the
auxiliary classifier reads what enters the ninth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import nn

from holdall.models.plain import ImageConfig, Output, classified

AUXILIARY_WEIGHT = 0.4


@dataclass(kw_only=True)
class InceptionConfig(ImageConfig):
    image_size: int = 299
    divide: int = 1  # all channels are divided by it
    auxiliary: list[int] = field(default_factory=lambda: [5, 3, 5])  # pooling, its stride, last kernel; empty: no such head
    dropout: float = 0.5

    model_type: ClassVar[str] = "inception"

    def make(self) -> Inception:
        return Inception(self)


class ConvNorm(nn.Module):
    """Convolution without a bias, batch norm, ReLU."""

    def __init__(
        self, before: int, after: int, kernel: int | tuple[int, int] = 1, stride: int = 1, padding: int | tuple[int, int] = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, padding, bias=False)
        self.norm, self.act = nn.BatchNorm2d(after, eps=0.001), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.act(self.norm(self.conv(x))))


class Mixed(nn.Module):
    """Branches over one input, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class AuxiliaryHead(nn.Module):
    def __init__(self, width: int, config: InceptionConfig) -> None:
        super().__init__()
        pool, stride, kernel = config.auxiliary
        inner, last = 128 // config.divide, 768 // config.divide
        self.pool = nn.AvgPool2d(pool, stride)
        self.conv1, self.conv2 = ConvNorm(width, inner), ConvNorm(inner, last, kernel)
        self.head = nn.Linear(last, config.num_labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.head(self.conv2(self.conv1(self.pool(x))).mean((2, 3))))


class Inception(nn.Module):
    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        self.config = config
        n = config.divide
        layers, width = _trunk(config.num_channels, n)
        self.layers = nn.ModuleList(layers)
        self.auxiliary = AuxiliaryHead(768 // n, config) if config.auxiliary else None
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, config.num_labels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        x, beside = pixel_values, None
        for number, layer in enumerate(self.layers):
            if number == len(self.layers) - 3 and self.auxiliary is not None and self.training:
                beside = self.auxiliary(x)
            x = layer(x)
        found = classified(self.head(self.drop(x.mean((2, 3)))), labels)
        if beside is None or found.loss is None:
            return found
        other = classified(beside, labels).loss
        assert other is not None
        return Output(found.loss + AUXILIARY_WEIGHT * other, found.logits)


def _trunk(channels: int, n: int) -> tuple[list[nn.Module], int]:
    """(the layers, the channels that leave the last); `n`: by what all channels are divided."""
    layers: list[nn.Module] = [
        ConvNorm(channels, 32 // n, 3, stride=2),
        ConvNorm(32 // n, 32 // n, 3),
        ConvNorm(32 // n, 64 // n, 3, padding=1),
        nn.MaxPool2d(3, 2),
        ConvNorm(64 // n, 80 // n),
        ConvNorm(80 // n, 192 // n, 3),
        nn.MaxPool2d(3, 2),
    ]
    width = 192 // n
    for pooled in (32, 64, 64):
        layers.append(_grid_35(width, pooled // n, n))
        width = (64 + 64 + 96) // n + pooled // n
    layers.append(_to_grid_17(width, n))
    width = 768 // n
    layers += [_grid_17(width, inner // n, n) for inner in (128, 160, 160, 192)]
    layers.append(_to_grid_8(width, n))
    layers += [_grid_8(before // n, n) for before in (1280, 2048)]
    return layers, 2048 // n


def _chain(before: int, *steps: tuple[object, ...]) -> nn.Sequential:
    """Convolutions one after the other; each step: channels after it, kernel, stride, padding."""
    layers: list[nn.Module] = []
    for after, *rest in steps:
        layers.append(ConvNorm(before, cast("int", after), *cast("Sequence[int]", rest)))
        before = cast("int", after)
    return nn.Sequential(*layers)


def _pooled(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(before, after))


def _grid_35(before: int, pooled: int, n: int) -> Mixed:
    return Mixed(
        ConvNorm(before, 64 // n),
        _chain(before, (48 // n,), (64 // n, 5, 1, 2)),
        _chain(before, (64 // n,), (96 // n, 3, 1, 1), (96 // n, 3, 1, 1)),
        _pooled(before, pooled),
    )


def _to_grid_17(before: int, n: int) -> Mixed:
    return Mixed(
        ConvNorm(before, 384 // n, 3, stride=2),
        _chain(before, (64 // n,), (96 // n, 3, 1, 1), (96 // n, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _grid_17(before: int, inner: int, n: int) -> Mixed:
    across, down = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    return Mixed(
        ConvNorm(before, 192 // n),
        _chain(before, (inner,), (inner, *across), (192 // n, *down)),
        _chain(before, (inner,), (inner, *down), (inner, *across), (inner, *down), (192 // n, *across)),
        _pooled(before, 192 // n),
    )


def _to_grid_8(before: int, n: int) -> Mixed:
    across, down = ((1, 7), 1, (0, 3)), ((7, 1), 1, (3, 0))
    return Mixed(
        _chain(before, (192 // n,), (320 // n, 3, 2)),
        _chain(before, (192 // n,), (192 // n, *across), (192 // n, *down), (192 // n, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _grid_8(before: int, n: int) -> Mixed:
    def split() -> Mixed:
        return Mixed(ConvNorm(384 // n, 384 // n, (1, 3), padding=(0, 1)), ConvNorm(384 // n, 384 // n, (3, 1), padding=(1, 0)))

    return Mixed(
        ConvNorm(before, 320 // n),
        nn.Sequential(ConvNorm(before, 384 // n), split()),
        nn.Sequential(ConvNorm(before, 448 // n), ConvNorm(448 // n, 384 // n, 3, padding=1), split()),
        _pooled(before, 192 // n),
    )
