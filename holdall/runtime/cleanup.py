"""Restores the allocator's limit and torch's own functions, however a harness ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from holdall.errors import Unsupported
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.meter import Meter
from holdall.runtime.states.gradients.clipping import unwatch_clipping
from holdall.runtime.states.guard import unwatch_calls
from holdall.runtime.switching.backward_hook import unwatch_backward


def leave_with(owner: object, meter: Meter, stop_recording: Callable[[], None]) -> Callable[[], object]:
    """Stop the meter if the owner is garbage-collected without being closed. Returns the function that cancels this.

    On a CPU the meter refers to its owner and would keep it alive, so only the ledger is stopped there.
    """
    ledger = meter.ledger
    finalizer = weakref.finalize(owner, _leave, meter.stop if ledger is None else lambda: _stop_ledger(ledger), stop_recording)
    finalizer.atexit = False  # at exit the process takes its limits with it
    return finalizer.detach


def _leave(stop: Callable[[], None], stop_recording: Callable[[], None]) -> None:
    unwatch_backward()
    unwatch_calls()
    unwatch_clipping()
    stop_recording()
    stop()


def _stop_ledger(ledger: Ledger) -> None:
    """Stop counting and enforcing; leave torch's stack of modes if nothing lies above."""
    ledger.budget = None
    if _get_current_dispatch_mode() is ledger:
        ledger.__exit__(None, None, None)


def refuse_closed(harness: weakref.ref[Any]) -> None:
    """Refuse a backward after `close()`: its offloaded tensors and working weights have been freed."""
    owner = harness()
    if owner is None or owner._closed:
        raise Unsupported(
            "the harness was closed between this forward and its backward, so the saved tensors are gone",
            hint="call `harness.close()` after the backward; or run the forward again",
        )
