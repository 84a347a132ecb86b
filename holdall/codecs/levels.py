"""Even levels over the range of each block of 256 elements, with a scale and a zero point: Q-GaLore's projectors and weights.

Zhang et al., "Q-GaLore", arXiv 2407.08296. Unlike the codecs of activations these return codes, scales and zero points
separately, since they are stored as an optimizer's state or as a weight.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F

BLOCK = 256


def level_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes (`bits` per element), and five bytes per block for its scale and zero point."""
    return ceil(numel * bits / 8) + 5 * ceil(numel / BLOCK)


def encode_levels(
    x: torch.Tensor, *, bits: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, zeros): 2^bits even levels over each block's range; two codes of four bits share a byte.

    The range is widened to contain zero, so that blocks of one sign are as accurate as others. With a generator rounding is
    stochastic, up with the probability of the remainder, so that values inside a range are right on average.
    """
    blocks = in_blocks(x.reshape(-1).float())
    low, high = blocks.amin(dim=1).clamp_(max=0), blocks.amax(dim=1).clamp_(min=0)
    top = 2**bits - 1
    scales = (high - low).clamp_(min=1e-5) / top
    zeros = (-low / scales).round_().clamp_(0, top)
    levels = blocks / scales[:, None]
    levels = levels.round_() if generator is None else round_stochastically_(levels, generator)
    codes = levels.add_(zeros[:, None]).clamp_(0, top).to(torch.uint8).view(-1)[: x.numel()]
    if bits == 4:
        codes = F.pad(codes, (0, x.numel() % 2))
        codes = codes[::2] | codes[1::2] << 4
    return codes.clone(), scales, zeros.to(torch.uint8)


def round_stochastically_(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round to a neighbouring integer in place, up with the probability of the remainder."""
    return x.add_(torch.rand(x.shape, generator=generator, device=x.device)).floor_()


def decode_levels(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, bits: int, numel: int) -> torch.Tensor:
    """The values (numel,) in float32."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)[:numel]
    return in_blocks(codes.float()).sub(zeros[:, None]).mul_(scales[:, None]).view(-1)[:numel]


def in_blocks(flat: torch.Tensor) -> torch.Tensor:
    """(blocks, 256); the last is padded with zeros."""
    missing = -flat.numel() % BLOCK
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
