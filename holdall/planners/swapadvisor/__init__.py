"""SwapAdvisor: a genetic search over the order of ops and the layout of memory; swaps follow from both.

Huang, Jin and Li, ASPLOS 2020. A genome is an order of the forward's ops and a division of the memory for activations into
slots (`genetic.py`). The swap planner lets the tensor with the farthest next use leave when a slot is needed, and the makespan
of a simulated step is the fitness (`swaps.py`). The best genomes are simulated whole; the fastest that fits is the plan: the
blocks with another order run by it (`reschedule`), and tensors leave and come back as planned (`layer_swap`).

Ops change places within their block: random ones keep their order among themselves, so the bits stay. Not here: other orders of
the backward, which is autograd's; slots as addresses, which the device's allocator chooses; swapped parameters.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import ClassVar

from holdall.actions.layer_swap import LayerSwap
from holdall.actions.reschedule import Reschedule, obstacle, region
from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planners.swapadvisor.genetic import Genome, Order, SlotRoom, cross_orders, evolve, mutate_order
from holdall.planners.swapadvisor.swaps import SwapIn, SwapNode, SwapPlan, makespan, next_uses, plan_swaps
from holdall.planning.finish import finish, outcome_or_never, over_budget
from holdall.simulator.curve import memory_curve
from holdall.simulator.lower import lower
from holdall.types import Action, Block, Phase, Plan, Problem, Trace
from holdall.types.trace import OpId, TensorId
from holdall.units import format_seconds

_SHARES = (1.6, 1.3, 1.0, 0.85, 0.7, 0.5, 0.3)  # of the least room at any op: tensors need it at some ops, and copies lag
_TRIED = 4  # genomes of a search that are simulated whole
_RANDOM = 0.2  # probability that a ready node is chosen at random, and that an entry of the memory genome is drawn anew


@dataclass(frozen=True, kw_only=True)
class Swapadvisor:
    population: int = 12
    generations: int = 12
    seed: int = 0

    name: ClassVar[str] = "swapadvisor"
    paper: ClassVar[str] = "Huang et al., ASPLOS 2020"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.population < 1 or self.generations < 0:
            what = f"`population` is {self.population} and `generations` is {self.generations}"
            raise InvalidInput(what, hint="use population=12, generations=12")
        can_move = problem.permits(LayerSwap) and problem.hardware.far is not None
        if not can_move or not over_budget(problem, outcome_or_never(problem, [])):
            return finish(self, problem, [], began=began)
        step = SwapStep(problem)
        found: list[tuple[float, list[Action], str]] = []
        for share in _SHARES if step.room > 0 and step.sizes else ():
            best, history = self.search(step, int(step.room * share))
            for genome in best[:_TRIED] if history[-1] < math.inf else ():
                actions = step.actions(genome, int(step.room * share))
                outcome = outcome_or_never(problem, actions)
                if not over_budget(problem, outcome):
                    said = f"by the search a step takes {format_seconds(history[-1])}, {format_seconds(history[0])} at first"
                    found.append((outcome.seconds, actions, said))
            if found:
                break
        if not found:
            return finish(self, problem, step.all_out(), why=["no genome fits: every tensor that can leaves"], began=began)
        _, actions, said = min(found, key=lambda f: f[0])
        return finish(self, problem, actions, why=[said], began=began)

    def search(self, step: SwapStep, room: int) -> tuple[list[Genome], list[float]]:
        """The last population, best first, and the best makespan of each generation."""
        rng = Random(self.seed)
        slots = SlotRoom(Counter(step.sizes.values()), room)
        plain = Genome(step.order, slots.start())

        def mutated(genome: Genome) -> Genome:
            order = mutate_order(genome.order, step.parents, rng, _RANDOM)
            return Genome(order, slots.mutate(genome.memory, rng, _RANDOM))

        def breed(a: Genome, b: Genome) -> Genome:
            child = Genome(cross_orders(a.order, b.order, rng), slots.cross(a.memory, b.memory, rng))
            return mutated(child) if rng.random() < 0.5 else child

        first = [plain, *(mutated(plain) for _ in range(self.population - 1))]
        return evolve(
            first,
            breed,
            lambda genome: step.seconds(genome, room),
            population=self.population,
            generations=self.generations,
            rng=rng,
        )


class SwapStep:
    """A step as the search sees it: ops of the forward in any order, those of the backward, and the tensors that may leave."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.trace = problem, problem.trace
        trace = self.trace
        self.blocks = [b for b in trace.blocks if b.backward is not None and b.saves]
        self._home: dict[TensorId, Block] = {}
        for block in self.blocks[:-1]:  # the last is needed at once
            for x in LayerSwap.of(trace, block).tensors(trace):
                self._home[x] = block
        self.sizes = {x: trace.tensors[x].nbytes for x in self._home if trace.tensors[x].nbytes}
        self.turn = next((op.id for op in trace.ops if op.site.phase is not Phase.FORWARD), len(trace.ops))
        self.end = next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops))
        self.order: Order = tuple(range(self.turn))
        self.parents = parents_of(trace, self.turn, may_change=problem.permits(Reschedule))
        near = problem.other()
        self._out = link_rate(problem.hardware, problem.home, near)
        self._back = link_rate(problem.hardware, near, problem.home)
        self._nodes = [self._node(op) for op in range(self.end)]

    def _node(self, op: OpId) -> SwapNode:
        it = self.trace.ops[op]
        return SwapNode(tuple(x for x in dict.fromkeys((*it.reads, *it.writes, *it.mutates)) if x in self.sizes), it.seconds)

    @cached_property
    def room(self) -> int:
        """Bytes for the tensors that may leave, beside what is there anyway at any op."""
        high = memory_curve(self.problem, []).high
        uses = next_uses(self._nodes)
        there = [0] * (self.end + 1)
        for x, ops in uses.items():
            there[ops[0]] += self.sizes[x]
            there[ops[-1] + 1] -= self.sizes[x]
        live, least = 0, math.inf
        limit = self.problem.limit(self.problem.home)
        for op in range(self.end):
            live += there[op]
            least = min(least, limit - (high[op] - live))
        return int(least) if least < math.inf else 0

    def nodes(self, order: Order) -> list[SwapNode]:
        return [self._nodes[op] for op in (*order, *range(self.turn, self.end))]

    def plan(self, genome: Genome, room: int) -> SwapPlan | None:
        slots = SlotRoom(Counter(self.sizes.values()), room)
        if slots.nbytes(genome.memory) > room:
            return None
        place = dict(zip(slots.sizes, genome.memory.classes, strict=True))
        kind = {x: place[size] for x, size in self.sizes.items()}
        return plan_swaps(self.nodes(genome.order), kind, genome.memory.slots, locked=self.turn - 1)

    def seconds(self, genome: Genome, room: int) -> float:
        """The fitness: the makespan, infinite where a node's tensors do not fit their slots."""
        plan = self.plan(genome, room)
        if plan is None:
            return math.inf
        return makespan(self.nodes(genome.order), plan, self.sizes, out=self._out, back=self._back)

    # actions

    def actions(self, genome: Genome, room: int) -> list[Action]:
        programs = self._programs(genome.order)
        plan = self.plan(genome, room)
        if plan is None:
            return self.all_out()
        trace = self.trace
        kept = {n: p.tensors for n, p in lower(self.problem, programs).programs.items()}
        ops = (*genome.order, *range(self.turn, self.end))
        moments = {swap.tensor: self._moments(swap, ops) for swap in plan.swaps}
        swaps: list[Action] = []
        for block in self.blocks[:-1]:
            together: dict[tuple[str, str], set[TensorId]] = {}
            for x in LayerSwap.of(trace, block, only=moments.keys(), kept=kept).tensors(trace):
                together.setdefault(moments[x], set()).add(x)
            for (until, fetch), tensors in together.items():
                swaps.append(replace(LayerSwap.of(trace, block, only=tensors, kept=kept), until=until, fetch=fetch))
        return [*programs, *swaps]

    def all_out(self) -> list[Action]:
        """Every tensor leaves, and is waited for."""
        made = [LayerSwap.of(self.trace, block) for block in self.blocks[:-1]]
        return [replace(swap, begin=swap.block, until=swap.block) for swap in made if swap.tensors(self.trace)]

    def _programs(self, order: Order) -> list[Reschedule]:
        found = []
        for block in self.blocks:
            mine = [op - block.first for op in order if block.first <= op <= block.last]
            if mine != sorted(mine):
                ops, count = region(self.trace, block)
                found.append(Reschedule.of(self.trace, block, range(count, len(ops)), mine))
        return found

    def _moments(self, swap: SwapIn, ops: Sequence[OpId]) -> tuple[str, str]:
        """The block whose end frees the device's copy, and the one at whose backward the fetch begins."""
        if not self.problem.hardware.overlap:
            return "", ""
        home = self._home[swap.tensor]
        before = [b for b in self.blocks if b.last < ops[swap.out] and b.id > home.id]
        until = before[-1].name if before else ""
        backward = sorted((b.backward or 0, b) for b in self.blocks if b.id > home.id) if swap.free < swap.back else []
        at = bisect_left([op for op, _ in backward], ops[swap.free])
        return until, backward[at][1].name if at < len(backward) else ""


