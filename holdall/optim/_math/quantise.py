"""Tensors as small integers, block by block: the storage of 8-bit moments and of quantised projectors.

Moments (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022): every block of 256 elements has its
largest magnitude as a scale, every element the number of the nearest entry of a fixed table that is fine near zero and spans
seven decades. Projectors (Zhang et al., "Q-GaLore", arXiv 2407.08296): evenly spaced levels between a block's least and
largest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import torch
import torch.nn.functional as F

from holdall.updates.stretches import piece_of

BLOCK = 256
ON_GPU = 1 << 23  # elements that are worked on at a time, whole blocks


@lru_cache(maxsize=2)
def dynamic_table(*, signed: bool) -> tuple[float, ...]:
    """The 256 levels, rising: in decade 10^(i-6) the middles of 2^i equal bins (twice as many without signs), 0 and 1.

    Numbers and not a tensor: one made while fake tensors are traced must not outlive the trace.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        bins = 2**i if signed else 2 ** (i + 1)
        middles = [10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / bins) for k in range(bins)]
        levels += [*middles, *(-x for x in middles)] if signed else middles
    return tuple(sorted(levels))


def table_on(device: torch.device, *, signed: bool) -> torch.Tensor:
    """The levels as a tensor. Making one waits for the device, so whoever works in pieces makes it once."""
    return torch.tensor(dynamic_table(signed=signed), device=device)


def coded_bytes(numel: int) -> int:
    """A byte an element and four a block."""
    return numel + 4 * ceil(numel / BLOCK)


def encode(x: torch.Tensor, *, signed: bool, table: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (numel,) of uint8 and scales (blocks,) of float32; on the way some 20 bytes for each element of a piece.

    Without signs, what is above zero stays above zero: a second moment rounded to nothing would divide a step by epsilon.
    """
    flat, table = x.reshape(-1), table_on(x.device, signed=signed) if table is None else table
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(ceil(flat.numel() / BLOCK), dtype=torch.float32, device=x.device)
    for here, blocks in _pieces(flat):
        unit = _blocks(flat[here].float())
        scales[blocks] = unit.abs().amax(dim=1)
        unit = unit / scales[blocks, None].clamp(min=torch.finfo(torch.float32).tiny)
        nearest = torch.bucketize(unit, middles, out_int32=True)
        if not signed:
            nearest.clamp_(min=1).mul_(unit > 0)
        codes[here] = nearest.view(-1)[: here.stop - here.start].to(torch.uint8)
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool, table: torch.Tensor | None = None) -> torch.Tensor:
    """The values (numel,) in float32."""
    table = table_on(codes.device, signed=signed) if table is None else table
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    for here, blocks in _pieces(codes):
        part = _blocks(table.index_select(0, codes[here].int())) * scales[blocks, None]
        values[here] = part.view(-1)[: here.stop - here.start]
    return values


def level_bytes(numel: int, bits: int) -> int:
    """`bits` an element, and a block's scale and zero: five bytes."""
    return ceil(numel * bits / 8) + 5 * ceil(numel / BLOCK)


def encode_levels(x: torch.Tensor, *, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, zeros): 2^bits even levels over each block's range; two codes of four bits share a byte.

    The range is widened to hold zero, so that a block of one sign is kept as well as any other.
    """
    blocks = _blocks(x.reshape(-1).float())
    low, high = blocks.amin(dim=1).clamp_(max=0), blocks.amax(dim=1).clamp_(min=0)
    top = 2**bits - 1
    scales = (high - low).clamp_(min=1e-5) / top
    zeros = (-low / scales).round_().clamp_(0, top)
    codes = (blocks / scales[:, None]).round_().add_(zeros[:, None]).clamp_(0, top).to(torch.uint8).view(-1)
    codes = codes[: x.numel()]
    if bits == 4:
        codes = F.pad(codes, (0, x.numel() % 2))
        codes = codes[::2] | codes[1::2] << 4
    return codes.clone(), scales, zeros.to(torch.uint8)


def decode_levels(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, bits: int, numel: int) -> torch.Tensor:
    """The values (numel,) in float32."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)[:numel]
    return _blocks(codes.float()).sub(zeros[:, None]).mul_(scales[:, None]).view(-1)[:numel]


def _pieces(flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(elements, their blocks): so many at a time that what is made on the way stays small."""
    numel, piece = flat.numel(), piece_of(flat.device, on_gpu=ON_GPU)
    for begin in range(0, numel, piece):
        end = min(begin + piece, numel)
        yield slice(begin, end), slice(begin // BLOCK, ceil(end / BLOCK))


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    """(blocks, 256); the last is filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
