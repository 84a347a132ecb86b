"""What a pool asks of its driver: the simulation of a step, or a run."""

from __future__ import annotations

from typing import Protocol

from holdall.runtime.eviction.storages import Maker, Storage


class Driver(Protocol):
    def rerun(self, maker: Maker, consumes: bool) -> None:
        """Run an op again. `consumes`: it may change its in-place arguments; otherwise it changes copies."""
        ...

    def drop(self, storage: Storage) -> None:
        """Free the bytes of this storage."""
        ...

    # with swaps (see `swapping.py`)

    def send(self, storage: Storage) -> None:
        """Start copying the bytes to the farther tier."""
        ...

    def sent(self, storage: Storage) -> None:
        """Wait for that copy: the bytes on the device may be freed or changed."""
        ...

    def fetch(self, storage: Storage) -> None:
        """Take memory for the bytes and start copying them back."""
        ...

    def arrive(self, storage: Storage) -> None:
        """Wait for that copy: the bytes may be read."""
        ...

    def discard(self, storage: Storage) -> None:
        """Free the copy in the farther tier."""
        ...
