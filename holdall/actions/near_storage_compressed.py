"""Near storage with SmartComp: of every gradient only the largest entries are sent; the rest waits for a later step.

Not exact, and so never chosen unless asked for. What is sent and what is kept add up to the gradients, entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from holdall.actions.near_storage import NearStorage
from holdall.errors import InvalidInput
from holdall.types import Problem, Schedule, Trace


@dataclass(frozen=True, kw_only=True)
class NearStorageCompressed(NearStorage):
    keep: float = 0.01  # share of a gradient's entries that are sent

    name: ClassVar[str] = "near_storage_compressed"
    exact: ClassVar[bool] = False
    what: ClassVar[str] = "drives that update get the largest entries of gradients"

    @property
    def share(self) -> float:
        return self.keep

    @staticmethod
    def samples(trace: Trace) -> list[Any]:
        return [NearStorageCompressed()] if trace.units else []

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        if not 0 < self.keep <= 1:
            raise InvalidInput(f"`keep` is {self.keep}", hint="use a share above 0, such as 0.01")
        return super().rewrite(schedule, problem)
