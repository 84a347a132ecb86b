"""Device memory around every op of the trace under some actions; menus are built from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdall.cost.launching import by_program, launching, starts, starts_of, starts_of_copy
from holdall.simulator.lower import close, lower
from holdall.types import Action, Copy, Drop, Problem, Run, Schedule


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """`before[k]`: live bytes just before op k. `high[k]`: the peak since op k - 1 finished, including op k's results."""

    before: list[int]
    high: list[int]
    seconds: list[float]  # seconds of recomputation since op k - 1
    out: list[int]  # bytes whose copy to a farther tier began since op k - 1
    back: list[int]  # bytes whose copy back began since op k - 1
    copying: list[float]  # launches of the copies in `out`
    launches: list[float]  # of computation, beyond plain training's, since op k - 1; 0 where a launch is part of the op


def memory_curve(problem: Problem, actions: Iterable[Action]) -> MemoryCurve:
    schedule = lower(problem, actions)
    info = {**schedule.trace.tensors, **schedule.added}
    home = problem.home
    live = sum(t.nbytes for x, t in info.items() if t.born < 0 and x not in schedule.start)
    count = len(schedule.trace.ops)
    curve = MemoryCurve([0] * count, [0] * count, [0.0] * count, [0] * count, [0] * count, [0.0] * count, [0.0] * count)
    launches = _Launches(schedule) if launching(problem.hardware) else None
    high, again, out, back, sent, more = live, 0.0, 0, 0, 0.0, 0.0
    done = True  # only frees since the last op
    for step in close(schedule):
        if isinstance(step, Run):
            if step.stream != "compute":
                continue
            more += launches.beyond(step) if launches is not None else 0.0
            if step.op >= 0 and not step.again:
                k = step.op
                curve.before[k] = live
                live += sum(info[x].nbytes for x in step.writes)
                curve.high[k] = max(high, live + step.workspace)
                curve.seconds[k], curve.out[k], curve.back[k] = again, out, back
                curve.copying[k], curve.launches[k] = sent, more
                high, again, out, back, sent, more = live, 0.0, 0, 0, 0.0, 0.0
                done = True
            else:
                done = False
                live += sum(info[x].nbytes for x in step.writes)
                high = max(high, live + step.workspace)
                again += step.seconds
        elif isinstance(step, Copy):
            size = sum(info[x].nbytes for x in step.tensors)
            if not step.lands:
                continue
            if step.dst == home:
                live += size
                high = max(high, live)
                done = False
                back += size
            else:
                out += size
                sent += starts_of_copy(step, schedule.trace) if launches is not None else 0.0
        elif isinstance(step, Drop) and step.tier == home:
            live -= info[step.tensor].nbytes
            if done:  # frees by the op itself belong to it, not to the next
                high = live
    return curve


class _Launches:
    """The launches of a schedule's runs beyond those of plain training."""

    def __init__(self, schedule: Schedule) -> None:
        self._plain = starts(schedule.trace)
        self._programs = by_program(schedule)

    def beyond(self, run: Run) -> float:
        asked = starts_of(run, self._plain, self._programs)
        is_plain = run.op >= 0 and not run.again and run.seconds > 0
        return asked - (self._plain[run.op] if is_plain else 0.0)
