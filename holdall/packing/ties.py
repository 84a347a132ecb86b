"""What ties the steps of a planned step to each other, whatever their order: data, changes in place, copies and the waits for
them, random numbers, and references that end with some step."""

from __future__ import annotations

from collections import defaultdict

from holdall.packing.ordering import OpsToOrder, TensorStay
from holdall.simulator.lifetimes import PlannedStep
from holdall.types import Collect, Copy, Drop, Phase, Run, Step, Wait


class Ties:
    """The steps other than frees by number, what ties each to others, and the frees with the steps that each comes after."""

    def __init__(self, step: PlannedStep) -> None:
        self._schedule = schedule = step.schedule
        self.nodes: list[Step] = []
        self.updates: frozenset[int] = frozenset()
        self._before: list[set[int]] = []
        self._changed: dict[int, int] = {}  # tensor -> the last step that changed it
        self._read: dict[int, list[int]] = defaultdict(list)  # tensor -> the steps that read it since then
        self._used: dict[int, set[int]] = defaultdict(set)  # tensor -> all steps that used it since it was freed anywhere
        self._freed: dict[int, frozenset[int]] = {}  # tensor -> the steps that its last free comes after
        self.drops: list[tuple[Drop, frozenset[int]]] = []
        self._stays: list[TensorStay] = []
        self._begun: dict[int, int] = {}  # tensor on the device -> the step that made it
        info = {**schedule.trace.tensors, **schedule.added}
        for x, t in info.items():
            if t.born < 0 and schedule.start.get(x, schedule.home) == schedule.home:
                self._begun[x] = -1
        updates, random = [], -1
        for each in step.steps:
            if isinstance(each, Drop):
                self._drop(each)
                continue
            number = len(self.nodes)
            self.nodes.append(each)
            self._before.append(set())
            self._tie(each, number)
            if isinstance(each, Run) and each.op >= 0:
                op = schedule.trace.ops[each.op]
                if op.random:
                    self._before[number] |= {random} - {-1}
                    random = number
                if op.site.phase is Phase.STEP:
                    updates.append(number)
        self.updates = frozenset(updates)
        for x, maker in self._begun.items():
            self._stays.append(TensorStay(schedule.info(x).nbytes, maker, frozenset()))

    def _tie(self, step: Step, number: int) -> None:
        home = self._schedule.home
        if isinstance(step, Run):
            for x in step.reads:
                self._use(x, number, changes=False)
            for x in (*step.mutates, *step.writes):
                self._use(x, number, changes=True)
            for x in step.writes if step.stream == "compute" else ():
                self._begun[x] = number
        elif isinstance(step, Copy):
            for x in (*step.tensors, *step.uses):
                self._use(x, number, changes=True)
            if step.lands and step.dst == home:
                self._begun.update(dict.fromkeys(step.tensors, number))
        elif isinstance(step, (Collect, Wait)):
            for x in step.tensors:
                self._use(x, number, changes=True)

    def _use(self, x: int, number: int, *, changes: bool) -> None:
        before = self._before[number]
        if x in self._changed:
            before.add(self._changed[x])
        before |= self._freed.get(x, frozenset())
        if changes:
            before.update(self._read.pop(x, ()))
            self._changed[x] = number
        else:
            self._read[x].append(number)
        before.discard(number)
        self._used[x].add(number)

    def _drop(self, drop: Drop) -> None:
        """A free comes after every use so far, and after the step that it followed: until then something refers to it."""
        x, last = drop.tensor, len(self.nodes) - 1
        after = frozenset(self._used[x] | ({last} if last >= 0 else set()))
        self.drops.append((drop, after))
        self._freed[x] = self._freed.get(x, frozenset()) | after
        if drop.tier == self._schedule.home:
            self._stays.append(TensorStay(self._schedule.info(x).nbytes, self._begun.pop(x), after))

    def ops(self) -> OpsToOrder:
        space = [node.workspace if isinstance(node, Run) and node.stream == "compute" else 0 for node in self.nodes]
        return OpsToOrder([frozenset(before) for before in self._before], space, self._stays)

    def in_order(self, order: list[int]) -> list[Step]:
        """The steps in this order, with every free as soon as all that it comes after is done."""
        found: list[Step] = [drop for drop, after in self.drops if not after]
        left = [len(after) for _, after in self.drops]
        ends: dict[int, list[int]] = defaultdict(list)
        for n, (_, after) in enumerate(self.drops):
            for number in after:
                ends[number].append(n)
        for number in order:
            found.append(self.nodes[number])
            for n in ends[number]:
                left[n] -= 1
                if not left[n]:
                    found.append(self.drops[n][0])
        return found
