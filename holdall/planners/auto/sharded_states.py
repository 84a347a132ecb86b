"""How many optimizer states of a sharded step are on the host: what the budget asks for, by how activations are treated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from holdall.actions.host_states import HostStates, obstacle, pieces_of
from holdall.planners.auto.search import Search
from holdall.types import KEEP, Choice, Problem

_BETWEEN = (1 / 3, 2 / 3)  # counts that are tried between the two ends


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

    def counts(self, search: Search, problem: Problem, least: Sequence[Choice]) -> list[int]:
        """Those worth a search under the budget of `problem`, from as few as fit if activations take the `least` memory to as
        few as let all of them stay."""
        if not self.is_possible:
            return []

        def fewest(choices: Sequence[Choice]) -> int:
            """All, if none fit."""

            def fits(count: int) -> bool:
                found = (search.outcome((*search.uniform(choice), *self.at(count))) for choice in choices)
                return any(o is not None and o.peak[problem.home] <= problem.limit(problem.home) for o in found)

            return min(bisect_left(range(self.most + 1), True, key=fits), self.most)

        low, high = fewest(least), fewest((KEEP,))
        return sorted({low, *(low + round(share * (high - low)) for share in _BETWEEN), high} - {0})
