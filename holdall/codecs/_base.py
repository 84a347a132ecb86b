"""Shared by all codecs: groups, scratch memory of known size, and the packing of codes into bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

GROUP = 256  # elements that share a scale
_CHUNK = {"cpu": 2**8, "cuda": 2**14}  # groups per chunk: enough for a CPU cache, or to fill a GPU

Field = tuple[int, int]  # (lowest bit of the code, bits): a code of 5 bits is stored as 4 and 1
Sections = Mapping[str, tuple[torch.dtype, int]]  # name -> (dtype, elements per group)


class Codec(Protocol):
    """Flat floats to a buffer of bytes and back."""

    @property
    def bits(self) -> int: ...

    def nbytes(self, numel: int) -> int:
        """Bytes of the buffer."""
        ...

    def workspace(self, numel: int, device: str) -> tuple[int, int]:
        """Scratch bytes for encoding, and for decoding; both are freed afterwards."""
        ...

    def encode(self, flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor: ...

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor: ...


def groups_of(numel: int) -> int:
    return -(-numel // GROUP)


def chunk_of(numel: int, device: str) -> int:
    """Groups per chunk."""
    return min(groups_of(numel), _CHUNK.get(device, _CHUNK["cuda"]))


def scratch_bytes(sections: Sections, groups: int) -> int:
    return groups * sum(dtype.itemsize * count for dtype, count in sections.values())


class Scratch:
    """Memory for one chunk, cut into sections. All work happens in it, so that the bytes of encoding are known beforehand."""

    def __init__(self, sections: Sections, groups: int, device: torch.device) -> None:
        room = torch.empty(scratch_bytes(sections, groups), dtype=torch.uint8, device=device)
        self._parts: dict[str, torch.Tensor] = {}
        start = 0
        for name, (dtype, count) in sorted(
            sections.items(), key=lambda s: -s[1][0].itemsize
        ):  # widest dtype first, for alignment
            end = start + groups * dtype.itemsize * count
            self._parts[name] = room[start:end].view(dtype).view(groups, count)
            start = end

    def take(self, name: str, groups: int) -> torch.Tensor:
        """The first rows of a section."""
        return self._parts[name][:groups]


def chunks(numel: int, device: str) -> Iterator[tuple[slice, slice]]:
    """(groups, elements) of every chunk."""
    total, step = groups_of(numel), chunk_of(numel, device)
    for first in range(0, total, max(step, 1)):
        last = min(first + step, total)
        yield slice(first, last), slice(first * GROUP, min(last * GROUP, numel))


def load(into: torch.Tensor, part: torch.Tensor) -> None:
    """Copy a chunk in; a short last group is padded with its last element, which changes no minimum or maximum."""
    flat = into.view(-1)
    count = part.numel()
    flat[:count].copy_(part)
    if count < flat.numel():
        flat[count:].copy_(flat[count - 1])


def fields_of(bits: int) -> list[Field]:
    """Powers of two that add up to `bits`, largest first; each fills bytes without a gap."""
    found, low = [], bits
    for width in (8, 4, 2, 1):
        if bits & width:
            low -= width
            found.append((low, width))
    return found


def split_fields(codes: torch.Tensor, groups: int, bits: int) -> list[torch.Tensor]:
    """The parts of the buffer that hold each field, one row of bytes per group."""
    found, start = [], 0
    for _, width in fields_of(bits):
        end = start + groups * 32 * width
        found.append(codes[start:end].view(groups, 32 * width))
        start = end
    return found


def pack(values: torch.Tensor, into: list[torch.Tensor], spare: torch.Tensor, bits: int) -> None:
    """Codes, one byte each, into their fields. Element j * width + k of a group is the j-th part of byte k."""
    groups = values.shape[0]
    for (low, width), out in zip(fields_of(bits), into, strict=True):
        if width == 8:
            out.copy_(values)
            continue
        rows = values.view(groups, 8 // width, 32 * width)
        part = spare.view(-1)[: groups * 32 * width].view(groups, 32 * width)
        for j in range(8 // width):
            torch.bitwise_right_shift(rows[:, j], low, out=part)
            part.bitwise_and_(2**width - 1).bitwise_left_shift_(width * j)
            if j == 0:
                out.copy_(part)
            else:
                out.bitwise_or_(part)


def unpack(fields: list[torch.Tensor], into: torch.Tensor, spare: torch.Tensor, bits: int) -> None:
    """The inverse of `pack`."""
    groups = into.shape[0]
    for n, ((low, width), packed) in enumerate(zip(fields_of(bits), fields, strict=True)):
        if width == 8:
            into.copy_(packed)
            continue
        rows = into.view(groups, 8 // width, 32 * width)
        part = spare.view(-1)[: groups * 32 * width].view(groups, 32 * width)
        for j in range(8 // width):
            torch.bitwise_right_shift(packed, width * j, out=part)
            part.bitwise_and_(2**width - 1).bitwise_left_shift_(low)
            if n == 0:
                rows[:, j].copy_(part)
            else:
                rows[:, j].bitwise_or_(part)


def generator_on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """The generator, or one on the device that is seeded from it."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device=device).manual_seed(seed_from(generator))


def seed_from(generator: torch.Generator) -> int:
    """A number drawn on the host, without waiting for the device."""
    return int(torch.randint(2**31 - 1, (1,), generator=generator))
