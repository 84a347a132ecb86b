"""Rockmate: menus of op-level programs for every kind of block, put together by rotor's search over the chain.

Zhao et al., "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch" (ICML 2023, PMLR
202:42018). Inside a block, Checkmate's program is solved for several bounds on what may be held between its forward and its
backward, and for several bounds on its peak; identical blocks are solved once. Along the chain, every block takes one line of
its menu, or is dropped with its neighbours and run again, nested to any depth, as in `rotor`. In the replay of what was dropped
blocks take lines of their menus too.

Small blocks are solved by the integer program, larger ones by rounding its relaxation. Beside these programs, menus have those
that keep the best sets of results by minimum cuts (`min_cut.py`): these run nothing more than twice and take no time to find.
`menus="cut"` has these alone, and needs no solver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from holdall.actions.recompute import Recompute
from holdall.actions.reschedule import Reschedule, choice_of, obstacle
from holdall.actions.reschedule.dag import replay
from holdall.actions.reschedule.op_graph import OpGraph, op_graph, programs
from holdall.errors import InvalidInput, unknown_name
from holdall.planners.checkmate import ilp
from holdall.planners.rotor import Tried, chain_of, enough, in_slots, nested_segments, row_numbers
from holdall.planners.rotor.table import Dropped, Form, Item, Stage, Table, Taken
from holdall.planning.finish import finish, with_traced
from holdall.planning.menus import MenuLine, kind_of, try_choices
from holdall.planning.segments import runs
from holdall.types import Action, Block, Choice, Plan, Problem, Trace
from holdall.units import format_seconds

_MENUS = ("checkmate", "cut")


@dataclass(frozen=True, kw_only=True)
class Rockmate:
    menus: str = "checkmate"
    options: int = 6  # bounds on what a block may hold that programs are made for, beside keeping everything
    peaks: int = 2  # bounds on the peak of a block, each with all of these
    nodes: int = 32  # a block with more is solved by rounding
    time_limit: float = 1.0  # seconds for each program
    slots: int = 500  # units of memory that the search along the chain counts in

    name: ClassVar[str] = "rockmate"
    paper: ClassVar[str] = "Zhao et al., ICML 2023, PMLR 202:42018"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.menus not in _MENUS:
            raise unknown_name("menus of rockmate", self.menus, _MENUS)
        if min(self.options, self.peaks, self.slots) < 1:
            what = f"`options` is {self.options}, `peaks` is {self.peaks} and `slots` is {self.slots}"
            raise InvalidInput(what, hint="use at least 1 of each")
        trace = problem.trace
        rows = runs(trace)
        blocks = [block for row in rows for block in row]
        if not blocks:
            return finish(self, problem, [], why=["no block can be run again"], began=began)
        offered = self.make_menus(problem, blocks)
        lines = try_choices(problem, offered).found
        chain = chain_of(problem, rows)
        unit = max(1, -(-enough(chain) // self.slots))
        menus = [
            _forms(n, stage, after.a, lines.get(kind_of(block), ()), unit)
            for n, (stage, after, block) in enumerate(zip(chain, chain[1:], blocks, strict=False))
        ]
        table = Table(in_slots(chain, unit), self.slots + 1 + len(chain), rows=row_numbers(rows), menus=menus)
        answers = [table.items(0, len(blocks), m) for m, _ in table.stairs(0, len(blocks))]
        tried = _Tried(problem, blocks, answers)
        best = tried.best()
        count = sum(len(v) for v in offered.values())
        why = [f"{len(offered)} kinds of blocks solved once each, {count} programs on their menus ({self.menus})"]
        why.append(_described(answers[best], len(blocks)))
        why.append(f"{format_seconds(tried.outcomes[best].recompute_seconds or 0.0)} of recomputation is the least found")
        return finish(self, problem, tried.actions(best), why=why, began=began)

    def make_menus(self, problem: Problem, blocks: Sequence[Block]) -> dict[int, list[Choice]]:
        """Programs for every kind of block that can be run op by op."""
        trace = problem.trace
        kinds: dict[int, Block] = {}
        for block in blocks:
            kinds.setdefault(kind_of(block), block)
        found: dict[int, list[Choice]] = {}
        for n, (kind, block) in enumerate(kinds.items()):
            problem.progress("rockmate: menus", n, len(kinds), block.name)
            if not obstacle(trace, block):
                found[kind] = self._programs(trace, block)
        return found

    def _programs(self, trace: Trace, block: Block) -> list[Choice]:
        by_cut = programs(trace, block)
        step = max(1.0, len(by_cut) / self.options)
        chosen = [by_cut[int(n * step)] for n in range(min(self.options, len(by_cut)))]
        if self.menus == "checkmate":
            graph = op_graph(trace, block)
            grid = product(range(self.options), range(self.peaks))
            solved = [self._solve(graph, saved / self.options, peak / self.peaks) for saved, peak in grid]
            chosen += [order for order in solved if order is not None]
        count = block.last - block.first + 1
        again = [order for order in dict.fromkeys(chosen) if any(n < count for n in order)]
        return [choice_of(block, order) for order in again]

    def _solve(self, graph: OpGraph, saved: float, peak: float) -> tuple[int, ...] | None:
        """The program that holds at most this share of the block's bytes between forward and backward.

        `peak`: 0 for any; else how far below that of the plain program, as a share of the way to the least there is.
        """
        dag = graph.dag
        plain = replay(dag, dag.once).peak
        budget = int(plain - (plain - dag.floor) * peak) if peak else 2 * sum(dag.size) + max(dag.extra)
        bound = int(graph.kept * saved)
        if len(dag) <= self.nodes:
            found = ilp.solve(dag, budget, time_limit=self.time_limit, loss=graph.middle, saved_budget=bound)
        else:
            found = ilp.round_lp(dag, budget, tries=20, time_limit=self.time_limit, loss=graph.middle, saved_budget=bound)
        return graph.action(found.program).backward if found.program is not None else None


class _Tried(Tried):
    """Answers with lines of menus in them."""

    def actions(self, n: int) -> list[Action]:
        answer = self._answers[n]
        found: list[Action] = [_action(self._problem.trace, self._blocks, item) for item in answer if not isinstance(item, int)]
        return with_traced(self._problem, found)


def _action(trace: Trace, blocks: Sequence[Block], item: Dropped | Taken) -> Action:
    """A line of a menu, or a stretch with lines of menus in its replay."""
    if isinstance(item, Taken):
        return _program(trace, blocks[item.stage], item.choice)
    lines = [_program(trace, blocks[i.stage], i.choice) for i in _inside([item]) if isinstance(i, Taken)]
    whole = {line.blocks[0] for line in lines if isinstance(line, Recompute)}  # run again whole, inside
    return Recompute.of(
        trace,
        blocks[item.first : item.last + 1],
        inner=nested_segments(blocks, item.items, whole),
        programs=[line for line in lines if isinstance(line, Reschedule)],
    )


def _program(trace: Trace, block: Block, choice: Choice) -> Reschedule | Recompute:
    (action,) = choice.on(trace, block)
    assert isinstance(action, (Reschedule, Recompute))
    return action


def _forms(n: int, stage: Stage, out: int, lines: Sequence[MenuLine], unit: int) -> list[Form]:
    """The tried choices as the search sees them, in its own sizes, rounded up. `out`: bytes of what the stage returns."""

    def slots(size: int) -> int:
        return -(-max(0, size) // unit)

    found = []
    for c in (c for c in lines if c.freed > 0):
        held = stage.abar - stage.a - c.freed
        found.append(
            Form(
                item=Taken(n, c.choice),
                kept=slots(held + out),
                ub=stage.ub + c.seconds,
                of=slots(c.forward - held - out),
                ob=slots(c.backward + c.freed + out - stage.a),
            )
        )
    return worthwhile(found)


def worthwhile(forms: Sequence[Form]) -> list[Form]:
    """Those that no other equals or beats in held bytes, both peaks and time; of equal ones the first."""

    def measures(form: Form) -> tuple[float, ...]:
        return form.kept, form.kept + form.of, form.kept + form.ob, form.ub

    kept: list[Form] = []
    for form in sorted(forms, key=measures):
        if not any(all(a <= b for a, b in zip(measures(other), measures(form), strict=True)) for other in kept):
            kept.append(form)
    return kept


def _described(items: Sequence[Item], count: int) -> str:
    dropped = sum(i.last - i.first + 1 for i in items if isinstance(i, Dropped))
    inside = sum(isinstance(i, Taken) for i in _inside(items))
    taken = sum(isinstance(i, Taken) for i in items)
    again = f"{dropped} are dropped and run again" + (f", {inside} of them by a program" if inside else "")
    return f"of {count} blocks {taken} run by a program, {again}, the others are kept"


def _inside(items: Sequence[Item]) -> list[Item]:
    """What lies in dropped stretches, to any depth."""
    own = [inner for item in items if isinstance(item, Dropped) for inner in item.items]
    return [*own, *_inside(own)] if own else []
