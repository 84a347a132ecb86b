"""One bit per element: is it above zero? The backward of a ReLU needs nothing else of its result, so this is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdall.codecs._base import (
    GROUP,
    Scratch,
    Sections,
    chunk_of,
    chunks,
    groups_of,
    pack,
    scratch_bytes,
    split_fields,
    unpack,
)


@dataclass(frozen=True, kw_only=True)
class Sign:
    @property
    def bits(self) -> int:
        return 1

    def nbytes(self, numel: int) -> int:
        return 32 * groups_of(numel)

    def workspace(self, numel: int, device: str) -> tuple[int, int]:
        room = scratch_bytes(_SECTIONS, chunk_of(numel, device))
        return room, room

    def encode(self, flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:  # noqa: ARG002
        numel, device = flat.numel(), flat.device
        codes = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)
        (field,) = split_fields(codes, groups_of(numel), 1)
        scratch = Scratch(_SECTIONS, chunk_of(numel, device.type), device)
        for rows, elements in chunks(numel, device.type):
            n = rows.stop - rows.start
            bits = scratch.take("codes", n)
            flags = bits.view(torch.bool).view(-1)
            count = elements.stop - elements.start
            flags[count:].zero_()
            torch.gt(flat[elements], 0, out=flags[:count])
            pack(bits, [field[rows]], scratch.take("spare", n), 1)
        return codes

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        device = codes.device
        out = torch.empty(numel, dtype=dtype, device=device)
        (field,) = split_fields(codes, groups_of(numel), 1)
        scratch = Scratch(_SECTIONS, chunk_of(numel, device.type), device)
        for rows, elements in chunks(numel, device.type):
            n = rows.stop - rows.start
            bits = scratch.take("codes", n)
            unpack([field[rows]], bits, scratch.take("spare", n), 1)
            out[elements].copy_(bits.view(-1)[: elements.stop - elements.start])
        return out


_SECTIONS: Sections = {"codes": (torch.uint8, GROUP), "spare": (torch.uint8, GROUP // 2)}
