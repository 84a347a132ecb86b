"""The updates of `place` in the schedule: on the device, on the host, or via the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdall.cost.link import copy_seconds, link_rate
from holdall.cost.updates import host_seconds
from holdall.types import Block, Copy, Kind, Phase, Problem, Run, Schedule, Step, Unit, Wait
from holdall.types.layout import flat_bytes, stretches, update_slot_bytes, widened_bytes
from holdall.types.trace import OpId, TensorId

if TYPE_CHECKING:
    from holdall.actions.place import Place

_BESIDE_OLD = 1.2  # time relative to an update in place, of a speculative one: it keeps old values and has fewer threads
_WEIGHTS_FIRST = 0.69  # the same, for computing the new weights alone


@dataclass(frozen=True, slots=True)
class PlacedUpdate:
    """A unit, its placement, and the ops of the step that use it."""

    unit: Unit
    streamed: bool
    update: str
    block: Block | None  # the first block that reads its weights
    ready: OpId  # the op after which its gradients are complete; -1: it has none
    buffer: tuple[TensorId, ...] = ()  # host memory of its gradients
    masters: tuple[TensorId, ...] = ()  # host memory of its masters, where they have the precision of the weights
    first: OpId = -1  # where the step first waits for its weights: start of its block, or the op that reads them; -1: nowhere
    cast: bool = False  # its weights are streamed: cast from masters on the device
    tier: str = ""  # the tier of its tensors that are not on the device
    states: str = ""  # the tier of its masters and states, if they are updated in stretches
    far_bytes: int = 0  # of its masters there
    sections: int = 0  # flat buffers of so many bytes: the masters and each kind of state


class Updates:
    """Inserts updates into a schedule during a rewrite, with the facts that they need."""

    def __init__(self, schedule: Schedule, problem: Problem, place: Place) -> None:
        self.schedule = schedule
        self.problem = problem
        self.place = place
        self.trace = problem.trace
        self.hardware = problem.hardware
        self.home = problem.home
        self.end = next((op.id for op in self.trace.ops if op.site.phase is Phase.STEP), len(self.trace.ops)) - 1
        self.is_narrow = bool(self.trace.about.precision)
        self.beside = place.when == "overlap_forward" and self.hardware.overlap
        self.units: list[PlacedUpdate] = []
        self.stretches: list[TensorId] = []  # host memory for updates in stretches, taken by turns
        self._turn = 0

    def source(self, placed: PlacedUpdate) -> str:
        """The tier that working weights come from: that of the masters, if these have the same precision."""
        return placed.states if placed.states and not self.is_narrow else placed.tier

    @property
    def far(self) -> str:
        """The tier of the host's processors: the nearest one."""
        return self.problem.other()

    def is_ahead(self, placed: PlacedUpdate) -> bool:
        """Is its update speculative: begun in backward, before clipping is known?"""
        can = not placed.streamed or len(placed.unit.grads) == len(placed.unit.weights)
        return self.place.ahead and self.beside and self.is_narrow and placed.update == "host" and can

    def before(self, op: OpId, steps: Sequence[Step]) -> None:
        self.schedule.insert(op - 1, steps)

    # at the optimizer's step, or as gradients are made

    def make_updates(self) -> None:
        plain = [p for p in self.units if p.update == "device" and p.unit.numel and not self.is_narrow]
        for placed in self.units:
            if placed.update == "device" and placed.unit.numel and self.is_narrow:
                self._on_device(placed)
        self._keep_room_of_libraries()
        if self.place.when != "backward":
            if self.beside:
                self._beside()
            else:
                for placed in self.units:
                    if placed.buffer:
                        steps = self.elsewhere(placed)
                        self.schedule.insert(self.end, [*steps, waited(steps)])
        if plain:
            sizes = [p.unit.workspace for p in plain]
            self.schedule.insert(
                self.end,
                [
                    Run(
                        op=-1,
                        reads=tuple(g for p in plain for g in p.unit.grads),
                        writes=(),
                        mutates=tuple(x for p in plain for x in (*p.unit.states, *p.unit.weights)),
                        seconds=sum(self._device_seconds(p.unit) for p in plain),
                        workspace=sum(sizes) if self.hardware.device == "cuda" else max(sizes),
                        name="update on the device",
                    )
                ],
            )

    def _keep_room_of_libraries(self) -> None:
        """Updates via the device run on a stream of their own, and libraries keep a workspace per stream."""
        those = [p.unit for p in self.units if p.update == "via_device" and p.buffer and p.unit.products]
        room = self.hardware.resident // 2  # `resident` counts two workspaces
        if those and room:
            like = self.trace.tensors[those[0].weights[0]]
            kept = self.schedule.add(like, name="library workspaces of updates", kind=Kind.BUFFER, nbytes=room, born=-1)
            self.schedule.holds[kept] = [(len(self.trace.ops), 0)]

    def _device_seconds(self, unit: Unit) -> float:
        return unit.moved / self.hardware.bandwidth + 8 * self.hardware.overhead

    def _on_device(self, placed: PlacedUpdate) -> None:
        unit, schedule = placed.unit, self.schedule
        grads = unit.grads
        if self.beside:  # at the start of the step, with the last step's gradients
            for g in unit.grads:
                schedule.holds[g] = [(len(self.trace.ops), 0)]
            grads = tuple(schedule.carry(g, f"{self.trace.tensors[g].name} (before)") for g in unit.grads)
        else:
            for g in unit.grads:
                schedule.holds[g] = []
        run = Run(
            op=-1,
            reads=grads,
            writes=(),
            mutates=(*unit.states, *(() if placed.cast else unit.weights)),
            seconds=self._device_seconds(unit),
            workspace=unit.workspace,
            name=f"update of {unit.name}",
        )
        at = placed.ready if self.place.when == "backward" else -1 if self.beside else self.end
        schedule.insert(at, [run])

    def elsewhere(self, placed: PlacedUpdate) -> list[Step]:
        """An update that overlaps nothing: all its steps in a row."""
        return self.host_steps(placed) if placed.update == "host" else self._through_steps(placed, -1)

    def host_steps(self, placed: PlacedUpdate, *, weights_first: bool = False) -> list[Step]:
        unit = placed.unit
        is_ahead = self.is_ahead(placed) and not self.problem.clipped
        factor = _BESIDE_OLD if is_ahead else _WEIGHTS_FIRST if weights_first else 1.0
        touched = tuple(dict.fromkeys((*placed.buffer, *(unit.weights if placed.streamed else ()))))
        seconds = host_seconds(unit, self.trace, self.hardware) * factor + self._trip(placed)
        steps = self._in_stretches(placed, touched, seconds) if placed.states else [_host_run(unit, touched, seconds)]
        if not placed.streamed:
            back = Copy(tensors=placed.buffer, src=placed.tier, dst=self.home, lands=False, lane="weights", name=unit.name)
            if placed.states and not self.is_narrow:  # from the masters
                back = replace(back, tensors=placed.masters, src=placed.states, uses=placed.buffer)
            steps.append(back)
        return steps

    def _in_stretches(self, placed: PlacedUpdate, touched: tuple[TensorId, ...], seconds: float) -> list[Step]:
        """Read, update and write each; who has the same buffer goes one after the other."""
        steps: list[Step] = []
        for begin, end in stretches(placed.far_bytes, self.place.stretch):
            room = self.stretches[self._turn % len(self.stretches)]
            self._turn += 1
            nbytes = placed.sections * (end - begin)
            weights = touched if end == placed.far_bytes else ()  # what is fetched next is written by then
            name = placed.unit.name
            steps += [
                Copy(tensors=(), nbytes=nbytes, src=placed.states, dst=self.far, uses=(room,), lane="states", name=name),
                _host_run(placed.unit, (room, *touched), seconds * (end - begin) / placed.far_bytes),
                Copy(
                    tensors=(), nbytes=nbytes, src=self.far, dst=placed.states, uses=(room, *weights), lane="states", name=name
                ),
            ]
        return steps

    def _trip(self, placed: PlacedUpdate) -> float:
        """Seconds in which the host reads and writes tensors of a tier that is not its own."""
        if placed.tier == self.far:
            return 0.0
        fetched = placed.unit.weights if placed.streamed and self.source(placed) == placed.tier else ()
        masters = () if placed.states else placed.masters
        there = sum(self.schedule.info(x).nbytes for x in dict.fromkeys((*placed.buffer, *masters, *fetched)))
        return copy_seconds(there, self.hardware, placed.tier, self.far) + copy_seconds(
            there, self.hardware, self.far, placed.tier
        )

    def _through_steps(self, placed: PlacedUpdate, slot: TensorId) -> list[Step]:
        unit, schedule = placed.unit, self.schedule
        steps: list[Step] = []
        if slot < 0:
            slot = self._slot([placed])
            steps.append(Run(op=-1, reads=(), writes=(slot,), name="room for updates"))
            schedule.holds[slot] = []
        kept = (*unit.states, *placed.masters)
        moving = (*kept, *placed.buffer)
        steps += [
            self._aside(moving, out=False, slot=slot, name=unit.name),
            Run(
                op=-1,
                reads=(),
                writes=(),
                mutates=tuple(dict.fromkeys((*moving, *unit.weights))),
                seconds=self._device_seconds(unit),
                name=f"update of {unit.name}",
                stream="update",
            ),
            self._aside(kept, out=True, slot=slot, name=unit.name),
        ]
        if placed.streamed and self.is_narrow:
            steps.append(self._aside(placed.buffer, out=True, slot=slot, name=unit.name))
        return steps

    def _aside(self, tensors: tuple[TensorId, ...], *, out: bool, slot: TensorId, name: str) -> Copy:
        """A copy between the host and a slot for updates; neither states nor new weights have device memory of their own."""
        src, dst = (self.home, self.far) if out else (self.far, self.home)
        return Copy(tensors=tensors, src=src, dst=dst, lands=False, lane="update", uses=(slot,), aside=True, name=name)

    def _slot(self, passing: Iterable[PlacedUpdate]) -> TensorId:
        sizes = []
        for p in passing:
            weights = sum(self.schedule.info(x).nbytes for x in p.unit.weights)
            grads = sum(self.schedule.info(x).nbytes for x in p.buffer)
            widened = widened_bytes(p.unit.numel) if self.is_narrow else 0
            needed = update_slot_bytes(
                states=flat_bytes(self.trace.tensors[x].nbytes for x in p.unit.states),
                masters=0 if self.is_narrow else weights,
                grads=grads,
                staged=weights if p.streamed and self.is_narrow else 0,
                workspace=max(widened, p.unit.workspace),
            )
            sizes.append((needed, p))
        size, largest = max(sizes, key=lambda s: s[0])
        like = self.trace.tensors[largest.unit.weights[0]]
        return self.schedule.add(like, name="room for updates", kind=Kind.TEMP, nbytes=size, born=0)

    def _beside(self) -> None:
        """The last step's updates overlap this forward; a unit's forward waits for its own update."""
        passing = [p for p in self.units if p.update == "via_device" and p.buffer]
        slots = [self._slot(passing) for _ in range(min(self.place.slots, len(passing)))]
        steps: list[Step] = [Run(op=-1, reads=(), writes=(s,), name="room for updates") for s in slots]
        first = self._weights_first()
        for placed in self.units:
            if not placed.buffer:
                continue
            if placed.update == "via_device":
                steps += self._through_steps(placed, slots[passing.index(placed) % len(slots)])
            else:
                begun = 1 if self.is_ahead(placed) and not self.problem.clipped else 0
                steps += self.host_steps(placed, weights_first=placed.unit.name in first)[begun:]
            if not placed.streamed and placed.first >= 0:
                done = placed.unit.weights if placed.update == "via_device" else placed.buffer
                self.before(placed.first, [Wait(tensors=done)])
        steps += [
            Run(op=-1, reads=(), writes=(), seconds=seconds, name=f"rest of the update of {unit}", stream="host")
            for unit, seconds in first.items()
        ]
        self.schedule.insert(-1, steps, first=True)
        release = self.trace.block(self.place.release).first if self.place.release else self.end
        for slot in slots:
            self.schedule.holds[slot] = [(release - 1, 0)]
        if slots:
            self.before(release, [Wait(tensors=tuple(slots))])

    def _weights_first(self) -> dict[str, float]:
        """Units updated weights first, with the seconds of the rest of their update.

        This is more work in total, so only as many units as the host has time for in a step.
        """
        if not self.problem.clipped or self.problem.accumulate > 1:
            return {}
        by_host = (p.unit for p in self.units if p.update == "host" and p.buffer)
        on_host = {unit.name: host_seconds(unit, self.trace, self.hardware) for unit in by_host}
        left = self._seconds_at_least() - sum(on_host.values())
        found = {}
        for placed in self.units:
            name, unit = placed.unit.name, placed.unit
            swaps = not placed.streamed or placed.buffer == unit.weights  # its buffers can be swapped
            can = name in on_host and self.is_ahead(placed) and swaps and len(unit.grads) == len(unit.weights)
            if can and left >= _WEIGHTS_FIRST * on_host[name]:
                left -= _WEIGHTS_FIRST * on_host[name]
                found[name] = on_host[name]
        return found

    def _seconds_at_least(self) -> float:
        """A lower bound on the step: the device's computation, and the copies of weights and gradients that it waits for."""
        seconds = self.schedule.compute_seconds()
        if not self.place.overlap:
            fetched = [x for p in self.units if p.streamed and not p.cast for x in 2 * p.unit.weights]  # both passes
            leaving = [x for p in self.units for x in p.buffer]
            seconds += sum(self.schedule.info(x).nbytes for x in fetched) / link_rate(self.hardware, self.far, self.home)
            seconds += sum(self.schedule.info(x).nbytes for x in leaving) / link_rate(self.hardware, self.home, self.far)
        return seconds


def _host_run(unit: Unit, mutates: tuple[TensorId, ...], seconds: float) -> Step:
    return Run(op=-1, reads=(), writes=(), mutates=mutates, seconds=seconds, name=f"update of {unit.name}", stream="host")


def waited(steps: Iterable[Step]) -> Wait:
    """A wait for every copy of these steps, and for the buffers that they copy to."""
    copies = [x for s in steps if isinstance(s, Copy) and not s.nbytes for x in (*(() if s.aside else s.tensors), *s.uses)]
    return Wait(tensors=tuple(dict.fromkeys(copies)))
