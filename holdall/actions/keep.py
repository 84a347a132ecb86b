"""Keep: leave a block as it is. The null action; it records that a planner considered the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class Keep(Facts):
    block: str

    name: ClassVar[str] = "keep"
    exact: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    rank: ClassVar[int] = 0
    by_default: ClassVar[bool] = True

    @staticmethod
    def samples(trace: Trace) -> list[Keep]:
        return [Keep(block=trace.blocks[0].name)]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        problem.trace.block(self.block)
        return schedule

    def install(self, harness: Harness) -> None:
        harness.policy(self.block)
