"""The slice size of updates of large tensors, which bounds their temporaries.

It depends on the device of the tensors, unless a step is traced for another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

ON_HOST = 1 << 20  # elements: temporaries stay in a processor's caches
_target: ContextVar[str] = ContextVar("target", default="")


@contextmanager
def made_for(kind: str) -> Iterator[None]:
    """Updates inside use the slices of this kind of device, wherever their tensors are."""
    before = _target.set(kind)
    try:
        yield
    finally:
        _target.reset(before)


def piece_of(device: torch.device, *, on_gpu: int) -> int:
    """Elements per slice. A GPU needs more; `on_gpu` says how many."""
    return on_gpu if (_target.get() or device.type) == "cuda" else ON_HOST
