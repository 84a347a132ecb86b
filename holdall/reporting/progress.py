"""One line on a terminal for work that takes longer than a second; no output elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from holdall.types import Progress
from holdall.types.plan import silent

_PATIENCE = 1.0  # seconds before anything is shown
_BEAT = 0.2  # seconds between two updates
_WIDTH = 78


@contextmanager
def terminal_line(stream: TextIO | None = None) -> Iterator[Progress]:
    """A `progress=` callable that rewrites one terminal line, which is erased at the end.

    `stream`: default stderr. If it is not a terminal, nothing is written.
    """
    out = stream if stream is not None else sys.stderr
    if not _is_terminal(out):
        yield silent
        return
    line = _Line(out)
    line.start()
    try:
        yield line.told
    finally:
        line.stop()


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the stream is closed
        return False


class _Line:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = time.monotonic()
        self._text = ""
        self._shown = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdall-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def told(self, what: str, done: int, total: int, best: str) -> None:
        count = f" {done}/{total}" if total else ""
        self._text = f"{what}{count}" + (f" ({best})" if best else "")

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        if self._shown:
            self._write("")

    def _run(self) -> None:
        while not self._is_over.wait(_BEAT):
            spent = time.monotonic() - self._began
            if self._text and spent >= _PATIENCE:
                self._shown = True
                self._write(f"holdall: {self._text}, {spent:.0f} s")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._out.write(f"\r{text[:_WIDTH]:<{_WIDTH}}\r" if not text else f"\r{text[:_WIDTH]:<{_WIDTH}}")
            self._out.flush()
