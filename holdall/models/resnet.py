"""ResNet with bottlenecks (He et al., arXiv 1512.03385), strides in the convolution of 3 x 3, as torchvision has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import nn

from holdall.models.plain import ImageConfig, Output, classified

EXPANSION = 4  # output channels of a bottleneck for each of its width


@dataclass(kw_only=True)
class ResNetConfig(ImageConfig):
    depths: list[int] = field(default_factory=lambda: [3, 4, 6, 3])  # bottlenecks of each stage; the default is ResNet-50
    width: int = 64  # of the first stage; each stage after it is twice as wide

    model_type: ClassVar[str] = "resnet"

    def make(self) -> ResNet:
        return ResNet(self)


class ResNetStem(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(after)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self.pool(self.act(self.norm(self.conv(x)))))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.act = nn.ReLU(inplace=True)
        same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.act(self.norm2(self.conv2(y)))
        return cast("torch.Tensor", self.act(self.norm3(self.conv3(y)) + self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ResNetStem(config.num_channels, config.width)
        layers, before = [], config.width
        for stage, depth in enumerate(config.depths):
            width = config.width << stage
            for n in range(depth):
                layers.append(Bottleneck(before, width, stride=2 if stage and not n else 1))
                before = EXPANSION * width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before, config.num_labels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        return classified(self.head(self.layers(self.stem(pixel_values)).mean((2, 3))), labels)
