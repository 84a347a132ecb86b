"""Moments of 8 bits, block by block.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022: every block of 256 elements has its largest element
as a scale, every element the number of the nearest entry of a fixed table that is fine near zero and spans seven decades.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import torch

from holdall.codecs.levels import BLOCK, in_blocks
from holdall.updates.stretches import piece_of

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
    """The levels as a tensor. Making it synchronises with the device, so callers that work in pieces make it once."""
    return torch.tensor(dynamic_table(signed=signed), device=device)


def coded_bytes(numel: int) -> int:
    """Bytes of the codes: one per element and four per block."""
    return numel + 4 * ceil(numel / BLOCK)


def encode(x: torch.Tensor, *, signed: bool, table: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (numel,) of uint8 and scales (blocks,) of float32; on the way some 20 bytes for each element of a piece.

    Without signs, what is above zero stays above zero: a second moment rounded to nothing would divide a step by epsilon.
    With signs, a block's scale has the sign of its largest element: the table has a 1 and no -1, and otherwise a negative
    largest element would lose 0.7 % at every step, some 7 % of a first moment in the end.
    """
    flat, table = x.reshape(-1), table_on(x.device, signed=signed) if table is None else table
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device=x.device)
    scales = torch.empty(ceil(flat.numel() / BLOCK), dtype=torch.float32, device=x.device)
    for here, blocks in _pieces(flat):
        unit = in_blocks(flat[here].float())
        largest = unit.abs().amax(dim=1)
        if signed:
            largest = torch.where(-unit.amin(dim=1) > unit.amax(dim=1), -largest, largest)
        scales[blocks] = largest
        unit = unit / largest.abs().clamp_(min=torch.finfo(torch.float32).tiny).copysign_(largest)[:, None]
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
        part = in_blocks(table.index_select(0, codes[here].int())) * scales[blocks, None]
        values[here] = part.view(-1)[: here.stop - here.start]
    return values


def _pieces(flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """(slice of elements, slice of blocks) of each piece; pieces bound the temporaries."""
    numel, piece = flat.numel(), piece_of(flat.device, on_gpu=ON_GPU)
    for begin in range(0, numel, piece):
        end = min(begin + piece, numel)
        yield slice(begin, end), slice(begin // BLOCK, ceil(end / BLOCK))
