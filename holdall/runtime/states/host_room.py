"""Whether what lies in files becomes ordinary memory again when a plan is taken down, or stays a mapping of them.

States that a disk holds may be larger than the host's memory: copying them all there would end the process, or the machine.
"""

from __future__ import annotations

from holdall.host_memory import free_memory, host_memory
from holdall.tiers import Ticket
from holdall.tiers._keepers import Keepers

_SPARE = 16  # one part of so many of the host's memory stays free


class HostRoom:
    """What the host has left, asked before each unit; memory that stores keep for reuse goes first."""

    def __init__(self, store: Keepers | None) -> None:
        self._store = store
        self.left = 0  # bytes that stay in files

    def has(self, nbytes: int) -> bool:
        """Does so much more fit?"""
        spare = host_memory() // _SPARE
        if free_memory() - nbytes < spare and self._store is not None:
            self._store.trim()
        return free_memory() - nbytes >= spare

    def stays(self, ticket: Ticket | None, nbytes: int) -> bool:
        """Must the tensors made of this ticket's bytes stay so?"""
        if ticket is None or self._store is None or not self._store.can_leave(ticket) or self.has(nbytes):
            return False
        self.left += nbytes
        return True
