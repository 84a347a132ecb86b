"""How many optimizer states of a sharded step are on the host: what the budget asks for, by how activations are treated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from holdall.actions.host_states import HostStates, obstacle, pieces_of
from holdall.types import Problem
from holdall.types.trace import Bytes

_BETWEEN = (1 / 3, 2 / 3)  # counts that are tried between the fewest and as many as let all activations stay


class ShardedStates:
    """The counts of pieces of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        far = problem.hardware.far
        can = problem.permits(HostStates) and far is not None and not obstacle(problem.trace)
        self.most = len(pieces_of(problem.trace)) if can else 0

    @property
    def is_possible(self) -> bool:
        return self.most > 0

    def at(self, count: int) -> tuple[HostStates, ...]:
        """The first `count` pieces on the host."""
        return (HostStates.first(self._problem, count),) if count else ()

    def describe(self, count: int) -> str:
        return f"{count} of {self.most} pieces of optimizer states on the host"

    def counts(self, limit: Bytes, least: Callable[[int], Bytes], plain: Callable[[int], Bytes]) -> list[int]:
        """Those worth a search, by the peak for a count: with activations in the least memory, and with all of them kept."""
        fewest, enough = self._fewest(limit, least), self._fewest(limit, plain)
        between = (fewest + round(share * (enough - fewest)) for share in _BETWEEN)
        return sorted({fewest, *between, enough} - {0})

    def _fewest(self, limit: Bytes, peak: Callable[[int], Bytes]) -> int:
        """The fewest that fit; all, if none do."""
        return min(bisect_left(range(self.most + 1), True, key=lambda count: peak(count) <= limit), self.most)
