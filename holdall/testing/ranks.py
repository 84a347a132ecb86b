"""Runs a function on several ranks: processes of this machine, joined by gloo.

    def sums():
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert on_ranks(2, sums) == [2.0, 2.0]

The ranks are forked from a server that has imported torch and holdall already: its start takes seconds, once, and a rank a
tenth of one. They meet through a file, so that no port is taken. A function is found by its file and its name, so it must be
defined at the top of a file. Arguments and results are pickled.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import connection, get_context
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

PRELOADED = [  # what is not installed is left out
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "holdall.api",
    "holdall.analysis",
    "holdall.fitting.on_ranks",
    "holdall.fitting.start",
    "holdall.parallel.attempts",
    "holdall.pipelines",
    "holdall.testing.worlds",
    "holdall.tracing.shards",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
]
_MEMBERS = ("actions", "precision")  # folders of which a first `fit` imports every file
ALL = "HOLDALL_TESTS_ALL"  # in the environment: every case is asked for
_GRACE = 3.0  # seconds that the other ranks have to report after one has failed

K = TypeVar("K")
V = TypeVar("V")
_Named = tuple[str, str, str]  # a function: its module, its file, its name


class RanksFailed(AssertionError):
    """A rank raised an error, died, or did not end in time; says which, and how."""


def on_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function(*args)` on every rank of a group of `world`; returns the results, in the order of the ranks.

    `timeout`: seconds for all of it, and for any single collective. Raises `RanksFailed` with the traceback of every rank that
    failed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    named = (function.__module__, inspect.getfile(function), function.__qualname__)
    job = pickle.dumps((named, args))
    with tempfile.TemporaryDirectory(prefix="holdall-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_main, args=(rank, world, str(Path(folder, "store")), job, timeout, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, (_, writes) in zip(ranks, pipes, strict=True):
                process.start()
                writes.close()
            return _gather([reads for reads, _ in pipes], ranks, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def by_default(cases: dict[K, V], *long: K) -> dict[K, V]:
    """`cases` without those that take long on every rank, and that `pytest --all` runs (`tests/conftest.py`)."""
    assert cases.keys() >= {*long}
    return cases if os.environ.get(ALL) else {case: given for case, given in cases.items() if case not in long}


@cache
def _preloaded() -> list[str]:
    """A rank would import them again, each rank by itself, which takes longer than many a job."""
    folders = [(kind, Path(__file__).parent.parent / kind) for kind in _MEMBERS]
    return PRELOADED + [f"holdall.{kind}.{found.name}" for kind, folder in folders for found in iter_modules([str(folder)])]


def _gather(pipes: list[connection.Connection], ranks: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    end = time.monotonic() + timeout
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        left = end - time.monotonic()
        ready = connection.wait(list(open_pipes), max(0.0, left))
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                is_good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join()
                is_good, value = False, _death(ranks[rank].exitcode)
            (results if is_good else failed)[rank] = value
            if failed:
                end = min(end, time.monotonic() + _GRACE)
        if not ready and left <= 0:
            how = "waited for a rank that failed" if failed else f"did not end within {timeout:g} s"
            failed.update(dict.fromkeys(open_pipes.values(), how))
            break
    if failed:
        said = "\n".join(f"rank {rank} of {len(ranks)}: {what}" for rank, what in sorted(failed.items()))
        raise RanksFailed(said)
    return [results[rank] for rank in range(len(ranks))]


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"left with exit code {code} and no result"


def _main(rank: int, world: int, store: str, job: bytes, timeout: float, pipe: connection.Connection) -> None:
    """A rank: joins the group, calls the function and sends what came of it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), HOLDALL_CACHE="off")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        named, args = pickle.loads(job)
        answer = pickle.dumps((True, _find(named)(*args)))
        pipe.send_bytes(answer)
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps((False, "".join(traceback.format_exception(error)))))
        os._exit(1)


def _find(named: _Named) -> Callable[..., Any]:
    """The function, from its module if that can be imported, else from its file."""
    name, file, path = named
    module = sys.modules.get(name)
    if module is None:
        try:
            module = importlib.import_module(name)
        except ImportError:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def written_bytes() -> int:
    """Bytes that this process has written to sockets and files so far, as the kernel counts them; Linux alone does.

    What gloo sends is written, so the difference of two calls is what a rank sent in between, with some hundred bytes of
    headers for every collective.
    """
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])
