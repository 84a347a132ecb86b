"""Formats: tensors in a few bits with scales. `narrow` makes codes and scales, `widen` turns them back into numbers.

`dim` is the dimension that a product sums over: formats with a scale for each row or block have it along that dimension.
Rounding is to nearest, or by chance so that the mean is the value (`stochastic`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdall.narrow.casts import SMALLEST, scale_for, scaled

Parts = tuple[torch.Tensor, ...]


class Format(Protocol):
    @property
    def is_blockwise(self) -> bool:
        """Do scales depend on the dimension that is summed over?"""
        ...

    def narrow(self, values: torch.Tensor, dim: int = -1) -> Parts: ...

    def widen(self, parts: Sequence[torch.Tensor], shape: torch.Size, dim: int = -1) -> torch.Tensor:
        """Float32 numbers of this shape."""
        ...


def rounded(form: Format, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The numbers that a format has for these, in float32."""
    return form.widen(form.narrow(values, dim), values.shape, dim)


@dataclass(frozen=True, kw_only=True)
class Float8(Format):
    """8-bit floats with a scale that takes the largest value to the format's own, for the tensor or for each row.

    `powers`: scales are powers of two, so that scaling itself rounds nothing.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    rows: bool = False
    powers: bool = False

    @property
    def is_blockwise(self) -> bool:
        return self.rows

    def scale_of(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """What values are multiplied by."""
        given = values.detach()
        inf = float("inf")
        largest = torch.linalg.vector_norm(given, inf, dim, keepdim=True) if self.rows else torch.linalg.vector_norm(given, inf)
        return scale_for(largest, self.dtype, powers=self.powers)

    def narrow(self, values: torch.Tensor, dim: int = -1) -> Parts:
        scale = self.scale_of(values, dim)
        return scaled(values, scale, self.dtype, cut=False), scale.reciprocal()  # nothing is above the largest

    def widen(self, parts: Sequence[torch.Tensor], shape: torch.Size, dim: int = -1) -> torch.Tensor:  # noqa: ARG002
        codes, unit = parts
        return codes.float() * unit


@dataclass(frozen=True, kw_only=True)
class Integer(Format):
    """Whole numbers from -(2^(bits-1) - 1) to 2^(bits-1) - 1 times a unit; two to a byte where they have four bits.

    `chunks`: the largest value is the mean over so many parts of the rows, so that a single one does not stretch the grid.
    """

    bits: int = 8
    stochastic: bool = False
    chunks: int = 1

    @property
    def is_blockwise(self) -> bool:
        return False

    @property
    def most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def narrow(self, values: torch.Tensor, dim: int = -1) -> Parts:  # noqa: ARG002
        unit = self._largest(values.detach().float().abs()).clamp(min=SMALLEST) / self.most
        return self.in_units(values, unit)

    def in_units(self, values: torch.Tensor, unit: torch.Tensor) -> Parts:
        scaled = values.detach().float() / unit
        whole = torch.floor(scaled + torch.rand_like(scaled)) if self.stochastic else torch.round(scaled)
        codes = whole.clamp(-self.most, self.most).to(torch.int8)
        return (packed(codes) if self.bits <= 4 else codes), unit

    def _largest(self, sizes: torch.Tensor) -> torch.Tensor:
        if self.chunks > 1 and sizes.dim() > 1 and sizes.shape[0] >= self.chunks:
            return torch.stack([part.amax() for part in sizes.chunk(self.chunks)]).mean()
        return sizes.amax()

    def widen(self, parts: Sequence[torch.Tensor], shape: torch.Size, dim: int = -1) -> torch.Tensor:  # noqa: ARG002
        codes, unit = parts
        return (unpacked(codes, shape) if self.bits <= 4 else codes).float() * unit


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of -8 to 7 in a byte."""
    flat = codes.reshape(-1).to(torch.int16) + 8
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return (flat[0::2] * 16 + flat[1::2]).to(torch.uint8)


