"""STAlloc (2025, arXiv 2507.16274): requests of one size share layers, and later classes fill what those leave.

class    -> requests of equal size, the largest classes first
fill     -> a request goes into the first layer that has room above what lies there during its lifetime; up to five rounds,
            in which those that found no room come first
layers   -> the others form new layers by their beginnings: each is appended to the layer that was left last
groups   -> requests that are born in one phase and die in another one are one block, where that fills its box well
settle   -> at last, from below, every request falls to the lowest offset that is free
result   -> the lower of the plans with and without groups
dynamic  -> requests that are not known in advance find ranges that the plan leaves idle (`packing/arena.py`)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from holdall.packing import LaidOut
from holdall.packing.arena import PlannedArena
from holdall.packing.gaps import place_in_order
from holdall.packing.orders import laid_out, lay_ground
from holdall.types.lifetimes import Lifetime, StepLifetimes
from holdall.types.trace import Bytes

_ROUNDS = 5
_USAGE = 0.7  # least share of its box that a group fills
_SMALL, _FEW = 0.1, 5  # groups below this share of the largest, with fewer members, are not formed
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class STAlloc:
    """Layers of equal sizes, and blocks of requests that cross phases together."""

    name: ClassVar[str] = "stalloc"
    paper: ClassVar[str] = "STAlloc, arXiv 2507.16274"
    is_static: ClassVar[bool] = True

    def __call__(self, lifetimes: StepLifetimes) -> LaidOut:
        known = [n for n in range(len(lifetimes.tensors)) if n not in lifetimes.dynamic]
        static = replace(lifetimes, tensors=tuple(lifetimes.tensors[n] for n in known), dynamic=frozenset())
        ground, others, floor = lay_ground(static)
        plans = [_split_and_fuse(static, others, floor)]
        groups = _groups(static, others)
        if groups:
            plans.append(_grouped(static, others, groups, floor))
        plans = [_settled(static, plan, floor) for plan in plans]
        layout = min((laid_out(static, ground | plan, groups=len(groups)) for plan in plans), key=lambda plan: plan.reserved)
        return layout if len(known) == len(lifetimes.tensors) else _with_dynamic(lifetimes, known, layout)


class _Layers:
    """Bands of addresses; in each, requests lie on each other."""

    def __init__(self, period: int, count: int, floor: Bytes) -> None:
        self._period, self.top = period, floor
        self._rows = np.zeros((4, 2 * count), np.int64)  # begin, end, top, layer
        self._count = 0
        self._bottoms: list[Bytes] = []
        self._ends: list[Bytes] = []  # of the bands
        self._tails: list[int] = []  # the last moment at which something is there

    def __len__(self) -> int:
        return len(self._bottoms)

    def room(self, tensor: Lifetime, since: int = 0) -> tuple[int, Bytes] | None:
        """(layer, offset) of the first layer from `since` on with room for a request; None: there is none."""
        heights = self._heights(tensor)
        fits = np.flatnonzero(heights[since:] + tensor.size <= np.array(self._ends[since:], np.int64))
        return (since + int(fits[0]), int(heights[since + fits[0]])) if len(fits) else None

    def vacant(self, tensor: Lifetime, since: int) -> int | None:
        """The layer from `since` on that nothing occupies during the lifetime, and that was left last."""
        empty = np.flatnonzero(self._heights(tensor)[since:] == np.array(self._bottoms[since:], np.int64))
        return max((since + int(k) for k in empty), key=lambda k: self._tails[k], default=None)

    def _heights(self, tensor: Lifetime) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        begins, ends, tops, layers = self._rows[:, : self._count]
        heights = np.array(self._bottoms, np.int64)
        for begin, end in tensor.spans(self._period):
            mask = (begins < end) & (ends > begin)
            np.maximum.at(heights, layers[mask], tops[mask])
        return heights

    def put(self, tensor: Lifetime, layer: int, offset: Bytes) -> None:
        for begin, end in tensor.spans(self._period):
            self._rows[:, self._count] = begin, end, offset + tensor.size, layer
            self._count += 1
            self._tails[layer] = max(self._tails[layer], end)

    def add(self, size: Bytes) -> int:
        self._bottoms.append(self.top)
        self.top += size
        self._ends.append(self.top)
        self._tails.append(0)
        return len(self) - 1

    def bottom(self, layer: int) -> Bytes:
        return self._bottoms[layer]

    def mark(self) -> int:
        return self._count

    def undo(self, mark: int) -> None:
        self._count = mark


def _split_and_fuse(lifetimes: StepLifetimes, numbers: Sequence[int], floor: Bytes) -> dict[int, Bytes]:
    layers = _Layers(lifetimes.period, len(lifetimes.tensors), floor)
    offsets: dict[int, Bytes] = {}
    classes: dict[Bytes, list[int]] = defaultdict(list)
    for number in numbers:
        classes[lifetimes.tensors[number].size].append(number)
    for size in sorted(classes, reverse=True):
        placed, left = _fill(lifetimes, layers, classes[size])
        offsets |= placed
        since = len(layers)
        for number in left:
            tensor = lifetimes.tensors[number]
            layer = layers.vacant(tensor, since)
            layer = layers.add(size) if layer is None else layer
            offsets[number] = layers.bottom(layer)
            layers.put(tensor, layer, offsets[number])
    return offsets


def _fill(lifetimes: StepLifetimes, layers: _Layers, numbers: list[int]) -> tuple[dict[int, Bytes], list[int]]:
    """Put a class into the layers that there are: (offsets, those that found no room)."""
    if not len(layers):
        return {}, numbers
    order, mark = numbers, layers.mark()
    best: tuple[dict[int, tuple[int, Bytes]], list[int]] = ({}, numbers)
    for _ in range(_ROUNDS):
        placed, left = {}, []
        for number in order:
            room = layers.room(lifetimes.tensors[number])
            if room is None:
                left.append(number)
                continue
            placed[number] = room
            layers.put(lifetimes.tensors[number], *room)
        layers.undo(mark)
        if len(left) < len(best[1]):
            best = (placed, left)
        if not placed or not left:
            break
        order = [*left, *placed]
    for number, room in best[0].items():
        layers.put(lifetimes.tensors[number], *room)
    return {number: offset for number, (_, offset) in best[0].items()}, sorted(best[1])


def _settled(lifetimes: StepLifetimes, offsets: dict[int, Bytes], floor: Bytes) -> dict[int, Bytes]:
    """The same plan without the limits of layers: from below, everything falls as far as it can."""
    return place_in_order(lifetimes, sorted(offsets, key=lambda n: (offsets[n], n)), floor=floor).offsets


def _groups(lifetimes: StepLifetimes, numbers: Sequence[int]) -> list[list[int]]:
    """Requests that cross the same phases, where they fill their box well."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in numbers:
        tensor = lifetimes.tensors[number]
        phases = bisect_right(lifetimes.phases, tensor.begin), bisect_right(lifetimes.phases, tensor.end - 1)
        if phases[0] < phases[1] and not tensor.wraps():
            found[phases].append(number)
    sizes = {key: sum(lifetimes.tensors[n].size for n in members) for key, members in found.items()}
    largest = max(sizes.values(), default=0)
    return [
        members
        for key, members in found.items()
        if (sizes[key] >= _SMALL * largest or len(members) >= _FEW) and _usage(lifetimes, members) >= _USAGE
    ]


