"""What tests put in place of parts of the library, for a while: small pieces, a slow host, a fixed machine.

Almost each is a context manager, and the only place that knows which internals it replaces.

    with planned_for(machine()), late_updates(0.01):
        holdall.fit(model, optimizer, batch, budget="1GiB")
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import holdall
from holdall import problem
from holdall.checkpoints import tensors
from holdall.errors import Unsupported
from holdall.fitting import plan_book, remembering
from holdall.machine import probe
from holdall.optim import mezo
from holdall.optim._in_backward import consuming
from holdall.optim._math import per_parameter
from holdall.planners import pofo
from holdall.planners import str as swap_planner
from holdall.planners.auto import PlacementSearch
from holdall.planners.checkmate import quick
from holdall.planners.str.graph import Decisions, StepGraph
from holdall.planning import highs
from holdall.registry import member_class
from holdall.runtime.states import host_room
from holdall.runtime.states.updating.updater import Updater
from holdall.tiers import _staged, nvme
from holdall.types import Action, Block, Hardware
from holdall.updates import host_adam, host_library, host_step, parts, stretches
from holdall.updates.host_step import Step, step_by_torch


@contextmanager
def replaced(*places: tuple[object, str, object]) -> Iterator[None]:
    """Attributes with other values inside: (owner, name, value) each."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def planned_for(hardware: Hardware) -> Iterator[None]:
    """Whoever names no hardware plans for this one: nothing is measured."""
    with replaced((problem, "_probed", lambda _: hardware), (holdall, "probe", lambda *_, **__: hardware)):
        yield


@contextmanager
def pieces_of(elements: int, *, on_gpu: int | None = None) -> Iterator[None]:
    """Updates take so many elements of a large tensor at a time, so that a small one has several pieces, too."""
    host = [(stretches, "ON_HOST"), (parts, "PIECE"), (consuming, "PIECE"), (mezo, "PIECE"), (host_step, "SLICE")]
    gpu = [(per_parameter, "_ON_GPU", on_gpu)] if on_gpu is not None else []
    with replaced(*((module, name, elements) for module, name in host), *gpu):
        yield


@contextmanager
def kept_jobs() -> Iterator[list[Callable[[], Any]]]:
    """Every job that the host makes beside the step stays referenced after it is done, as by a thread that is slow to end."""
    submit = Updater.submit
    jobs: list[Callable[[], Any]] = []

    def kept(self: Updater, job: Callable[[], Any]) -> Any:
        jobs.append(job)
        return submit(self, job)

    with replaced((Updater, "submit", kept)):
        yield jobs


@contextmanager
def late_updates(seconds: float) -> Iterator[None]:
    """Every update that the host makes beside the step begins late: who does not wait for it sees the old values."""
    submit = Updater.submit

    def later(self: Updater, job: Callable[[], Any]) -> Any:
        def begins_late() -> Any:
            time.sleep(seconds)
            return job()

        return submit(self, begins_late)

    with replaced((Updater, "submit", later)):
        yield


@contextmanager
def failing_updates(error: Exception) -> Iterator[None]:
    """Every update that the host makes with the optimizer's own ops raises."""

    def fail(*_: object, **__: object) -> None:
        raise error

    with replaced((Updater, "on_host", fail)):
        yield


