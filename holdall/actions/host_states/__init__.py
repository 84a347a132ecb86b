"""Host states: optimizer states of a model that is sharded over ranks live in host memory.

After ZeRO-Offload (arXiv 2101.06840) and torch's engine: shards of parameters and gradients stay on the device. At the
optimizer's step, states come to the device piece by piece, are updated there and go back, while the next are on their way.
What is left on the device is updated after them, by the optimizer's own step.

`place` is for one process, where weights, masters and gradients may leave too.

Exact: the user's own rule over this rank's parts, plain tensors that share memory with the shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.host_states.schedule import obstacle, pieces_of, rewrite_with_states_on_host, updates
from holdall.errors import InvalidInput, Unsupported
from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

__all__ = ["HostStates", "obstacle", "pieces_of"]


@dataclass(frozen=True, kw_only=True)
class HostStates(Facts):
    pieces: tuple[tuple[str, ...], ...]  # names of parameters whose states move together: the first that the step updates
    slots: int = 2  # pieces that may be on the device at once

    name: ClassVar[str] = "host_states"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 29  # after `shard`, which makes the parameters what they are
    settles_states: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({"place"})
    on_shards: ClassVar[bool] = True
    over_ranks: ClassVar[bool] = True

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({""})

    @staticmethod
    def first(problem: Problem, count: int) -> HostStates:
        """The states of the first `count` of all pieces."""
        return HostStates(pieces=pieces_of(problem.trace)[:count], slots=2 if problem.hardware.overlap else 1)

    @staticmethod
    def samples(trace: Trace) -> list[HostStates]:
        """Half of the states, and all of them."""
        every = () if obstacle(trace) else pieces_of(trace)
        return [HostStates(pieces=every[:count]) for count in (len(every) // 2, len(every)) if count]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        why = obstacle(problem.trace)
        if why:
            raise Unsupported(
                f"optimizer states cannot be on the host beside shards: {why}",
                hint='use mesh={"dp": 2}, shard="fsdp" and AdamW, or planner="auto" with allow=["recompute", "offload"]',
            )
        if self.slots < 1:
            raise InvalidInput(f"`slots` is {self.slots}", hint="use 1 or more, such as the default")
        named = [name for piece in self.pieces for name in piece]
        if not named or not all(self.pieces) or named != [u.name for u in updates(problem.trace)][: len(named)]:
            raise InvalidInput(
                "the pieces of `host_states` are not the first parameters that the step updates, in its order",
                hint="plan again: holdall.plan(trace, ...)",
            )
        return rewrite_with_states_on_host(schedule.copy(), problem, self.pieces, self.slots)

    def install(self, harness: Harness) -> None:
        from holdall.runtime.states.host_states import put_states_on_host

        put_states_on_host(harness, self.pieces, slots=self.slots)
