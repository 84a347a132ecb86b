"""Programs in stages: stage t recomputes what it needs, in order, and then runs node t for the first time.

The form that Checkmate and Moccasin search. The outputs carried into each stage determine the rest: the fewest runs, and the
outputs carried in vain. `squeeze` and `fill` reach a good program by single steps; the exact solvers start from it, and it
repairs a rounded solution. `improve` goes on from there for as long as there is time, where a solver proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from random import Random

from holdall.actions.reschedule.dag import Dag, Program, Replay, replay
from holdall.errors import InvalidInput

_PROMISING = 12  # outputs that `squeeze` tries to drop at one place
_WINDOWS = (40, 15, 6)  # parts of all stages that a round of `improve` looks at, to either side
_SHARES = (0.3, 0.6, 1.0)  # of the recomputation in it that the round undoes
_NOISE = 0.6  # by which its prices are wrong, so that it does not end where it began


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a program. `loss`: the node right after which at most `saved` bytes may be live."""

    budget: int
    loss: int | None = None
    saved: int | None = None
    copies: float = inf  # runs allowed per node

    def allow(self, staged: Staged) -> bool:
        return max(staged.seen.executed) <= self.copies and next(self.broken(staged), None) is None

    def broken(self, staged: Staged) -> Iterator[tuple[int, bool, int]]:
        """(place in the program, whether after the run instead of during it, excess bytes)."""
        seen = staged.seen
        if self.loss is not None and self.saved is not None:
            place = staged.program.index(self.loss)
            if seen.after[place] > self.saved:
                yield place, True, seen.after[place] - self.saved
        for place, held in enumerate(seen.during):
            if held > self.budget:
                yield place, False, held - self.budget


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A program in stages. By stage, sets of nodes as bits of an int: carried into it, run in it, read in it."""

    dag: Dag
    carried: tuple[int, ...]  # one more than there are stages: the last is live at the end
    runs: tuple[int, ...]
    reads: tuple[int, ...]

    @cached_property
    def program(self) -> Program:
        return tuple(i for runs in self.runs for i in bits(runs))

    @cached_property
    def seen(self) -> Replay:
        return replay(self.dag, self.program)


def ruled(dag: Dag, budget: int, loss: int | None, saved_budget: int | None) -> tuple[Dag, Limits]:
    """The graph with its loss fixed to one run, and the limits on a program."""
    if (loss is None) != (saved_budget is None):
        raise InvalidInput("`loss` and `saved_budget` belong together", hint="pass both arguments or neither")
    if loss is not None:
        if not 0 <= loss < len(dag):
            raise InvalidInput(f"`loss` is {loss}; the graph has nodes 0..{len(dag) - 1}")
        dag = replace(dag, fixed=dag.fixed | {loss})
    return dag, Limits(budget=budget, loss=loss, saved=saved_budget)


def complete(dag: Dag, carried: Sequence[int]) -> Staged:
    """The fewest runs for the outputs carried into each stage; outputs that no later run reads are dropped."""
    fixed = sum(1 << i for i in dag.fixed)
    wanted = sum(1 << i for i in dag.keep)
    kept, runs, reads = [wanted], [], []
    for t in reversed(range(len(dag))):
        have = (carried[t] | fixed) & ((1 << t) - 1)
        ran = closure(dag, (wanted | 1 << t) & ~have, have)
        read = 0
        for v in bits(ran):
            read |= dag.reads[v]
        wanted = have & (wanted | read)
        kept.append(wanted)
        runs.append(ran)
        reads.append(read)
    return Staged(dag=dag, carried=tuple(kept[::-1]), runs=tuple(runs[::-1]), reads=tuple(reads[::-1]))


def in_stages(dag: Dag, program: Program) -> Staged:
    """A program whose first runs are in order, as the outputs it carries from each first run to the next."""
    wanted = sum(1 << i for i in dag.keep)
    carried = [wanted] * (len(dag) + 1)
    for place in reversed(range(1, len(program))):
        wanted = wanted & ~(1 << program[place]) | dag.reads[program[place]]
        before = program[place - 1]
        if program.index(before) == place - 1:
            carried[before + 1] = wanted
    return complete(dag, carried)


def everything(dag: Dag) -> Staged:
    """The plain program."""
    return complete(dag, [(1 << t) - 1 for t in range(len(dag) + 1)])


def squeeze(staged: Staged, limits: Limits, *, until: float = inf, rng: Random | None = None) -> Staged:
    """Carry less until it fits or no step is left; each step drops the output that costs least per excess byte.

    `until`: when to stop (`time.perf_counter`), fitting or not. `rng`: draws errors of the prices.
    """
    while time.perf_counter() < until and (broken := list(limits.broken(staged))):
        over = sum(excess for _, _, excess in broken)
        place, after, _ = max(broken, key=lambda b: b[2])
        best, choice = (True, inf), None
        for rank, dropped in enumerate(_without(staged, place, after)):
            if max(dropped.seen.executed) > limits.copies:
                continue
            saved = over - sum(excess for _, _, excess in limits.broken(dropped))
            # a step that makes other places worse by as much is the last resort; this ends, since nothing is carried again
            price = (False, (dropped.seen.seconds - staged.seen.seconds) / saved) if saved > 0 else (True, float(rank))
            if rng is not None:
                price = price[0], price[1] * rng.uniform(1 - _NOISE, 1 + _NOISE)
            if price < best:
                best, choice = price, dropped
        if choice is None:
            break
        staged = choice
    return staged


def fill(staged: Staged, limits: Limits, *, until: float = inf) -> Staged:
    """Carry more where memory allows: avoid the most expensive recomputation, until none can be avoided or time is up."""
    dag = staged.dag
    tried: set[tuple[int, int]] = set()
    while True:
        again = [
            (dag.cost[i], t, i) for t, runs in enumerate(staged.runs) for i in bits(runs & ~(1 << t)) if (t, i) not in tried
        ]
        for _, t, i in sorted(again, reverse=True):
            if time.perf_counter() >= until:
                return staged
            tried.add((t, i))
            longer = _carrying(staged, [(t, i)])
            if longer.seen.seconds < staged.seen.seconds and limits.allow(longer):
                staged = longer
                break
        else:
            return staged


def improve(staged: Staged, limits: Limits, *, until: float, rounds: int = 1000, seed: int = 0) -> Staged:
    """Undo some of the recomputation near one place, make room again at other prices, and keep what is no worse.

    What passes the limits comes closer to them first. `rounds`: how many in a row may bring nothing.
    """
    rng = Random(seed)
    best, rank = staged, _rank(staged, limits)
    without = 0
    while without < rounds and time.perf_counter() < until:
        again = [(t, i) for t, runs in enumerate(best.runs) for i in bits(runs & ~(1 << t))]
        if not again:
            break
        broken = [_stage_of(best, place)[0] for place, _, _ in limits.broken(best)]
        middle = rng.choice(broken or [t for t, _ in again])
        width, share = len(staged.dag) // rng.choice(_WINDOWS) + 1, rng.choice(_SHARES)
        undone = [(t, i) for t, i in again if abs(t - middle) <= width and rng.random() < share]
        tried = squeeze(_carrying(best, undone), limits, until=until, rng=rng)
        if limits.allow(tried):
            tried = fill(tried, limits, until=until)
        found = _rank(tried, limits)
        without = 0 if found < rank else without + 1
        if found <= rank:
            best, rank = tried, found
    return best


def greedy(dag: Dag, limits: Limits, *, starts: Sequence[Program] = (), until: float = inf) -> Staged | None:
    """A fair program, or None where single steps lead to none in time."""
    found = nearest(dag, limits, starts=starts, until=until)
    return found if limits.allow(found) else None


def nearest(dag: Dag, limits: Limits, *, starts: Sequence[Program] = (), until: float = inf) -> Staged:
    """The cheapest program that single steps lead to from the plain one and from `starts`; if none fits, the least too large.

    `until`: when to stop (`time.perf_counter`); the starts come first.
    """
    found = []
    for begin in (*(in_stages(dag, program) for program in starts), everything(dag)):
        squeezed = squeeze(begin, limits, until=until)
        found.append(fill(squeezed, limits, until=until) if limits.allow(squeezed) else squeezed)
    return min(found, key=lambda s: _rank(s, limits))


def _rank(staged: Staged, limits: Limits) -> tuple[bool, int, float]:
    """Smaller is better: runs allowed, excess bytes, seconds."""
    too_often = max(staged.seen.executed) > limits.copies
    return too_often, sum(excess for _, _, excess in limits.broken(staged)), staged.seen.seconds


def _carrying(staged: Staged, again: Sequence[tuple[int, int]]) -> Staged:
    """The program that carries these outputs into these stages, (stage, output), where it would run them again."""
    carried = list(staged.carried)
    for t, i in again:
        before = max(s for s in range(t) if (staged.runs[s] | staged.carried[s]) >> i & 1)
        for s in range(before + 1, t + 1):
            carried[s] |= 1 << i
    return complete(staged.dag, carried)


def closure(dag: Dag, wanted: int, have: int) -> int:
    """The nodes to run for `wanted` if `have` is available."""
    ran = todo = wanted & ~have
    while todo:
        v = todo.bit_length() - 1
        missing = dag.reads[v] & ~have & ~ran
        ran |= missing
        todo = (todo & ~(1 << v)) | missing
    return ran


def bits(mask: int) -> Iterator[int]:
    """The nodes of a set, in order."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _without(staged: Staged, place: int, after: bool) -> Iterator[Staged]:
    """The program without one of the outputs that are idle at a place, the most promising ones first."""
    dag = staged.dag
    stage, node = _stage_of(staged, place)
    ranked = []
    for i, until in _idle(staged, stage, node, after):
        into = min(until, len(dag) - 1)
        again = closure(dag, 1 << i, (staged.carried[into] & ~(1 << i)) | staged.runs[into])
        ranked.append((sum(dag.cost[v] for v in bits(again)) / dag.size[i], i, until))
    for _, i, until in sorted(ranked)[:_PROMISING]:
        carried = list(staged.carried)
        for t in range(min(stage + 1, until), until + 1):
            carried[t] &= ~(1 << i)
        yield complete(dag, carried)


def _stage_of(staged: Staged, place: int) -> tuple[int, int]:
    """(stage, node) of a place in the program."""
    for t, runs in enumerate(staged.runs):
        if place < runs.bit_count():
            return t, list(bits(runs))[place]
        place -= runs.bit_count()
    raise IndexError(place)


def _idle(staged: Staged, stage: int, node: int, after: bool) -> Iterator[tuple[int, int]]:
    """(output, the stage into which it need not be carried): live at this run, not read by it, and not required."""
    dag = staged.dag
    later = 0  # nodes that the rest of the stage reads
    for v in bits(staged.runs[stage] >> node + 1 << node + 1):
        later |= dag.reads[v]
    for i in bits(staged.carried[stage] | staged.runs[stage]):
        if i in dag.fixed or i == node or not dag.size[i] or (not after and dag.reads[node] >> i & 1):
            continue
        if later >> i & 1:
            if i > node and staged.carried[stage] >> i & 1:
                yield i, stage
        elif stage + 1 < len(dag) and staged.carried[stage + 1] >> i & 1:  # at the end, kept outputs are required
            until = stage + 1
            while until < len(dag) and not staged.reads[until] >> i & 1:
                until += 1
            yield i, until
