"""Counts the bytes of live storages on the device; the reference measurement where the device is a CPU."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from holdall.errors import OverBudget
from holdall.ops import tensors_in
from holdall.sharded import has_shards, is_shard, local_of, watch_resizes
from holdall.units import format_bytes

_LETTING_GO = 0.25  # seconds that other threads get to drop what they hold


class Ledger(TorchDispatchMode):
    """Counts every storage that an op makes or touches until its last reference dies.

    `budget`: raise `OverBudget` at the op that exceeds it. Kernel workspaces inside an op are not counted.
    """

    supports_higher_order_operators = True

    def __init__(self, *, seed: Iterable[torch.Tensor] = (), budget: int | None = None) -> None:
        super().__init__()
        self.budget = budget
        self._live = self.peak = 0
        self.peak_op = ""
        self.curve: list[tuple[float, int]] = []  # (time, live bytes) after each op since the last `restart`
        self._size: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._gone: deque[int] = deque()  # storages that died since; any thread may be the one that drops the last reference
        self._counting = threading.RLock()
        self._paused = threading.local()  # per thread
        self.elsewhere: set[int] = set()  # storages that belong to another tier
        self._resizes = False  # storages may change their size, as those of sharded parameters do
        for tensor in seed:
            self._resizes = self._resizes or is_shard(tensor)
            self.see(local_of(tensor).untyped_storage(), "there before")
        self._end_resizes: Callable[[], None] | None = None
        self.restart()

    def __enter__(self) -> Ledger:
        if self._resizes:
            self._end_resizes = watch_resizes(self._resized)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._end_resizes is not None:
            self._end_resizes()
            self._end_resizes = None

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if not getattr(self._paused, "is_on", False):
            self.see(storage, "resize")

    def restart(self) -> None:
        """Begin a new peak and a new curve."""
        self.peak, self.peak_op = self.live, "there before"
        self.curve = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside work on another tier's memory and are not counted."""
        before = getattr(self._paused, "is_on", False)
        self._paused.is_on = True
        try:
            yield
        finally:
            self._paused.is_on = before

    @property
    def live(self) -> int:
        with self._counting:
            self._settle()
            return self._live

    def _settle(self) -> None:
        """Count off what died. Only who holds the lock changes the sum: a callback that did could interrupt a change of it."""
        while self._gone:
            key = self._gone.popleft()
            self._watch.pop(key, None)
            self._live -= self._size.pop(key, 0)

    def see(self, storage: torch.UntypedStorage, op: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self._counting:
            self._settle()  # first: a new storage may lie where a dead one was
            before = self._size.get(key)
            if before == size or key in self.elsewhere or (before is None and not _has_bytes(storage)):
                return
            self._size[key] = size
            self._live += size - (before or 0)
            if before is None:
                self._watch[key] = weakref.ref(storage, lambda _: self._gone.append(key))
        live = self._live_now()
        with self._counting:
            if live > self.peak:
                self.peak, self.peak_op = live, op
        if self.budget is not None and live > self.budget:
            raise OverBudget(
                f"`{op}` raised memory in use to {format_bytes(live)}, over the budget of {format_bytes(self.budget)}: "
                f"{live - self.budget:,} bytes too many, by a tensor of {size:,} bytes",
                hint="use a larger budget; if batches grow, pass the longest to `fit`, or `lengths=`; pass `loss=` if the loop "
                "computes the loss itself; keep no model outputs from one step to the next",
            )

    def _live_now(self) -> int:
        """Bytes in use; over the budget, those that are left once other threads had time to let go of what they hold:
        gloo's keep the buffers of a collective for a moment after it is done."""
        live = self.live
        if self.budget is None or live <= self.budget or not (dist.is_available() and dist.is_initialized()):
            return live
        end = time.perf_counter() + _LETTING_GO
        while live > self.budget and time.perf_counter() < end:
            time.sleep(0.001)
            live = self.live
        return live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_shards(types):
            return NotImplemented  # its ops on local tensors are seen
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(self._paused, "is_on", False):
            return out
        name = str(func)
        for t in tensors_in((args, kwargs, out)):
            self.see(t.untyped_storage(), name)
        self.curve.append((time.perf_counter(), self.live))
        return out


def _has_bytes(storage: torch.UntypedStorage) -> bool:
    """False for placeholders (`Gradient`, lazy logits, fake tensors), which have a size but no memory."""
    if storage.device.type == "meta":
        return False
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False
