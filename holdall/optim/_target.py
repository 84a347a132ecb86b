"""What kind of device an update is made for: that of its tensors, unless a step is traced for a machine that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_target: ContextVar[str] = ContextVar("target", default="")


@contextmanager
def made_for(kind: str) -> Iterator[None]:
    """Updates inside are made as on such a device, wherever their tensors lie."""
    before = _target.set(kind)
    try:
        yield
    finally:
        _target.reset(before)


def kind_of(device: torch.device) -> str:
    return _target.get() or device.type
