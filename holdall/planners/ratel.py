"""Ratel: model states on disks, each layer updated as soon as its gradients arrive, activations swapped as far as that pays.

Liao et al., ICDE 2025 (first as LoHan, arXiv 2403.06504): one device, little host memory, many disks.

- Weights and masters live in the farthest tier and are streamed, two layers ahead; the host updates a layer while backward is
  at the layers before (active gradient offloading). That needs a loop that does not look at gradients
  (`reads_gradients=False`): Ratel has no clipping by the global norm. Where the loop clips, updates wait, which is exact.
- Inputs of blocks always leave for the host. Of the rest, blocks are swapped (their saved tensors leave, too, and nothing runs
  again) or recomputed, in the order of benefit, seconds of recomputation for each byte, most first. With that order the time
  of a step is convex in the bytes swapped, so the search stops at the first block that makes it longer.
- Swapped activations fill host memory first, then the farthest tier.

The time of a step is the paper's (`Iteration`): in forward and in backward the slowest of computation, both directions of the
link, and the disks, whose reads and writes add up. Rates are the measured ones of the machine.

Not here: single results of a block are swapped by the paper, whole blocks here; a process of its own for updates (the host's
kernel runs without the interpreter's lock); several devices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from holdall.actions.offload import Offload, replayed
from holdall.actions.place import Place, streamable
from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planners.chen import held_bytes
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.segments import runs
from holdall.planning.state_planners import farthest, movable, place_in_tier, places_states, update_moment
from holdall.types import Action, Block, Phase, Plan, Problem
from holdall.units import format_bytes, format_seconds

AHEAD = 2  # layers that are fetched before the one in use: three weight blocks in all


@dataclass(frozen=True, kw_only=True)
class Ratel:
    tier: str = ""  # of weights and masters: a tier's name, or "host"; empty: the farthest
    swap: int | None = None  # blocks that are swapped, in the order of benefit; None: as many as shorten the step

    name: ClassVar[str] = "ratel"
    paper: ClassVar[str] = "Liao et al., ICDE 2025, arXiv 2403.06504"
    weighs_budget: ClassVar[bool] = False

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.swap is not None and self.swap < 0:
            raise InvalidInput(f"`swap` is {self.swap} blocks", hint="use 0 or more, or leave it out")
        place = [self._place(problem)] if places_states(problem) else []
        candidates = by_benefit(problem)
        iteration = iteration_of(problem, self._tier(problem)) if place else None
        chosen = self.swap
        why = []
        if chosen is None:
            chosen = best_prefix(iteration, candidates) if iteration is not None else 0
        if iteration is not None:
            why.append(_said(iteration, candidates, chosen))
            why.append(f"states are in {self._tier(problem)}; when: {place[0].when}")
        actions = self._blocks(problem, place, [c.block for c in candidates[:chosen]])
        return finish(self, problem, [*place, *actions], why=why, began=began)

    def _tier(self, problem: Problem) -> str:
        return problem.other("") if self.tier == "host" else problem.other(self.tier) if self.tier else farthest(problem)

    def _place(self, problem: Problem) -> Place:
        trace = problem.trace
        can = streamable(trace)
        rows = {u.name: ("streamed" if u.name in can else "resident", "host") for u in movable(trace)}
        when, overlap = update_moment(problem), problem.hardware.overlap
        place = Place.of(trace, rows, when=when, share=problem.accumulate == 1, overlap=overlap, prefetch=AHEAD)
        return place_in_tier(place, problem, self._tier(problem))

    def _blocks(self, problem: Problem, place: Sequence[Action], swapped: Sequence[str]) -> list[Action]:
        """Actions on blocks: host memory is filled first, in the order of benefit, then the farthest tier."""
        trace = problem.trace
        late = problem.hardware.overlap
        blocks = [b for row in runs(trace) for b in row if held_bytes(trace, b)]
        if problem.hardware.far is None or not problem.permits(Offload):
            return [a for b in blocks for a in replayed(late=False).on(trace, b) if not isinstance(a, Offload)]
        inputs = {b.name: replayed(late=late).on(trace, b) for b in blocks}
        near, far = problem.other(), farthest(problem)
        taken = outcome_or_never(problem, [*place, *(a for made in inputs.values() for a in made)]).peak
        room = problem.limit(near) - taken.get(near, 0)
        for name in swapped:
            block = trace.block(name)
            room -= held_bytes(trace, block)
            tier = "" if room >= 0 or far == near else far
            inputs[name] = (Offload.of(trace, block, overlap=late, tier=tier),)
        return [a for made in inputs.values() for a in made]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swappable:
    """A block: bytes that it holds, and seconds to run it again."""

    block: str = ""
    nbytes: float
    seconds: float

    @property
    def benefit(self) -> float:
        return self.seconds / self.nbytes if self.nbytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The paper's model of a step. Bytes and seconds; rates in bytes per second."""

    forward: float  # seconds of computation; backward takes twice that, and what is run again
    weights: float  # bytes that forward and backward each read, of all layers
    gradients: float  # bytes that backward sends to the host
    inter: float  # bytes of inputs of blocks, which always leave
    states_read: float  # bytes of masters and moments that the update reads from the disks
    states_written: float  # and writes, with the new weights
    update: float  # seconds of the host's updates
    h2d: float
    d2h: float
    disk_read: float = float("inf")
    disk_write: float = float("inf")
    host_room: float = float("inf")  # bytes of activations that host memory takes
    again: float = 0.0  # seconds of recomputation where nothing is swapped
    half_duplex: bool = True  # reads and writes of the disks add up

    def seconds(self, swapped: Sequence[Swappable] = ()) -> float:
        """Of a step in which these blocks are swapped, and the others run again."""
        moved = self.inter + sum(s.nbytes for s in swapped)
        again = max(0.0, self.again - sum(s.seconds for s in swapped))
        spilt = max(0.0, moved - self.host_room)
        first = max(
            self.forward,
            self.weights / self.h2d,
            moved / self.d2h,
            self._disks(self.weights, spilt),
        )
        second = max(
            2 * self.forward + again,
            (self.weights + moved) / self.h2d,
            self.gradients / self.d2h,
            self._disks(self.weights + self.states_read + spilt, self.states_written),
            self.update,
        )
        return first + second

    def _disks(self, read: float, written: float) -> float:
        both = read / self.disk_read, written / self.disk_write
        return sum(both) if self.half_duplex else max(both)


