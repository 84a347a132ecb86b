"""Place: where weights, gradients and optimizer states live, and where and when each unit is updated.

After ZeRO-Offload (arXiv 2101.06840) and ProTrain (arXiv 2406.08334): parameters in their own precision stay where they are
updated, the model computes with working copies. One action says it for all units, because they share the memory that updates
pass through and the moment at which they begin.

What of a unit is not on the device lies in the nearest tier, the host's memory, or in the tier that `elsewhere` names: weights
that come and go, parameters as wide as they, gradients on their way to the host. States of updates on the host are the host's.

Exact in that nothing but the place changes. Where a GPU computes and the host updates, the host's Adam rounds as a host does,
an ulp from the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.place.schedule import rewrite_placed, streamable
from holdall.errors import InvalidInput, unknown_name
from holdall.types import Facts, Problem, Schedule, Trace

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

__all__ = ["Place", "streamable"]

Row = tuple[str, str, str]  # unit; "resident" or "streamed"; "device", "host" or "through"


@dataclass(frozen=True, kw_only=True)
class Place(Facts):
    units: tuple[Row, ...]  # every unit of the trace, in its order
    when: str = "step"  # of updates: "step", "spill" (beside the next forward) or "backward" (as gradients come)
    slots: int = 2  # units that may be passing through the device at once
    # Spilled updates on the host begin in backward, as if gradients were not clipped; where they are, the weights that the next
    # forward wants are made first, the rest beside the next backward. Takes room on the host for values beside the old ones.
    ahead: bool = False
    overlap: bool = True  # weights set out, and gradients leave, while the device computes; else it waits, in less memory
    share: bool = True  # gradients on the host take the room of streamed weights, which are new after the update
    release: str = ""  # block at whose forward the room for passing units is given back
    elsewhere: tuple[tuple[str, str], ...] = ()  # (unit, tier) of those that live in another tier than the nearest

    name: ClassVar[str] = "place"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 30
    by_default: ClassVar[bool] = True
    places_states: ClassVar[bool] = True
    settles_states: ClassVar[bool] = True
    what: ClassVar[str] = "weights are streamed, states and updates are on the host"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({"", *(tier for _, tier in self.elsewhere)})

    @staticmethod
    def all(
        trace: Trace,
        weights: str = "resident",
        update: str = "device",
        *,
        when: str = "step",
        slots: int = 2,
        share: bool = True,
    ) -> Place:
        """The same for every unit."""
        return Place.of(trace, {u.name: (weights, update) for u in trace.units}, when=when, slots=slots, share=share)

    @staticmethod
    def of(
        trace: Trace,
        rows: dict[str, tuple[str, str]],
        *,
        when: str = "step",
        slots: int = 2,
        share: bool = True,
        ahead: bool = False,
        overlap: bool = True,
    ) -> Place:
        """Units that are not named stay on the device."""
        table = tuple((u.name, *rows.get(u.name, ("resident", "device"))) for u in trace.units)
        release = trace.blocks[-1].name if trace.blocks else ""
        return Place(units=table, when=when, slots=slots, share=share, ahead=ahead, overlap=overlap, release=release)

    @staticmethod
    def samples(trace: Trace) -> list[Place]:
        """Everything on the host; every other unit streamed; a mix of all, updates spilled."""
        if not trace.units:
            return []
        can = streamable(trace)
        kinds = [("resident", "device"), ("resident", "host"), ("streamed", "host"), ("resident", "through")]
        mixed = {u.name: kinds[n % 4] for n, u in enumerate(trace.units) if n % 4 != 2 or u.name in can}
        every_other = dict.fromkeys(sorted(can)[::2], ("streamed", "host"))
        return [Place.all(trace, update="host"), Place.of(trace, every_other), Place.of(trace, mixed)]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        known = [u.name for u in problem.trace.units]
        if [row[0] for row in self.units] != known:
            raise InvalidInput("`place` does not name the units of this trace", hint="plan again for this model")
        _check(self.units)
        for unit, _ in self.elsewhere:
            if unit not in known:
                raise unknown_name("unit", unit, known)
        return rewrite_placed(schedule.copy(), problem, self)

    def install(self, harness: Harness) -> None:
        import torch

        from holdall.runtime.harness import Placing
        from holdall.runtime.states.unit import Placement

        about = harness.plan.about
        params = dict(about.units)
        precision = about.precision
        tiers = dict(self.elsewhere)
        harness.place(
            Placing(
                units=tuple(
                    Placement(unit=u, params=params[u], weights=w, update=d, tier=tiers.get(u, "")) for u, w, d in self.units
                ),
                when=self.when,
                dtype=getattr(torch, precision) if precision else None,
                slots=self.slots,
                share=self.share,
                ahead=self.ahead,
                overlap=self.overlap,
                release=self.release.partition("#")[0],
            )
        )


def _check(rows: Iterable[Row]) -> None:
    for unit, weights, update in rows:
        if weights not in ("resident", "streamed") or update not in ("device", "host", "through"):
            raise InvalidInput(
                f"`{unit}` cannot be placed as {weights}, {update}",
                hint="weights are resident or streamed; updates are on the device, on the host, or through the device",
            )
