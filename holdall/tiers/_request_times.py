"""How fast a tier serves its requests: bytes and the time in which any request of that direction is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class RequestTimes:
    """Requests of several threads at once; time in which several are under way counts once."""

    def __init__(self) -> None:
        self.nbytes = self.requests = 0
        self.seconds = 0.0
        self._going = 0
        self._begun = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def request(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self._going:
                self._begun = time.perf_counter()
            self._going += 1
        try:
            yield
        finally:
            with self._lock:
                self._going -= 1
                self.nbytes += nbytes
                self.requests += 1
                if not self._going:
                    self.seconds += time.perf_counter() - self._begun
