"""Rockmate: menus of op-level programs for every kind of block, put together by rotor's search over the chain.

Zhao et al., "Rockmate: an Efficient, Fast, Automatic and Generic Tool for Re-materialization in PyTorch" (ICML 2023, PMLR
202:42018). Inside a block, Checkmate's program is solved for several bounds on what may be held between its forward and its
backward; identical blocks are solved once. Along the chain, every block takes one line of its menu, or is dropped with its
neighbours and run again whole, nested to any depth, as in `rotor`.

Beside Checkmate's programs, menus have those that keep the best sets of results by minimum cuts (`min_cut.py`): these run
nothing more than twice and take no time to find. `menus="cut"` has these alone, and needs no solver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdall.actions.reschedule import choice_of, obstacle
from holdall.actions.reschedule.op_graph import OpGraph, op_graph, programs
from holdall.errors import unknown_name
from holdall.planners.checkmate import ilp
from holdall.planners.rotor import Tried, actions_of, chain_of, enough, in_slots, row_numbers
from holdall.planners.rotor.table import NEVER, Dropped, Item, Row, Stage, Table, Taken, _from, _shifted
from holdall.planning.finish import finish, with_traced
from holdall.planning.menus import MenuLine, kind_of, try_choices
from holdall.planning.segments import runs
from holdall.types import Action, Block, Choice, Plan, Problem, Trace
from holdall.units import format_seconds

_MENUS = ("checkmate", "cut")


@dataclass(frozen=True, kw_only=True)
class Rockmate:
    menus: str = "checkmate"
    options: int = 6  # programs on a menu, beside keeping everything
    time_limit: float = 1.0  # seconds for each of them
    slots: int = 500  # units of memory that the search along the chain counts in

    name: ClassVar[str] = "rockmate"
    paper: ClassVar[str] = "Zhao et al., ICML 2023, PMLR 202:42018"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.menus not in _MENUS:
            raise unknown_name("menus of rockmate", self.menus, _MENUS)
        trace = problem.trace
        rows = runs(trace)
        blocks = [block for row in rows for block in row]
        if not blocks:
            return finish(self, problem, [], why=["no block can be run again"], began=began)
        offered = self.make_menus(problem, blocks)
        lines = try_choices(problem, offered).found
        chain = chain_of(problem, rows)
        unit = max(1, -(-enough(chain) // self.slots))
        options = [_options(stage, after, lines.get(kind_of(b), ()), unit) for stage, after, b in _along(chain, blocks)]
        table = MenuTable(in_slots(chain, unit), self.slots + 1 + len(chain), options, rows=row_numbers(rows))
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
            solved = [self._solve(graph, n / self.options) for n in range(self.options)]
            chosen += [order for order in solved if order is not None]
        count = block.last - block.first + 1
        again = [order for order in dict.fromkeys(chosen) if any(n < count for n in order)]
        return [choice_of(block, order) for order in again]

    def _solve(self, graph: OpGraph, share: float) -> tuple[int, ...] | None:
        """The program that holds at most this share of the block's bytes between forward and backward."""
        roomy = 2 * sum(graph.dag.size) + max(graph.dag.extra)
        saved = int(graph.kept * share)
        answer = ilp.round_lp(graph.dag, roomy, tries=20, time_limit=self.time_limit, loss=graph.middle, saved_budget=saved)
        return graph.action(answer.program).backward if answer.program is not None else None


@dataclass(frozen=True, slots=True)
class Option:
    """A line of a block's menu as rotor's search sees it."""

    choice: Choice
    kept: int  # slots that are held, without the input and with the output
    ub: float  # backward, with what is run again in it
    ob: int  # slots that come and go in backward


class MenuTable(Table):
    """Rotor's table, where a stage that is not inside a dropped stretch may also take a line of its menu."""

    def __init__(
        self, chain: Sequence[Stage], memory: int, options: Sequence[Sequence[Option]], *, rows: Sequence[int] | None = None
    ) -> None:
        self._options = options
        self._last = len(chain) - 1
        super().__init__(chain, memory, rows=rows)

    def _whole_row(self, s: int, t: int) -> Row:
        row = super()._whole_row(s, t)
        if t == self._last and s < t:
            for option in self._options[s]:
                row = np.minimum(row, self._option_row(s, option))
        return row

    def _option_row(self, s: int, option: Option) -> Row:
        stage, a = self._chain[s], self._a
        least = max(a[s + 1] + option.kept + stage.of, a[s] + option.kept + option.ob + self._behind(s + 1, self._last))
        later = self._from[s + 1][self._last - s - 1]
        return _from(least, stage.uf + option.ub + _shifted(later, option.kept))

    def items(self, s: int, t: int, m: int) -> tuple[Item, ...]:
        if t != self._last:
            return super().items(s, t, m)
        m = min(m, self._memory)
        found: list[Item] = []
        while s < t:
            best = self.seconds(s, t, m)
            whole = float(super()._whole_row(s, t)[m])
            lines: list[tuple[float, int, Item]] = [(whole, self._kept(s), s)]
            lines += [(float(self._option_row(s, o)[m]), o.kept, Taken(s, o.choice)) for o in self._options[s]]
            seconds, kept, line = min(lines, key=lambda entry: entry[0])
            if seconds <= best and seconds < NEVER:
                found.append(line)
                s, m = s + 1, m - kept
                continue
            j = s + 1 + int(np.argmin(self._splits(s, t)[:, m]))
            found.append(Dropped(s, j - 1, super().items(s, j - 1, m - self._behind(j, t))))
            s, m = j, m - self._a[j]
        return (*found, t)


class _Tried(Tried):
    """Answers with lines of menus in them."""

    def actions(self, n: int) -> list[Action]:
        trace = self._problem.trace
        found: list[Action] = [*actions_of(trace, self._blocks, self._answers[n])]
        for item in self._answers[n]:
            if isinstance(item, Taken):
                found += item.choice.on(trace, self._blocks[item.stage])
        return with_traced(self._problem, found)


def _along(chain: Sequence[Stage], blocks: Sequence[Block]) -> list[tuple[Stage, int, Block]]:
    """Each block's stage with the size of what it returns."""
    return [(stage, after.a, block) for stage, after, block in zip(chain, chain[1:], blocks, strict=False)]


def _options(stage: Stage, out: int, lines: Sequence[MenuLine], unit: int) -> list[Option]:
    """The tried choices in the search's own sizes, rounded up."""

    def slots(size: int) -> int:
        return -(-size // unit)

    return [
        Option(
            choice=c.choice,
            kept=slots(max(0, stage.abar - stage.a + out - c.freed)),
            ub=stage.ub + c.seconds,
            ob=slots(max(0, c.backward + c.freed + out - stage.a)),
        )
        for c in lines
        if c.freed > 0
    ]


def _described(items: Sequence[Item], count: int) -> str:
    taken = sum(isinstance(i, Taken) for i in items)
    dropped = sum(i.last - i.first + 1 for i in items if isinstance(i, Dropped))
    return f"of {count} blocks {taken} run by a program, {dropped} are dropped and run again whole, the others are kept"
