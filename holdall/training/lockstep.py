"""Several runs of the same code, in lockstep: each in a thread of its own, one at a time, halted where it calls `meet`.

A model's forward is the user's and is left as it is; to bring all micro-batches through one layer before the next, each must
stop at the layer and go on later. Threads never run side by side here: whoever calls `advance` waits until that run has met
again or is over. They see the caller's grad mode, autocast, dispatch modes and CUDA stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a run has halted, and what it has brought."""

    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """A run has ended with this result."""

    result: Any


class _Leave(BaseException):
    """Unwinds a run that nobody waits for any more."""


class _Run(threading.Thread):
    def __init__(self, job: Callable[[], Any], state: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="holdall-lockstep")
        self._job = job
        self._state = state
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox: SimpleQueue[Any] = SimpleQueue()

    def run(self) -> None:
        try:
            self._wait()
            with self._state():
                result = self._job()
        except _Leave:
            self.outbox.put(None)
        except BaseException as error:  # raised again by whoever waits
            self.outbox.put(error)
        else:
            self.outbox.put(Over(result))

    def meet(self, meeting: Meeting) -> Any:
        self.outbox.put(meeting)
        return self._wait()

    def _wait(self) -> Any:
        answer = self.inbox.get()
        if isinstance(answer, _Leave):
            raise answer
        return answer


class Lockstep:
    """The runs of these jobs; `close` ends those that are not over."""

    def __init__(self, jobs: Sequence[Callable[[], Any]]) -> None:
        state = _callers_state()
        self._runs = [_Run(job, state) for job in jobs]
        for run in self._runs:
            run.start()

    def advance(self, number: int, answer: Any = None) -> Meeting | Over:
        """Let a run go on with this answer to its meeting, until the next one or its end. Raises its error."""
        run = self._runs[number]
        run.inbox.put(answer)
        found = run.outbox.get()
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, (Meeting, Over))
        return found

    def close(self) -> None:
        for run in self._runs:
            if run.is_alive():
                run.inbox.put(_Leave())
            run.join()


def is_in_lockstep() -> bool:
    return isinstance(threading.current_thread(), _Run)


def meet(where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called by a run: halt until the caller of `advance` answers."""
    run = threading.current_thread()
    assert isinstance(run, _Run)
    return run.meet(Meeting(where, args, kwargs))


def _callers_state() -> Callable[[], Any]:
    """A context that gives another thread what torch keeps for each thread."""
    grad = torch.is_grad_enabled()
    modes = list(_get_current_dispatch_mode_stack())
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def state() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            for kind, enabled, dtype in kinds:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
            for mode in modes:
                stack.enter_context(mode)
            yield

    return state
