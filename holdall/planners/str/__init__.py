"""STR: an integer program decides which tensors are swapped and which recomputed, from what the device or the host has.

Zong et al., "STR: Hybrid Tensor Re-Generation to Break Memory Wall for DNN Training" (TPDS 2023; first at IPDPS 2022). The
program is in `program.py`: Checkmate's, with copies to the host and back that the computation of a stage hides. The step is
coarsened to groups of blocks (`graph.py`), and a tensor that is not there is recomputed from the nearest sources that are, host
copies among them (recursive source tracing).

The program counts bytes of groups, and the simulator those of ops: an answer that does not fit is solved again with less. Plans
that treat the first blocks alike are tried as well; the fastest that fits is taken.

Not here: tensors that blocks pass to each other are swapped or kept, never recomputed; a host copy comes back once in a step;
and a block's tensors that are swapped leave and return together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from holdall.cost.link import link_rate
from holdall.errors import InvalidInput
from holdall.planners.str.graph import StepGraph
from holdall.planners.str.program import LinkRates, SwapAnswer, optimum
from holdall.planning.finish import finish, outcome_or_never
from holdall.planning.state_planners import NOTHING, missing_bytes
from holdall.types import Action, Plan, Problem
from holdall.units import format_seconds

_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Str:
    nodes: int = 60  # of the graph, about; more blocks than that are grouped
    parts: int = 2  # into which a block's tensors are divided, where blocks are not grouped
    time_limit: float = 10.0  # seconds of the solver, in each round
    gap: float = 0.02  # how far from the best is near enough

    name: ClassVar[str] = "str"
    paper: ClassVar[str] = "Zong et al., TPDS 2023"
    weighs_budget: ClassVar[bool] = True

    def __call__(self, problem: Problem) -> Plan:
        began = time.perf_counter()
        if self.nodes < 3 or self.parts < 1:
            raise InvalidInput(f"`nodes` is {self.nodes} and `parts` is {self.parts}", hint="use at least nodes=3, parts=1")
        plain = _try(problem, [])
        if not plain.missing:
            return finish(self, problem, [], why=[NOTHING], began=began)
        graph = StepGraph(problem, most=self.nodes, parts=self.parts)
        found = [plain, *(_try(problem, graph.actions(d)) for d in graph.simple()), *self._solved(problem, graph)]
        best = min(found, key=lambda c: (c.missing, c.seconds))
        return finish(self, problem, best.actions, why=_why(best), began=began)

    def _solved(self, problem: Problem, graph: StepGraph) -> list[_Candidate]:
        """The program's answers, each in less memory than the one before, until one fits."""
        dag, movable = graph.dag(), graph.movable
        come = range(graph.turn, len(dag))
        home, far = problem.home, problem.hardware.far
        rates = LinkRates(0.0, 0.0)
        if far is not None:
            out, into = link_rate(problem.hardware, home, far.name), link_rate(problem.hardware, far.name, home)
            rates = LinkRates(out, into, hidden=problem.hardware.overlap)
        budget = problem.limit(home)
        found: list[_Candidate] = []
        for n in range(_ROUNDS):
            problem.progress("solving", n, _ROUNDS, "")
            seconds = self.time_limit / 2 ** (n > 0)
            answer = optimum(dag, budget, rates, movable=movable, leave=graph.ends, come=come, time_limit=seconds, gap=self.gap)
            if not answer.stages:
                break
            found.append(_try(problem, graph.actions(graph.decisions(answer.stages)), answer))
            if not found[-1].missing:
                break
            budget = less(budget, found[-1].missing)
        return found


def less(budget: int, missing: int) -> int:
    """The bytes to try after an answer that lacks some: fewer by as many, at most by a tenth."""
    return budget - min(missing, budget // 10) - 1


class _Candidate(NamedTuple):
    missing: int
    seconds: float
    actions: list[Action]
    answer: SwapAnswer | None


def _try(problem: Problem, actions: list[Action], answer: SwapAnswer | None = None) -> _Candidate:
    outcome = outcome_or_never(problem, actions)
    return _Candidate(missing_bytes(problem, outcome), outcome.seconds, actions, answer)


def _why(best: _Candidate) -> list[str]:
    counts = {name: sum(a.name == name for a in best.actions) for name in ("layer_swap", "reschedule")}
    done = f"{counts['layer_swap']} blocks swap tensors, {counts['reschedule']} recompute some"
    if best.answer is None:
        return [done, "the program found nothing faster: the first blocks are treated alike"]
    return [
        done,
        f"by the program a step takes {format_seconds(best.answer.seconds)}, at most {best.answer.gap:.1%} above its optimum",
    ]
