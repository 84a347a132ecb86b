"""SwapAdvisor's genomes: an order of the ops, and the classes and slots of memory; crossover, mutation and the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

Order = tuple[int, ...]
Parents = Mapping[int, frozenset[int]]  # node -> nodes that come before it


@dataclass(frozen=True)
class SlotMemory:
    """`classes`: for each distinct size, in ascending order, its class; `slots`: of each class."""

    classes: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Genome:
    order: Order
    memory: SlotMemory


def cross_orders(first: Order, second: Order, rng: Random) -> Order:
    """The first nodes of one parent, then the others in the order of the other; in topological order if both are."""
    cut = rng.randint(0, len(first))
    head = set(first[:cut])
    return (*first[:cut], *(n for n in second if n not in head))


def mutate_order(order: Order, parents: Parents, rng: Random, share: float) -> Order:
    """List scheduling: the ready node that came first in the old order, or any ready one with this probability."""
    place = {n: k for k, n in enumerate(order)}
    left = {n: len(parents[n]) for n in order}
    children: dict[int, list[int]] = {}
    for n in order:
        for p in parents[n]:
            children.setdefault(p, []).append(n)
    ready = sorted((n for n in order if not left[n]), key=place.__getitem__)
    made: list[int] = []
    while ready:
        n = ready.pop(rng.randrange(len(ready)) if rng.random() < share else 0)
        made.append(n)
        for child in children.get(n, ()):
            left[child] -= 1
            if not left[child]:
                ready.append(child)
        ready.sort(key=place.__getitem__)
    return tuple(made)


def is_topological(order: Order, parents: Parents) -> bool:
    done: set[int] = set()
    for n in order:
        if not parents[n] <= done:
            return False
        done.add(n)
    return len(done) == len(order) == len(parents)


class SlotRoom:
    """The memory genome of tensors of these sizes in so many bytes. `counts`: tensors of each distinct size."""

    def __init__(self, counts: Mapping[int, int], room: int) -> None:
        self.sizes = sorted(counts)
        self._counts = [counts[size] for size in self.sizes]
        self.room = room

    def class_sizes(self, memory: SlotMemory) -> list[int]:
        """Bytes of a slot of each class: of the largest size in it."""
        found = [0] * len(memory.slots)
        for size, k in zip(self.sizes, memory.classes, strict=True):
            found[k] = max(found[k], size)
        return found

    def nbytes(self, memory: SlotMemory) -> int:
        return sum(size * count for size, count in zip(self.class_sizes(memory), memory.slots, strict=True))

    def start(self) -> SlotMemory:
        """A class for every size, with as many slots as its share of the bytes allows."""
        total = sum(s * c for s, c in zip(self.sizes, self._counts, strict=True))
        share = min(1.0, self.room / total) if total else 1.0
        return self.repaired(SlotMemory(tuple(range(len(self.sizes))), tuple(max(1, int(c * share)) for c in self._counts)))

    def cross(self, first: SlotMemory, second: SlotMemory, rng: Random) -> SlotMemory:
        """One point in the classes, and one in the numbers of slots."""
        a, b = rng.randint(0, len(self.sizes)), rng.randint(0, len(first.slots))
        return self.repaired(SlotMemory((*first.classes[:a], *second.classes[a:]), (*first.slots[:b], *second.slots[b:])), rng)

    def mutate(self, memory: SlotMemory, rng: Random, share: float) -> SlotMemory:
        """Some entries are drawn anew, from a normal distribution around what they were."""
        most = len(memory.slots) - 1
        classes = [min(most, max(0, round(rng.gauss(k, 1)))) if rng.random() < share else k for k in memory.classes]
        slots = [max(0, round(rng.gauss(n, 1 + n / 4))) if rng.random() < share else n for n in memory.slots]
        return self.repaired(SlotMemory(tuple(classes), tuple(slots)), rng)

    def repaired(self, memory: SlotMemory, rng: Random | None = None) -> SlotMemory:
        """Every class in use has a slot, none has more than tensors, and all fit the bytes if one slot each does; room that is
        left goes to classes that lack slots."""
        sizes = self.class_sizes(memory)
        need = [0] * len(memory.slots)
        for k, count in zip(memory.classes, self._counts, strict=True):
            need[k] += count
        slots = [min(n, max(1, m)) if n else 0 for n, m in zip(need, memory.slots, strict=True)]
        total = sum(s * n for s, n in zip(sizes, slots, strict=True))
        while total > self.room and any(n > 1 for n in slots):
            k = max((k for k in range(len(slots)) if slots[k] > 1), key=lambda k: (sizes[k] * slots[k], k))
            slots[k] -= 1
            total -= sizes[k]
        order = list(range(len(slots)))
        if rng is not None:
            rng.shuffle(order)
        for k in order:
            while slots[k] < need[k] and sizes[k] and total + sizes[k] <= self.room:
                slots[k] += 1
                total += sizes[k]
        return SlotMemory(memory.classes, tuple(slots))


def evolve(
    first: Sequence[Genome],
    breed: Callable[[Genome, Genome], Genome],
    fitness: Callable[[Genome], float],
    *,
    population: int,
    generations: int,
    rng: Random,
) -> tuple[list[Genome], list[float]]:
    """Elitist search: the best of each generation stay. Returns the last population, best first, and the best fitness of each
    generation; smaller is better."""
    scored = sorted(((fitness(g), n, g) for n, g in enumerate(first)), key=lambda s: s[:2])[:population]
    history = [scored[0][0]]
    number = len(first)
    for _ in range(generations):
        children = []
        for _ in range(population):
            a, b = (min(rng.sample(scored, min(2, len(scored))))[2] for _ in range(2))
            child = breed(a, b)
            children.append((fitness(child), number, child))
            number += 1
        seen: dict[Genome, tuple[float, int, Genome]] = {}
        for entry in sorted([*scored, *children], key=lambda s: s[:2]):
            seen.setdefault(entry[2], entry)
        scored = list(seen.values())[:population]
        history.append(scored[0][0])
    return [g for _, _, g in scored], history