@contextmanager
def watched_updates(watch: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """Every pass of the host's Adam is called through this."""
    with replaced((Updater, "one_pass", watch(Updater.one_pass))):
        yield


@contextmanager
def disk_pieces_of(nbytes: int) -> Iterator[None]:
    """Stores copy so many bytes at a time to and from a disk, so that a small tensor has several pieces, too."""
    with replaced((_staged, "PIECE", nbytes), (nvme, "PIECE", nbytes)):
        yield


@contextmanager
def host_adam_by(step: Step = step_by_torch, *, is_exact: bool = True) -> Iterator[None]:
    """The host's Adam made by this function; by torch's kernel, as where there is no compiler."""
    with replaced((host_adam, "_chosen", host_adam._Backend("stand-in", "asked for", is_exact, step))):
        yield


@contextmanager
def host_adam_not_chosen() -> Iterator[None]:
    """As in a new process: how the host makes Adam's updates is chosen at the next one. A compiler need not optimise much."""
    quick = tuple("-O0" if flag == "-O3" else flag for flag in host_library.FLAGS)
    with replaced((host_adam, "_chosen", None), (host_library, "FLAGS", quick)):
        yield


def forget_machine() -> None:
    """As in a new process: what this machine can do is measured when somebody asks, or read from the cache on disk."""
    probe._measure.cache_clear()
    problem._probed.cache_clear()


@contextmanager
def host_with(free: Callable[[], int]) -> Iterator[None]:
    """The host has so many bytes free when a plan is taken down."""
    with replaced((host_room, "free_memory", free)):
        yield


@contextmanager
def full_disk(room: int, error: BaseException | None = None) -> Iterator[None]:
    """A disk with room for so many more bytes of checkpoints' tensors; a write beyond them raises: this error, or that of a
    full disk."""
    write, left = tensors._write, room

    def counted(file: io.FileIO, data: memoryview) -> None:
        nonlocal left
        take = min(len(data), left)
        left -= take
        write(file, data[:take])
        if take < len(data):
            raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with replaced((tensors, "_write", counted)):
        yield


class DiskCalls:
    """Calls of one kind that the threads of disks made so far."""

    count = 0


@contextmanager
def failing_disk(call: str, first: int | None, code: int = errno.EIO) -> Iterator[DiskCalls]:
    """Calls of `os.preadv` or `os.pwritev` to disks fail from this one on (0: all of them; None: never), as on a disk that
    broke, or is full; what counts them."""
    plain, seen, lock = getattr(os, call), DiskCalls(), threading.Lock()

    def counted(*given: Any) -> int:
        if not threading.current_thread().name.startswith("holdall-nvme"):
            return int(plain(*given))
        with lock:
            number, seen.count = seen.count, seen.count + 1
        if first is not None and number >= first:
            raise OSError(code, os.strerror(code))
        return int(plain(*given))

    with replaced((os, call, counted)):
        yield seen


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Every read and every write of a disk takes so much longer."""

    def later(call: Callable[..., int]) -> Callable[..., int]:
        def slept(*given: Any) -> int:
            time.sleep(seconds)
            return call(*given)

        return slept

    with replaced(*((os, name, later(getattr(os, name))) for name in ("preadv", "pwritev"))):
        yield


@contextmanager
def unreadable(name: str, *, after: int) -> Iterator[None]:
    """Tensors of checkpoint files of this name cannot be read, but for the first few."""
    plain, left = tensors._fill, after

    def broken(file: io.FileIO, into: memoryview) -> int | None:
        nonlocal left
        left -= str(file.name).endswith(name)
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(file, into)

    with replaced((tensors, "_fill", broken)):
        yield


@contextmanager
def impossible(is_refused: Callable[[Action], bool]) -> Iterator[None]:
    """Actions that the function names turn out to be impossible when they are tried, as where only the schedule shows it."""

    def refusing(rewrite: Callable[..., Any]) -> Callable[..., Any]:
        def tried(action: Action, *given: Any) -> Any:
            if is_refused(action):
                raise Unsupported(f"{action.name} cannot be carried out here", hint="do something else")
            return rewrite(action, *given)

        return tried

    kinds = [member_class("actions", name) for name in ("recompute", "offload", "reschedule", "place")]
    with replaced(*((kind, "rewrite", refusing(kind.rewrite)) for kind in kinds)):
        yield


@contextmanager
def everything_cached() -> Iterator[None]:
    """Traces and plans are kept however quickly they were made."""
    with replaced((remembering, "SLOW", 0.0), (plan_book, "SLOW", 0.0)):
        yield


@contextmanager
def no_solver(asked: list[Any]) -> Iterator[None]:
    """Solvers of linear and integer programs find nothing; the programs that they were asked for are added to the list."""
    nothing = highs.Solution(x=None, objective=0.0, bound=0.0, status="unknown", seconds=0.0)

    def solve(model: Any, **_: Any) -> highs.Solution:
        asked.append(model)
        return nothing

    with replaced((highs, "solve", solve)):
        yield


@contextmanager
def swaps_by(solve: Callable[..., Any]) -> Iterator[None]:
    """STR's program is solved by this function, and whatever it answers is plain training."""
    plain = Decisions(until={}, fetch={})
    graph = (StepGraph, "decisions", lambda *_: plain)
    with replaced((swap_planner, "optimum", solve), graph, (StepGraph, "simple", lambda _: [])):
        yield


@contextmanager
def pofo_asks(ask: Callable[..., Any]) -> Iterator[None]:
    """POFO's answer for some bytes is that of this function."""
    with replaced((pofo, "_ask", ask)):
        yield


@contextmanager
def blocks_in_one_row(blocks: Sequence[Block]) -> Iterator[None]:
    """The quick planners of recomputation see these blocks in any trace."""
    with replaced((quick, "runs", lambda _: [blocks])):
        yield


@contextmanager
def updates_via_device_take(least: Callable[..., Any], passing: Callable[..., Any]) -> Iterator[None]:
    """`auto` asks these functions for the seconds of a placement without updates via the device, and with them."""
    with replaced((PlacementSearch, "_least_seconds", least), (PlacementSearch, "_fastest_passing", passing)):
        yield
