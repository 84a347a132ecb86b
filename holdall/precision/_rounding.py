"""Stochastic rounding to bfloat16: up or down at random, so that the mean is the value.

Rounding to nearest loses every update smaller than half a unit in the last place; with stochastic rounding they count on
average (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, arXiv 1502.02551).
"""

from __future__ import annotations

import torch

_LOW = 0xFFFF  # the bits that bfloat16 lacks


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 values in bfloat16. A random number in the lower half of the bits carries into the upper half, which is kept."""
    noise = torch.randint(0, _LOW + 1, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(~_LOW)
    return bits.view(torch.float32).to(torch.bfloat16)