def unpacked(data: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    both = torch.stack([data // 16, data % 16], dim=1).reshape(-1)
    return (both[: math.prod(shape)].to(torch.int8) - 8).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class BlockFloats(Format):
    """Blocks along the summed dimension, each with a scale of 8 bits: MXFP8, MXFP4 and NVFP4.

    `element`: "e4m3" or "e2m1". `unit`: "e8m0", a power of two (OCP Microscaling Formats v1.0), or "e4m3", under one
    float32 scale of the tensor (NVFP4). The last block of a row may be short.
    """

    element: str = "e4m3"
    block: int = 32
    unit: str = "e8m0"
    stochastic: bool = False

    @property
    def is_blockwise(self) -> bool:
        return True

    @property
    def most(self) -> float:
        return {"e4m3": 448.0, "e2m1": 6.0}[self.element]

    def narrow(self, values: torch.Tensor, dim: int = -1) -> Parts:
        blocks = self._blocks(values.detach().float(), dim)
        largest = blocks.abs().amax(-1, keepdim=True)
        units, whole = self._units(largest)
        scaled = blocks / self._real(units, whole)
        return self._codes(scaled), units, whole

    def _units(self, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = largest.new_ones(())
        if self.unit == "e8m0":
            exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-126))) - math.floor(math.log2(self.most))
            return (exponent.clamp(-127, 127) + 127).to(torch.uint8), one
        whole = (largest.amax() / (448.0 * self.most)).clamp(min=SMALLEST)
        return (largest / self.most / whole).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn), whole

    def _real(self, units: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return torch.exp2(units.float() - 127) if self.unit == "e8m0" else units.float() * whole

    def _codes(self, scaled: torch.Tensor) -> torch.Tensor:
        scaled = scaled.clamp(-self.most, self.most)
        if self.element != "e2m1":
            return scaled.to(torch.float8_e4m3fn)
        codes = _fp4_codes(scaled.abs(), stochastic=self.stochastic)
        return packed(torch.where(scaled < 0, codes - 8, codes).to(torch.int8))  # -8 is minus zero

    def widen(self, parts: Sequence[torch.Tensor], shape: torch.Size, dim: int = -1) -> torch.Tensor:
        codes, units, whole = parts
        if self.element == "e2m1":
            signed = unpacked(codes, torch.Size((*units.shape[:-1], self.block))).float()
            numbers = torch.where(signed < 0, -_fp4_sizes(signed + 8), _fp4_sizes(signed))
        else:
            numbers = codes.float()
        flat: torch.Tensor = (numbers * self._real(units, whole)).flatten(-2)
        turned = [s for n, s in enumerate(shape) if n != dim % len(shape)] + [shape[dim]]
        made: torch.Tensor = flat[..., : shape[dim]].reshape(turned).movedim(-1, dim)
        return made

    def _blocks(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        last = values.movedim(dim, -1)
        short = -last.shape[-1] % self.block
        if short:
            last = torch.nn.functional.pad(last, (0, short))
        made: torch.Tensor = last.unflatten(-1, (-1, self.block))
        return made


def _fp4_codes(sizes: torch.Tensor, *, stochastic: bool) -> torch.Tensor:
    """Codes 0 to 7 of magnitudes up to 6 in E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Ties go to the even code."""
    exponent = torch.floor(torch.log2(sizes.clamp(min=1.0)))
    halves = sizes / torch.exp2(exponent) * 2  # in units of the last place
    whole = torch.floor(halves + torch.rand_like(halves)) if stochastic else torch.round(halves)
    return whole + 2 * exponent


def _fp4_sizes(codes: torch.Tensor) -> torch.Tensor:
    exponent = torch.floor(codes / 2).clamp(min=1.0)
    return (codes - 2 * (exponent - 1)) * torch.exp2(exponent - 2)


@dataclass(frozen=True, kw_only=True)
class Radix4(Format):
    """Sun et al. (NeurIPS 2020): a sign and a power of four, seven of them and zero. `phase` 1 shifts all levels by two.

    The two products of backward see the two phases, whose errors cancel in the mean.
    """

    phase: int = 0

    @property
    def is_blockwise(self) -> bool:
        return False

    def narrow(self, values: torch.Tensor, dim: int = -1) -> Parts:  # noqa: ARG002
        values = values.detach().float()
        unit = values.abs().amax().clamp(min=SMALLEST) / 4.0**6 * (0.5 if self.phase else 1.0)
        sizes = values.abs() / unit
        exponent = torch.round(torch.log(sizes.clamp(min=4.0**-3)) / math.log(4.0) - _MIDDLE)
        codes = torch.where(sizes < _ZERO, torch.zeros_like(exponent), exponent.clamp(0, 6) + 1)
        return packed((codes * values.sign()).to(torch.int8)), unit

    def widen(self, parts: Sequence[torch.Tensor], shape: torch.Size, dim: int = -1) -> torch.Tensor:  # noqa: ARG002
        data, unit = parts
        codes = unpacked(data, shape).float()
        return torch.where(codes == 0, codes, codes.sign() * torch.exp2(2 * (codes.abs() - 1))) * unit


_MIDDLE = math.log(2.5, 4.0) - 0.5  # halfway between 1 and 4 is 2.5, which must round up to one more power
_ZERO = 0.5  # below it zero is nearer than the smallest level
