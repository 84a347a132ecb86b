"""Whatever way a harness is left, the device's limit and torch's own functions are what they were."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.utils._python_dispatch import _get_current_dispatch_mode

from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.budget.meter import Meter
from holdall.runtime.states.guard import unwatch_calls
from holdall.runtime.switching.backward_hook import unwatch_backward


def leave_with(owner: object, meter: Meter, stop_recording: Callable[[], None]) -> Callable[[], object]:
    """If the owner is collected without having been closed, its meter stops. Returns what calls this off.

    On a CPU the meter knows its owner, whom it would keep alive: there it is the ledger alone that is stopped.
    """
    ledger = meter.ledger
    finalizer = weakref.finalize(owner, _leave, meter.stop if ledger is None else lambda: _stop_ledger(ledger), stop_recording)
    finalizer.atexit = False  # the process goes, and its limits with it
    return finalizer.detach


def _leave(stop: Callable[[], None], stop_recording: Callable[[], None]) -> None:
    unwatch_backward()
    unwatch_calls()
    stop_recording()
    stop()


def _stop_ledger(ledger: Ledger) -> None:
    """It counts and stops nothing more; it leaves torch's stack of modes too, if nothing lies above it."""
    ledger.budget = None
    if _get_current_dispatch_mode() is ledger:
        ledger.__exit__(None, None, None)