def parents_of(trace: Trace, turn: OpId, *, may_change: bool) -> dict[int, frozenset[int]]:
    """Op of the forward -> ops that it must come after. Ops outside of blocks that can run op by op keep their places."""
    parents: dict[int, set[int]] = {op: set() for op in range(turn)}
    free = [b for b in trace.blocks if may_change and b.saves and b.backward is not None and not obstacle(trace, b)]
    inside = {op: b for b in free for op in range(b.first, b.last)}  # the last op of a block stays last
    for op in range(1, turn):
        block = inside.get(op)
        if block is None or op == block.first:
            parents[op].update(range(inside[op - 1].first if op - 1 in inside else op - 1, op))
        else:
            parents[op].update(p for p in range(block.first, op) if must_follow(trace, op, p))
            parents[op].update({block.first - 1} if block.first else ())
    return {op: frozenset(found) for op, found in parents.items()}


def must_follow(trace: Trace, op: OpId, earlier: OpId) -> bool:
    """Does an op read or change what an earlier one makes or changes, or change what it reads, or are both random?"""
    a, b = trace.ops[earlier], trace.ops[op]
    changes_a, changes_b = {*a.writes, *a.mutates}, {*b.writes, *b.mutates}
    return bool((a.random and b.random) or changes_a & {*b.reads, *changes_b} or changes_b & set(a.reads))
