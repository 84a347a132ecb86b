"""Models made of torch's own modules, for presets that need no other library.

A family is a config, a dataclass that knows how to `make` its model. Every model returns an `Output`, whose loss is there if
labels were given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor


@dataclass(kw_only=True)
class PlainConfig:
    """The shape of a model."""

    model_type: ClassVar[str] = ""

    def make(self) -> torch.nn.Module:
        """The model with random weights, on torch's current device."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlainConfig:
        return cls(**values)


@dataclass(kw_only=True)
class ImageConfig(PlainConfig):
    """The shape of a model that sorts square images."""

    image_size: int = 224
    num_channels: int = 3
    num_labels: int = 1000


def classified(logits: torch.Tensor, labels: torch.Tensor | None) -> Output:
    """The logits of a classifier with their cross entropy; labels of -100 do not count."""
    return Output(None if labels is None else torch.nn.functional.cross_entropy(logits, labels), logits)
