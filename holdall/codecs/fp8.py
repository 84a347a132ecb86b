"""Eight-bit floats with a scale per group: the largest value of a group becomes the format's largest.

e4m3 and e5m2 after Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433). Values are clamped before the cast,
which older versions of torch do not do by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdall.codecs._base import GROUP, Scratch, Sections, chunk_of, chunks, groups_of, load, scratch_bytes

_SMALL = 1e-30  # the least maximum of a group that is used as a scale


@dataclass(frozen=True, kw_only=True)
class Fp8:
    wide: bool = False  # e5m2: more range, one bit less precision

    @property
    def bits(self) -> int:
        return 8

    @property
    def dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.wide else torch.float8_e4m3fn

    def nbytes(self, numel: int) -> int:
        return groups_of(numel) * (GROUP + 4)

    def workspace(self, numel: int, device: str) -> tuple[int, int]:
        chunk = chunk_of(numel, device)
        return scratch_bytes(_ENCODING, chunk), scratch_bytes(_DECODING, chunk)

    def encode(self, flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG002
        numel, device = flat.numel(), flat.device
        codes = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)
        values8, scales = self._split(codes, groups_of(numel))
        scratch = Scratch(_ENCODING, chunk_of(numel, device.type), device)
        largest = torch.finfo(self.dtype).max
        for rows, elements in chunks(numel, device.type):
            n = rows.stop - rows.start
            values, low, high = (scratch.take(name, n) for name in ("values", "low", "high"))
            load(values, flat[elements])
            torch.amin(values, 1, out=low[:, 0])
            torch.amax(values, 1, out=high[:, 0])
            torch.maximum(high, low.neg_(), out=high)
            high.clamp_min_(_SMALL).div_(largest)
            scales[rows].copy_(high[:, 0])
            values8[rows].copy_(values.div_(high).clamp_(-largest, largest))
        return codes

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        device = codes.device
        out = torch.empty(numel, dtype=dtype, device=device)
        values8, scales = self._split(codes, groups_of(numel))
        scratch = Scratch(_DECODING, chunk_of(numel, device.type), device)
        for rows, elements in chunks(numel, device.type):
            values = scratch.take("values", rows.stop - rows.start)
            values.copy_(values8[rows]).mul_(scales[rows][:, None])
            out[elements].copy_(values.view(-1)[: elements.stop - elements.start])
        return out

    def _split(self, codes: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        values8 = codes[: groups * GROUP].view(self.dtype).view(groups, GROUP)
        return values8, codes[groups * GROUP :].view(torch.float32)


_ENCODING: Sections = {"values": (torch.float32, GROUP), "low": (torch.float32, 1), "high": (torch.float32, 1)}
_DECODING: Sections = {"values": (torch.float32, GROUP)}
