"""Place: where weights, gradients and optimizer states live, and where and when each unit is updated.

After ZeRO-Offload (arXiv 2101.06840) and ProTrain (arXiv 2406.08334): masters stay where they are updated, the model computes
with working copies. One action covers all units, because they share the slots for updates via the device and the time at which
updates begin.

A unit's tensors that are not on the device are in the nearest tier, the host's memory, or in the tier that `elsewhere` names:
streamed weights, masters of the same precision, and gradients. Masters and states of host updates are in host memory, or in the
tier that `states` names, such as a disk. Then they are updated in stretches (ZeRO-Infinity, arXiv 2104.07857): while one is
updated in host memory, the next is read and the one before is written.

Exact: only the placement changes. Where a GPU computes and the host updates, the host's Adam rounds as a CPU does, one ulp from
the GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.actions.place.schedule import rewrite_placed, states_stay, streamable
from holdall.errors import InvalidInput, unknown_name
from holdall.types import Facts, Problem, Schedule, Trace
from holdall.units import MiB

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

__all__ = ["Place", "states_stay", "streamable"]

Row = tuple[str, str, str]  # unit; "resident" or "streamed"; "device", "host" or "via_device"


@dataclass(frozen=True, kw_only=True)
class Place(Facts):
    units: tuple[Row, ...]  # every unit of the trace, in its order
    when: str = "step"  # time of updates: "step", "overlap_forward" (of the next step) or "backward" (as gradients are made)
    slots: int = 2  # units that may be updated via the device at once
    # Speculative updates: overlapped host updates begin in backward, as if gradients were not clipped. If they are, the weights
    # that the next forward needs are computed first, the rest during the next backward. Takes host memory for a second set of
    # values.
    ahead: bool = False
    overlap: bool = True  # copies of weights and gradients overlap computation; else the device waits, with less memory
    share: bool = True  # gradients on the host reuse the buffers of streamed weights, which the update replaces
    release: str = ""  # block at whose forward the slots of updates via the device are freed
    prefetch: int = 1  # streamed units that are fetched ahead of the one in use; none without `overlap`
    elsewhere: tuple[tuple[str, str], ...] = ()  # (unit, tier) of units that are not in the nearest tier
    states: tuple[tuple[str, str], ...] = ()  # (unit, tier) of masters and states that are not in the nearest tier
    stretch: int = 32 * MiB  # bytes of the masters, and of each state of theirs, that are updated at a time where `states` says
    buffers: int = 3  # stretches in host memory at once: 1: no overlap; 2: reads overlap updates; 3: writes, too

    name: ClassVar[str] = "place"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 30
    by_default: ClassVar[bool] = True
    places_states: ClassVar[bool] = True
    settles_states: ClassVar[bool] = True
    what: ClassVar[str] = "weights are streamed, states and updates are on the host"

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset({"", *(tier for _, tier in (*self.elsewhere, *self.states))})

    @staticmethod
    def from_older(entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of an older plan file by today's words."""
        words = {"through": "via_device", "spill": "overlap_forward"}
        rows = [(*row[:2], words.get(row[2], row[2])) for row in entry.get("units", ()) if len(row) == 3]
        older = {"units": tuple(rows)} if len(rows) == len(entry.get("units", ())) else {}
        return {**entry, **older, "when": words.get(entry.get("when", "step"), entry.get("when", "step"))}

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
        """The same placement for every unit."""
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
        prefetch: int = 1,
        states: Mapping[str, str] | None = None,
        stretch: int = 32 * MiB,
        buffers: int = 3,
    ) -> Place:
        """Units that are not named are resident and updated on the device."""
        table = tuple((u.name, *rows.get(u.name, ("resident", "device"))) for u in trace.units)
        release = trace.blocks[-1].name if trace.blocks else ""
        return Place(
            units=table,
            when=when,
            slots=slots,
            share=share,
            ahead=ahead,
            overlap=overlap,
            release=release,
            prefetch=prefetch,
            states=tuple((states or {}).items()),
            stretch=stretch,
            buffers=buffers,
        )

    @staticmethod
    def samples(trace: Trace) -> list[Place]:
        """Everything on the host; every other unit streamed; a mix of all, with overlapped updates."""
        if not trace.units:
            return []
        can = streamable(trace)
        kinds = [("resident", "device"), ("resident", "host"), ("streamed", "host"), ("resident", "via_device")]
        mixed = {u.name: kinds[n % 4] for n, u in enumerate(trace.units) if n % 4 != 2 or u.name in can}
        every_other = dict.fromkeys(sorted(can)[::2], ("streamed", "host"))
        return [Place.all(trace, update="host"), Place.of(trace, every_other), Place.of(trace, mixed)]

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        known = [u.name for u in problem.trace.units]
        if [row[0] for row in self.units] != known:
            raise InvalidInput("the units of `place` are not those of this trace", hint="plan again: holdall.plan(trace, ...)")
        _check(self.units)
        if self.prefetch < 1:
            raise InvalidInput(f"`prefetch` is {self.prefetch}", hint="use 1 or more, or `overlap=False` for none")
        if self.stretch < 1 or self.buffers < 1:
            raise InvalidInput(
                f"`stretch` is {self.stretch} bytes and `buffers` {self.buffers}", hint="use 1 or more, such as the defaults"
            )
        for unit, _ in (*self.elsewhere, *self.states):
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
        near = next(iter(list(harness.plan.budget)[1:]), "")
        tiers, states = dict(self.elsewhere), {unit: tier for unit, tier in self.states if tier != near}
        harness.place(
            Placing(
                units=tuple(
                    Placement(unit=u, params=params[u], weights=w, update=d, tier=tiers.get(u, ""), states=states.get(u, ""))
                    for u, w, d in self.units
                ),
                when=self.when,
                dtype=getattr(torch, precision) if precision else None,
                slots=self.slots,
                share=self.share,
                ahead=self.ahead,
                overlap=self.overlap,
                release=self.release.partition("#")[0],
                prefetch=self.prefetch,
                stretch=self.stretch,
                buffers=self.buffers,
            )
        )


def _check(rows: Iterable[Row]) -> None:
    for unit, weights, update in rows:
        if weights not in ("resident", "streamed") or update not in ("device", "host", "via_device"):
            raise InvalidInput(
                f"`{unit}` cannot have weights={weights!r} with update={update!r}",
                hint="weights: resident or streamed; update: device, host or through",
            )
