"""Per-group stochastic rounding: a code is the distance from the group's minimum in steps, rounded up or down at random.

ActNN (Chen et al., ICML 2021, arXiv 2104.14129). Minimum and step are stored in bfloat16; here they are rounded *outwards* and
the codes are made with the stored values, so that decoded values have the right mean in spite of that rounding. Groups run
through the flat tensor, across samples: bits are chosen per tensor, not per sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdall.codecs import _triton
from holdall.codecs._base import (
    GROUP,
    Scratch,
    Sections,
    chunk_of,
    chunks,
    generator_on,
    groups_of,
    load,
    pack,
    scratch_bytes,
    seed_from,
    split_fields,
    unpack,
)

_OUT = 1.01 * 2.0**-8  # a little more than half a step of bfloat16: a value moved by this and rounded lies outside the range
_SMALL = 1e-38  # replaces a step of zero


@dataclass(frozen=True, kw_only=True)
class Group:
    bits: int
    stochastic: bool = True

    def nbytes(self, numel: int) -> int:
        return groups_of(numel) * (32 * self.bits + 4)

    def workspace(self, numel: int, device: str) -> tuple[int, int]:
        if device == "cuda":  # one kernel, in registers
            return 0, 0
        chunk = chunk_of(numel, device)
        return scratch_bytes(self._encoding, chunk), scratch_bytes(_DECODING, chunk)

    @property
    def _encoding(self) -> Sections:
        return _ENCODING if self.stochastic else {k: v for k, v in _ENCODING.items() if k != "noise"}

    def encode(self, flat: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        numel, device = flat.numel(), flat.device
        groups = groups_of(numel)
        codes = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=device)
        lows, steps = _scales(codes, groups)
        if _triton.works_on(device):
            seed = seed_from(generator) if self.stochastic else None
            _triton.encode(flat, codes, lows, steps, self.bits, seed)
            return codes
        fields = split_fields(codes, groups, self.bits)
        random = generator_on(device, generator) if self.stochastic else None
        scratch = Scratch(self._encoding, chunk_of(numel, device.type), device)
        for rows, elements in chunks(numel, device.type):
            n = rows.stop - rows.start
            values = scratch.take("values", n)
            load(values, flat[elements])
            low, step = self._range(values, lows[rows], steps[rows], scratch)
            values.sub_(low).div_(step.clamp_min_(_SMALL))
            if random is not None:
                values.add_(scratch.take("noise", n).uniform_(generator=random))
            else:
                values.add_(0.5)
            narrow = scratch.take("codes", n)
            narrow.copy_(values.floor_().clamp_(0, 2**self.bits - 1))
            pack(narrow, [f[rows] for f in fields], scratch.take("spare", n), self.bits)
        return codes

    def _range(
        self, values: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, scratch: Scratch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Minimum and step of every group as stored: the minimum is rounded down, the last level up."""
        n = values.shape[0]
        low, high, stored, wider, wrong = (scratch.take(name, n)[:, 0] for name in ("low", "high", "stored", "wider", "wrong"))
        torch.amin(values, 1, out=low)
        torch.amax(values, 1, out=high)
        stored.copy_(lows.copy_(low))
        torch.gt(stored, low, out=wrong)
        torch.abs(low, out=wider).mul_(-_OUT).add_(low)
        low.copy_(lows.copy_(torch.where(wrong, wider, stored, out=stored)))
        high.sub_(low).div_(2**self.bits - 1)
        stored.copy_(steps.copy_(high))
        torch.lt(stored, high, out=wrong)
        torch.mul(high, 1 + _OUT, out=wider)
        high.copy_(steps.copy_(torch.where(wrong, wider, stored, out=stored)))
        return low[:, None], high[:, None]

    def decode(self, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        groups, device = groups_of(numel), codes.device
        out = torch.empty(numel, dtype=dtype, device=device)
        lows, steps = _scales(codes, groups)
        if _triton.works_on(device):
            _triton.decode(codes, lows, steps, out, self.bits)
            return out
        fields = split_fields(codes, groups, self.bits)
        scratch = Scratch(_DECODING, chunk_of(numel, device.type), device)
        for rows, elements in chunks(numel, device.type):
            n = rows.stop - rows.start
            narrow, values = scratch.take("codes", n), scratch.take("values", n)
            unpack([f[rows] for f in fields], narrow, scratch.take("spare", n), self.bits)
            low, step = scratch.take("low", n), scratch.take("high", n)
            low[:, 0].copy_(lows[rows])
            step[:, 0].copy_(steps[rows])
            values.copy_(narrow).mul_(step).add_(low)
            out[elements].copy_(values.view(-1)[: elements.stop - elements.start])
        return out


_ENCODING: Sections = {
    "values": (torch.float32, GROUP),
    "noise": (torch.float32, GROUP),
    "low": (torch.float32, 1),
    "high": (torch.float32, 1),
    "stored": (torch.float32, 1),
    "wider": (torch.float32, 1),
    "codes": (torch.uint8, GROUP),
    "spare": (torch.uint8, GROUP // 2),
    "wrong": (torch.bool, 1),
}
_DECODING: Sections = {
    "values": (torch.float32, GROUP),
    "low": (torch.float32, 1),
    "high": (torch.float32, 1),
    "codes": (torch.uint8, GROUP),
    "spare": (torch.uint8, GROUP // 2),
}


def _scales(codes: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the minimum and the step of every group, at the end of the buffer."""
    scales = codes[codes.numel() - 4 * groups :].view(torch.bfloat16)
    return scales[:groups], scales[groups:]
