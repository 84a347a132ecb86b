"""Signed codes of 8 or 4 bits with one scale for every block of 256 elements, in one buffer: what collectives send (ZeRO++,
arXiv 2306.10209).

A code is the element over its block's largest magnitude, times 127 or 7, rounded to nearest; so a decoded element differs by at
most 1/254 or 1/14 of that magnitude. Two 4-bit codes share a byte. Scales are float32 and lie after the codes.
"""

from __future__ import annotations

import torch

from holdall.codecs.levels import BLOCK, in_blocks


def symmetric_bytes(numel: int, bits: int) -> int:
    """Of the codes and scales of so many elements."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK * bits // 8 + 4)


def encode_symmetric(x: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Bytes (uint8): the codes of all blocks, the last one padded, then their scales."""
    blocks = in_blocks(x.reshape(-1).float())
    top = 2 ** (bits - 1) - 1
    scales = blocks.abs().amax(dim=1) / top
    codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().clamp_(-top, top).to(torch.int8)
    if bits == 4:
        codes = codes.view(-1, 2).add_(8).to(torch.uint8)
        codes = codes[:, 0] | codes[:, 1] << 4
    return torch.cat([codes.view(-1).view(torch.uint8), scales.view(torch.uint8)])


def decode_symmetric(coded: torch.Tensor, *, bits: int, numel: int) -> torch.Tensor:
    """The values (numel,) in float32."""
    blocks = -(-numel // BLOCK)
    codes, scales = coded.split([blocks * BLOCK * bits // 8, 4 * blocks])
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=1).to(torch.int8).sub_(8)
    values: torch.Tensor = codes.reshape(-1).view(torch.int8).float().view(blocks, BLOCK)
    values.mul_(scales.clone().view(torch.float32)[:, None])
    return values.view(-1)[:numel]
