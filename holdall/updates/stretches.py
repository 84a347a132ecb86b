"""How many elements of a large tensor an update works on at a time: what it makes on the way is as small.

That follows from the device of its tensors, unless a step is traced for a machine that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

ON_HOST = 1 << 20  # elements: what is made on the way stays in a processor's caches
_target: ContextVar[str] = ContextVar("target", default="")


@contextmanager
def made_for(kind: str) -> Iterator[None]:
    """Updates inside are made as on such a device, wherever their tensors lie."""
    before = _target.set(kind)
    try:
        yield
    finally:
        _target.reset(before)


def piece_of(device: torch.device, *, on_gpu: int) -> int:
    """A GPU wants more of them at once; how many depends on what is done."""
    return on_gpu if (_target.get() or device.type) == "cuda" else ON_HOST