def best_prefix(iteration: Iteration, candidates: Sequence[Swappable]) -> int:
    """How many of the candidates, which are in the order of benefit, are swapped: up to the first that makes a step longer."""
    best = iteration.seconds()
    for count in range(1, len(candidates) + 1):
        now = iteration.seconds(candidates[:count])
        if now > best:
            return count - 1
        best = now
    return len(candidates)


def by_benefit(problem: Problem) -> list[Swappable]:
    """Blocks that can be swapped, the most seconds for each byte first; of equals the earlier one."""
    trace = problem.trace
    blocks = [b for row in runs(trace) for b in row if held_bytes(trace, b)]
    found = [Swappable(block=b.name, nbytes=held_bytes(trace, b), seconds=_seconds(problem, b)) for b in blocks]
    return sorted(found, key=lambda s: -s.benefit)


def _seconds(problem: Problem, block: Block) -> float:
    return sum(op.seconds for op in problem.trace.ops[block.first : block.last + 1])


def iteration_of(problem: Problem, tier: str) -> Iteration:
    """The model with what the trace and the machine say."""
    trace, hardware, near = problem.trace, problem.hardware, problem.other()
    forward = sum(op.seconds for op in trace.ops if op.site.phase is Phase.FORWARD)
    units = movable(trace)
    weights, grads, states = (
        sum(trace.tensors[x].nbytes for tensors in kind for x in tensors)
        for kind in ([u.weights for u in units], [u.grads for u in units], [u.states for u in units])
    )
    blocks = [b for row in runs(trace) for b in row if held_bytes(trace, b)]
    inter = sum(trace.tensors[x].nbytes for b in blocks for x in b.inputs if trace.tensors[x].born >= 0)
    found = Iteration(
        forward=forward,
        weights=weights,
        gradients=grads,
        inter=inter,
        states_read=0.0,
        states_written=0.0,
        update=sum(u.numel for u in units) / hardware.updates,
        h2d=link_rate(hardware, near, problem.home),
        d2h=link_rate(hardware, problem.home, near),
        host_room=max(0, problem.limit(near) - states),
        again=sum(_seconds(problem, b) for b in blocks),
    )
    if tier == near:
        return replace(found, disk_read=float("inf"), disk_write=float("inf"))
    read, write = (min(link.rate for link in hardware.path(*way)) for way in ((tier, near), (near, tier)))
    return replace(found, states_read=weights + grads, states_written=weights + grads, disk_read=read, disk_write=write)


def _said(iteration: Iteration, candidates: Sequence[Swappable], chosen: int) -> str:
    moved = format_bytes(int(sum(c.nbytes for c in candidates[:chosen])))
    times = " / ".join(format_seconds(iteration.seconds(candidates[:n])) for n in (0, chosen, len(candidates)))
    return f"{chosen} of {len(candidates)} blocks are swapped ({moved}); with none / so many / all a step takes {times}"
