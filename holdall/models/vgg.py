"""VGG (Simonyan and Zisserman, arXiv 1409.1556): convolutions of 3 x 3 with a ReLU, poolings, and three linear layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import nn

from holdall.models.plain import ImageConfig, Output, classified


@dataclass(kw_only=True)
class VGGConfig(ImageConfig):
    stages: list[list[int]] = field(  # output channels of the convolutions between two poolings; the default is VGG-16
        default_factory=lambda: [[64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3]
    )
    hidden: int = 4096  # width of the linear layers
    dropout: float = 0.5

    model_type: ClassVar[str] = "vgg"

    def make(self) -> VGG:
        return VGG(self)


class ConvReLU(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.act(self.conv(x)))


class Dense(nn.Module):
    def __init__(self, before: int, after: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(before, after), nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.drop(self.act(self.linear(x))))


class VGG(nn.Module):
    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = []
        width, side = config.num_channels, config.image_size
        for stage in config.stages:
            for channels in stage:
                layers.append(ConvReLU(width, channels))
                width = channels
            layers.append(nn.MaxPool2d(2, 2))
            side //= 2
        self.layers = nn.Sequential(*layers)
        hidden, dropout = config.hidden, config.dropout
        self.classifier = nn.Sequential(
            Dense(width * side * side, hidden, dropout), Dense(hidden, hidden, dropout), nn.Linear(hidden, config.num_labels)
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        return classified(self.classifier(self.layers(pixel_values).flatten(1)), labels)
