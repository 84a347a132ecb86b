"""What it costs to compute tensors again: the paper's MSPS (memory saving per second), with its updates.

A target is computed again from its sources, the nearest tensors that are there. When a tensor becomes a target itself, whoever
has it as a source takes its sources in its place, and its seconds on top.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdall.actions.reschedule import effects, region
from holdall.types import Block, Trace
from holdall.types.program import groups


class Recomputation:
    """The choice of targets among the tensors of one block (or of any graph)."""

    def __init__(self, nbytes: Mapping[int, int], seconds: Mapping[int, float], sources: Mapping[int, Collection[int]]) -> None:
        self.nbytes = dict(nbytes)  # of every candidate
        self.seconds = dict(seconds)  # to make it from its sources
        self.sources = {x: set(of) for x, of in sources.items()}
        self.targets: list[int] = []

    def left(self) -> list[int]:
        return [x for x in self.nbytes if x not in self.targets]

    def cost(self, x: int) -> float:
        """Seconds that a step takes longer with this target, too: its own, and those of targets that would run it as well."""
        runs = sum(x in self.sources[target] for target in self.targets)
        return (1 + runs) * self.seconds[x]

    def msps(self, x: int) -> float:
        cost = self.cost(x)
        return self.nbytes[x] / cost if cost else float("inf")

    def choose(self, x: int) -> None:
        """Make it a target, and update all tensors that have it as a source."""
        for other, sources in self.sources.items():
            if other != x and x in sources:
                self.sources[other] = sources - {x} | self.sources[x]
                self.seconds[other] += self.seconds[x]
        self.targets.append(x)


def recomputation(trace: Trace, block: Block, candidates: Collection[int]) -> Recomputation:
    """The tensors of a block that runs op by op; its inputs and the other tensors that it holds are always there."""
    ops, count = region(trace, block)
    owner = {x: group for group in groups(effects(ops)[:count]) for n in group for x in ops[n].writes}
    held = {trace.saves[n].tensor for n in block.saves}
    seconds: dict[int, float] = {}
    sources: dict[int, set[int]] = {}
    can = [x for x in candidates if x in owner]
    for x in can:
        run: set[int] = set()
        sources[x] = set()
        pending = [x]
        while pending:
            group = owner[pending.pop()]
            if group[0] in run:
                continue
            run.update(group)
            made = {y for n in group for y in ops[n].writes}
            for y in {y for n in group for y in (*ops[n].reads, *ops[n].mutates)} - made:
                if y in held and y in can:
                    sources[x].add(y)
                elif y in owner and y not in held:
                    pending.append(y)
        seconds[x] = sum(ops[n].seconds for n in run)
    return Recomputation({x: trace.tensors[x].nbytes for x in can}, seconds, sources)