def _usage(lifetimes: StepLifetimes, members: Sequence[int]) -> float:
    box = _box(lifetimes, members)
    area = sum(lifetimes.tensors[n].size * lifetimes.length(n) for n in members)
    return area / (box.size * (box.end - box.begin))


def _box(lifetimes: StepLifetimes, members: Sequence[int]) -> Lifetime:
    tensors = [lifetimes.tensors[n] for n in members]
    begin, end = min(t.begin for t in tensors), max(t.end for t in tensors)
    return Lifetime(tensors[0].key, begin, end, sum(t.size for t in tensors))


def _grouped(
    lifetimes: StepLifetimes, numbers: Sequence[int], groups: Sequence[Sequence[int]], floor: Bytes
) -> dict[int, Bytes]:
    """The plan in which every group is one request; inside, its members lie end to end."""
    members = {n for group in groups for n in group}
    single = [n for n in numbers if n not in members]
    tensors = (*(lifetimes.tensors[n] for n in single), *(_box(lifetimes, group) for group in groups))
    plan = _split_and_fuse(replace(lifetimes, tensors=tensors), range(len(tensors)), floor)
    offsets = {number: plan[k] for k, number in enumerate(single)}
    for k, group in enumerate(groups, start=len(single)):
        low = plan[k]
        for number in group:
            offsets[number] = low
            low += lifetimes.tensors[number].size
    return offsets


def _with_dynamic(lifetimes: StepLifetimes, known: Sequence[int], layout: LaidOut) -> LaidOut:
    """Play steps in which the dynamic requests find their room as they come; reserved includes what the fallback took."""
    assert layout.offsets is not None
    offsets = dict.fromkeys(range(len(lifetimes.tensors)), 0) | dict(zip(known, layout.offsets, strict=True))
    arena = PlannedArena(lifetimes, replace(layout, offsets=tuple(offsets.values())), known)
    first, *steps = lifetimes.events(_STEPS)
    arena.fill(event.number for event in first if event.number not in lifetimes.dynamic)
    for events in ([event for event in first if event.number in lifetimes.dynamic], *steps):
        arena.begin_step()
        for number, is_free in events:
            tensor = lifetimes.tensors[number]
            if is_free:
                arena.free(number)
            else:
                end = lifetimes.period if tensor.wraps() else tensor.end
                arena.alloc(number, tensor.size, until=end if number in lifetimes.dynamic else None)
    notes = {"planned": arena.planned, "dynamic": arena.dynamic, "fallback": arena.fallen}
    return LaidOut(reserved=arena.reserved, notes={**layout.notes, **notes})
