"""NF4: weights in 4 bits, each one of 16 quantiles of the normal distribution times the largest size of its block.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv 2305.14314. A packed weight
is one tensor of bytes:

    codes   two weights in a byte, the first in the high half; the last block is filled up with zeros
    scales  float32 for each block; or, doubly quantised, 8 bits for each block (filled up to a multiple of 4 bytes), then
            float32 for each 256 blocks, then the mean

Doubly quantised, the scales less their mean are stored on 255 even levels. (The paper has 8-bit floats there.) Codes are chosen
for the scales as stored, so each is the nearest to its weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holdall.narrow import nf4_fused

GROUP = 256  # blocks that share a float32 scale of their scales
_LEVELS = 127
_AT_ONCE = {"cpu": 1 << 18}  # weights whose codes are found together: as many as a cache holds
_ON_OTHERS = 1 << 24
_SMALLEST = 1e-30
_TABLES: dict[torch.device, torch.Tensor] = {}


@cache
def code_book() -> tuple[float, ...]:
    """The 16 numbers, from -1 to 1: quantiles at even probabilities, eight above zero and seven below it, and zero itself.

    The outermost probability is 1 less the mean of 1/32 and 1/30, half a step of each side (QLoRA, section 3 and appendix E).
    """
    end = 1 - (1 / 32 + 1 / 30) / 2

    def side(count: int) -> torch.Tensor:
        made: torch.Tensor = torch.special.ndtri(torch.linspace(end, 0.5, count + 1, dtype=torch.float64)[:-1])
        return made

    numbers = torch.cat([-side(7), torch.zeros(1, dtype=torch.float64), side(8).flip(0)])
    return tuple((numbers / numbers.abs().max()).float().tolist())


@cache
def largest_gap() -> float:
    """Between two neighbours: half of it times a block's scale bounds the error of rounding."""
    return max(b - a for a, b in zip(code_book(), code_book()[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class NormalFloat4:
    """`block`: weights with a common scale, an even number. `double`: the scales are quantised too."""

    block: int = 64
    double: bool = True

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def offsets(self, numel: int) -> tuple[int, int, int]:
        """Where the scales begin, where the float32 numbers begin, and where all ends."""
        blocks = self.blocks(numel)
        codes = blocks * self.block // 2
        start = codes + -codes % 4
        if not self.double:
            return start, start, start + 4 * blocks
        floats = start + blocks + -blocks % 4
        return start, floats, floats + 4 * (-(-blocks // GROUP) + 1)

    def nbytes(self, numel: int) -> int:
        return self.offsets(numel)[2]

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """The bytes for these values, on their device."""
        numel, flat = values.numel(), values.detach().reshape(-1)
        packed = torch.zeros(self.nbytes(numel), dtype=torch.uint8, device=values.device)
        if values.device.type == "meta":
            return packed
        short = -numel % self.block
        rows = (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(-1, self.block)
        self._store_scales(packed, torch.linalg.vector_norm(rows, math.inf, dim=1).float(), numel)
        scales = self.scales(packed, numel)
        scales = torch.where(scales > _SMALLEST, scales, math.inf)  # such a block has zeros only
        book = torch.tensor(code_book())
        middles = ((book[1:] + book[:-1]) / 2).tolist()
        codes = packed[: rows.numel() // 2].view(-1, self.block // 2)
        step = max(1, _AT_ONCE.get(values.device.type, _ON_OTHERS) // self.block)
        for n in range(0, len(rows), step):
            scaled = rows[n : n + step] / scales[n : n + step, None]
            found = torch.zeros_like(scaled, dtype=torch.uint8)
            for middle in middles:  # on a CPU five times as fast as a search in them
                found += scaled > middle
            torch.add(found[:, 1::2], found[:, 0::2], alpha=16, out=codes[n : n + step])
        return packed

    def _store_scales(self, packed: torch.Tensor, scales: torch.Tensor, numel: int) -> None:
        start, floats, _ = self.offsets(numel)
        numbers = packed[floats:].view(torch.float32)
        if not self.double:
            numbers.copy_(scales)
            return
        mean = scales.mean()
        groups = torch.nn.functional.pad(scales - mean, (0, -len(scales) % GROUP)).view(-1, GROUP)
        spread = groups.abs().amax(1)
        levels = (groups / spread.clamp(min=_SMALLEST)[:, None] * _LEVELS).round_().view(-1)[: len(scales)]
        packed[start : start + len(scales)].view(torch.int8).copy_(levels)
        numbers[:-1].copy_(spread / _LEVELS)
        numbers[-1].copy_(mean)

    def scales(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """The scale of every block, in float32."""
        made: torch.Tensor = _scales(packed, numel, self.block, self.double)
        return made

    def expand(self, packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The values, rounded once to `dtype`. Beside them there are 4 bytes a weight for a while; with the kernel none."""
        numel = shape.numel()
        if nf4_fused.works_on(packed):
            return nf4_fused.expand(packed, numel, self.block, self.double, dtype).view(shape)
        codes = packed[: self.blocks(numel) * self.block // 2]
        pairs = torch.index_select(_table(packed.device), 0, codes.int())
        rows = pairs.view(-1, self.block).mul_(self.scales(packed, numel)[:, None])
        return rows.view(-1)[:numel].view(shape).to(dtype)


@torch.library.custom_op("holdall::nf4_scales", mutates_args=())
def _scales(packed: torch.Tensor, numel: int, block: int, double: bool) -> torch.Tensor:
    """One op, since programs of single ops cannot have bytes seen as floats."""
    form = NormalFloat4(block=block, double=double)
    start, floats, end = form.offsets(numel)
    numbers = packed[floats:end].view(torch.float32)
    if not double:
        return numbers.clone()
    count = form.blocks(numel)
    steps = numbers[:-1].repeat_interleave(GROUP)[:count]
    return packed[start : start + count].view(torch.int8).float().mul_(steps).add_(numbers[-1])


@_scales.register_fake
def _(packed: torch.Tensor, numel: int, block: int, double: bool) -> torch.Tensor:
    return packed.new_empty(NormalFloat4(block=block, double=double).blocks(numel), dtype=torch.float32)


def _table(device: torch.device) -> torch.Tensor:
    """The two numbers of every byte, (256, 2)."""
    if device not in _TABLES:
        with torch.no_grad(), _disable_current_modes():  # not a fake tensor of a trace
            book = torch.tensor(code_book())
            both = torch.stack([book.repeat_interleave(16), book.repeat(16)], dim=1)
            _TABLES[device] = both.to(device)
    return _TABLES[device]
