"""Range BN (Banner et al. 2018): a batch norm that divides by the range of its values times 1 / sqrt(2 ln n)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from holdall.narrow.layers import Undo


def spread(values: torch.Tensor) -> torch.Tensor:
    """An estimate of the standard deviation along the last dimension: the range, times the constant for n normal numbers."""
    n = values.shape[-1]
    return (values.amax(-1) - values.amin(-1)) / math.sqrt(2 * math.log(max(n, 2)))


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if not self.training and self.running_mean is not None:
        mean, scale = self.running_mean, self.running_var.sqrt()
    else:
        by_channel = input.transpose(0, 1).flatten(1)
        mean, scale = by_channel.mean(1), spread(by_channel)
        if self.running_mean is not None and self.training:
            share = self.momentum if self.momentum is not None else 0.1
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
                self.running_var.lerp_(scale.square().to(self.running_var.dtype), share)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
    shape = (1, -1, *[1] * (input.dim() - 2))
    out: torch.Tensor = (input - mean.reshape(shape)) / (scale + self.eps).reshape(shape)
    if self.weight is not None:
        out = out * self.weight.reshape(shape) + self.bias.reshape(shape)
    return out


class RangeNorm1d(nn.BatchNorm1d):
    forward = _forward


class RangeNorm2d(nn.BatchNorm2d):
    forward = _forward


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.BatchNorm1d: RangeNorm1d, nn.BatchNorm2d: RangeNorm2d}


def put_on_norms(model: nn.Module) -> Undo:
    """Make the batch norms of a model range norms."""
    found = [(m, type(m)) for m in model.modules() if type(m) in _CLASSES]
    for module, kind in found:
        module.__class__ = _CLASSES[kind]

    def undo() -> None:
        for module, kind in found:
            module.__class__ = kind

    return undo
