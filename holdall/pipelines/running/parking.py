"""Parks what autograd saves on one rank in the memory of others, as MPress (HPCA 2023) does, until the backward.

    parking = Parking(borrower=0, lenders=[2, 3])  # every rank calls it
    with parking.around():  # on the borrower, around the forward of what is to leave
        out = block(x)
    ...
    parking.close()  # every rank, when all backwards are over

A tensor is cut into stripes, one for each lender. A lender keeps them in a thread that serves the borrower's messages, over a
group of its own, while the rank does its own work. Copies are waited for: this is right on any ranks that have sends and
receives of host memory (gloo), and fast on none.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from holdall.errors import InvalidInput

_PUT, _GET, _DROP, _END = range(4)


class _Ticket:
    """A tensor that is elsewhere. When autograd lets go of it, so do the lenders, with the next message to them."""

    def __init__(self, key: int, tensor: torch.Tensor, dropped: deque[int]) -> None:
        self.key, self.shape, self.dtype, self._dropped = key, tensor.shape, tensor.dtype, dropped

    def __del__(self) -> None:
        self._dropped.append(self.key)


class Parking:
    """`least`: bytes; smaller tensors stay, and so do parameters."""

    def __init__(self, *, borrower: int, lenders: Sequence[int], least: int = 1024) -> None:
        ranks = range(dist.get_world_size())
        if not lenders or len({borrower, *lenders}) != 1 + len(lenders) or not {borrower, *lenders} <= set(ranks):
            raise InvalidInput(
                f"rank {borrower} cannot park tensors on ranks {list(lenders)}",
                hint=f"name other ranks of 0 to {ranks[-1]}, each once",
            )
        self._borrower, self._lenders, self._least = borrower, tuple(lenders), least
        self._group = dist.new_group(sorted({borrower, *lenders}), backend="gloo")
        self._keys = itertools.count()
        self._dropped: deque[int] = deque()
        self._lock = threading.Lock()  # one message at a time
        self._kept: dict[int, torch.Tensor] = {}
        self.most = 0  # bytes that this rank has kept for the borrower at once
        self.sent = 0  # bytes that this rank has sent to be kept
        self._thread: threading.Thread | None = None
        if dist.get_rank() in self._lenders:
            self._thread = threading.Thread(target=self._serve, name="parking", daemon=True)
            self._thread.start()

    def around(self) -> saved_tensors_hooks:
        """What is saved in this context is parked; for the borrower."""
        assert dist.get_rank() == self._borrower, "only the borrower parks tensors"
        return saved_tensors_hooks(self._pack, self._unpack)

    def close(self) -> None:
        """End the lenders' threads."""
        if dist.get_rank() == self._borrower:
            with self._lock:
                self._drop()
                for lender in self._lenders:
                    self._tell(lender, _END)
        if self._thread is not None:
            self._thread.join()
            assert not self._kept, "tensors are still parked"

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() * tensor.element_size() < self._least or isinstance(_base(tensor), torch.nn.Parameter):
            return tensor
        key = next(self._keys)
        with self._lock:
            self._drop()
            for lender, stripe in zip(self._lenders, self._stripes(tensor.detach().contiguous()), strict=True):
                self._tell(lender, _PUT, key, stripe.numel())
                dist.send(stripe, lender, group=self._group)
                self.sent += stripe.numel()
        return _Ticket(key, tensor, self._dropped)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Ticket):
            assert isinstance(saved, torch.Tensor)
            return saved
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        with self._lock:
            self._drop()
            for lender, stripe in zip(self._lenders, self._stripes(whole), strict=True):
                self._tell(lender, _GET, saved.key)
                dist.recv(stripe, lender, group=self._group)
        return whole

    def _drop(self) -> None:
        """Say which tensors are no longer needed."""
        while self._dropped:
            key = self._dropped.popleft()
            for lender in self._lenders:
                self._tell(lender, _DROP, key)

    def _stripes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.view(-1).view(torch.uint8).tensor_split(len(self._lenders))

    def _tell(self, lender: int, what: int, key: int = 0, nbytes: int = 0) -> None:
        dist.send(torch.tensor([what, key, nbytes]), lender, group=self._group)

    def _serve(self) -> None:
        """A lender's thread: keep and return what the borrower says."""
        words = torch.empty(3, dtype=torch.int64)
        while True:
            dist.recv(words, self._borrower, group=self._group)
            what, key, nbytes = words.tolist()
            if what == _END:
                return
            if what == _PUT:
                self._kept[key] = torch.empty(nbytes, dtype=torch.uint8)
                self.most = max(self.most, sum(t.numel() for t in self._kept.values()))
                dist.recv(self._kept[key], self._borrower, group=self._group)
            elif what == _GET:
                dist.send(self._kept[key], self._borrower, group=self._group)
            else:
                del self._kept[key]


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
