"""Random generators of the optimizers' own, and forwards that draw the same random numbers again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One seed from several numbers (the finaliser of SplitMix64 over each); below 2**63, so that a generator takes it."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def generator(device: torch.device, *numbers: int) -> torch.Generator:
    """A new generator seeded by these numbers; the global one is not touched."""
    made = torch.Generator(device=device)
    made.manual_seed(mix(*numbers))
    return made


@contextmanager
def rewound(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores the global random state afterwards, so that the next forward draws the same numbers (dropout)."""
    cuda = sorted({d.index if d.index is not None else torch.cuda.current_device() for d in devices if d.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        yield
