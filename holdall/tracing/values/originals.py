"""Gives real tensors that a traced step changes in place their values back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from holdall.tracing.recorder import TensorRecord


class Originals:
    """Copies of what was there before the step and is about to be changed."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, changing: Iterable[torch.Tensor], ids: Mapping[int, int], tensors: Sequence[TensorRecord]) -> None:
        """`ids`: the recorded tensor of each storage."""
        for t in changing:
            if isinstance(t, FakeTensor) or t.device.type == "meta":
                continue
            storage = t.untyped_storage()
            index = ids.get(storage._cdata)
            if index is not None and tensors[index].born < 0 and storage._cdata not in self._kept:
                with _disable_current_modes():
                    self._kept[storage._cdata] = (storage, storage.clone())

    def put_back(self) -> None:
        with _disable_current_modes():
            for storage, original in self._kept.values():
                storage.copy_(original)
        self._kept.clear()
