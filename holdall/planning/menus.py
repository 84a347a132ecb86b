"""The choices for each block, with the bytes, peaks and seconds of each.

The choices are those that the permitted actions offer (`Action.choices`). Each is simulated in a whole step on one block of
every kind, and compared with the untouched step; the difference is its line of the menu. So menus agree with the simulator to
the byte, and a stack of a hundred equal blocks costs as much as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdall.cost.launching import launching, starts
from holdall.errors import Unsupported
from holdall.registry import member_classes
from holdall.simulator.curve import MemoryCurve, memory_curve
from holdall.types import KEEP, Action, Block, Choice, Problem, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuLine:
    """A choice that was simulated. Bytes and seconds are relative to keeping the block."""

    choice: Choice
    freed: int  # bytes that it does not hold between the block's forward and backward
    forward: int  # peak bytes during its forward, above the live bytes before it
    backward: int  # the same for its backward; the live bytes include the block as if it were kept
    seconds: float = 0.0  # recomputation, on the device
    launching: float = 0.0  # seconds that it adds to the launching thread; 0 on a CPU
    out: int = 0  # bytes copied out after its forward
    back: int = 0  # bytes copied back before its backward
    slow: int = 0  # of `freed`, the bytes freed only after the next block's forward (late choices)

    @property
    def label(self) -> str:
        return self.choice.label

    @property
    def late(self) -> bool:
        return self.choice.late


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A block in the chain: its menu and the untouched step around it."""

    block: Block
    before_forward: int  # live bytes before its forward in the untouched step
    before_backward: int
    forward_seconds: float
    backward_seconds: float
    forward_launching: float  # seconds of the launching thread; 0 on a CPU
    backward_launching: float
    choices: tuple[MenuLine, ...]  # the first one keeps it


Windows = dict[int, tuple[tuple[int, int], tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Menus:
    """The lines for every kind of block; `items` combines them with a step under some placement of states."""

    chain: tuple[Block, ...]
    windows: Windows
    found: dict[int, tuple[MenuLine, ...]]  # kind of block -> its lines
    curves: dict[tuple[Action, ...], MemoryCurve] = field(default_factory=dict)  # of steps with some other actions

    def items(self, problem: Problem, around: Sequence[Action] = (), *, without: Collection[str] = ()) -> tuple[Item, ...]:
        """The chain of blocks in a step with the actions `around`. `without`: tiers that receive nothing."""
        trace = problem.trace
        key = tuple(around)
        if key not in self.curves:
            self.curves[key] = memory_curve(problem, around)
        plain = self.curves[key]
        each = launching(problem.hardware)
        asked = starts(trace) if each else [0.0] * len(trace.ops)
        items = []
        for block in self.chain:
            ahead, behind = self.windows[block.id]
            kept = MenuLine(
                choice=KEEP,
                freed=0,
                forward=max(plain.high[k] for k in range(*ahead)) - plain.before[ahead[0]],
                backward=max((plain.high[k] for k in range(*behind)), default=0) - plain.before[behind[0]],
            )
            others = [c for c in self.found.get(kind_of(block), ()) if not (c.choice.moves and c.choice.tier in without)]
            items.append(
                Item(
                    block=block,
                    before_forward=plain.before[ahead[0]],
                    before_backward=plain.before[behind[0]],
                    forward_seconds=sum(trace.ops[k].seconds for k in range(*ahead)),
                    backward_seconds=sum(trace.ops[k].seconds for k in range(*behind)),
                    forward_launching=each * sum(asked[slice(*ahead)]),
                    backward_launching=each * sum(asked[slice(*behind)]),
                    choices=(kept, *_worthwhile(others)),
                )
            )
        if self.chain:  # from the end of the last block to the first backward: no decision, but freed bytes count
            begin, end = self.chain[-1].last + 1, min(b for _, (b, _) in self.windows.values())
            if begin < end:
                high = max(plain.high[begin:end]) - plain.before[begin]
                items.append(
                    Item(
                        block=self.chain[-1],
                        before_forward=plain.before[begin],
                        before_backward=0,
                        forward_seconds=sum(trace.ops[k].seconds for k in range(begin, end)),
                        backward_seconds=0.0,
                        forward_launching=each * sum(asked[begin:end]),
                        backward_launching=0.0,
                        choices=(MenuLine(choice=KEEP, freed=0, forward=high, backward=0),),
                    )
                )
        return tuple(items)


def offered(problem: Problem, block: Block) -> list[Choice]:
    """The choices of the permitted actions for a block, in the order of menus."""
    permitted = [action for action in member_classes("actions") if problem.permits(action)]
    return sorted((choice for action in permitted for choice in action.choices(problem, block)), key=order_of)


def order_of(choice: Choice) -> tuple[bool, ...]:
    """The order of menus: exact choices first, those that recompute the whole block before those that recompute some of its
    ops, and those before the ones that only move bytes."""
    return not choice.exact, not choice.recomputes, choice.by_program, choice.moves, not choice.late


def try_offered(problem: Problem) -> Menus:
    """Simulate every offered choice on one block of every kind."""
    return try_choices(problem, {b.id: offered(problem, b) for b in _chain(problem.trace) if b.same_as is None})


def _chain(trace: Trace) -> list[Block]:
    return [b for b in trace.blocks if b.backward is not None and b.saves]


def try_choices(problem: Problem, choices: Mapping[int, Sequence[Choice]]) -> Menus:
    """Simulate these choices on one block of every kind (a kind is the number of its first block)."""
    trace = problem.trace
    chain = _chain(trace)
    plain = memory_curve(problem, [])
    windows = _windows(trace, chain)
    found: dict[int, list[MenuLine]] = {b: [] for b in choices}
    examples = {b: _example(chain, b) for b in choices}
    rounds = max((len(v) for v in choices.values()), default=0)
    for n in range(rounds):
        for parity in (0, 1):  # neighbours are simulated separately: a late choice affects the next block
            group = [b for k, b in enumerate(choices) if k % 2 == parity and n < len(choices[b])]
            if not group:
                continue
            for b, curve in _tried(problem, {b: choices[b][n].on(trace, examples[b]) for b in group}):
                found[b].append(_compare(choices[b][n], examples[b], windows, plain, curve, launching(problem.hardware)))
        problem.progress("menus", n + 1, rounds, "")
    return Menus(chain=tuple(chain), windows=windows, found={b: tuple(c) for b, c in found.items()})


def _tried(problem: Problem, actions: Mapping[int, Sequence[Action]]) -> Iterator[tuple[int, MemoryCurve]]:
    """The step with these actions on several blocks at once; if some cannot be carried out, one by one without those."""
    try:
        curve = memory_curve(problem, [a for some in actions.values() for a in some])
    except Unsupported:
        for block, some in actions.items():
            if len(actions) > 1:
                yield from _tried(problem, {block: some})
    else:
        yield from ((block, curve) for block in actions)


def make_menus(problem: Problem) -> tuple[Item, ...]:
    """The chain of blocks that save tensors for backward, each with its menu."""
    return try_offered(problem).items(problem)


def _windows(trace: Trace, chain: Sequence[Block]) -> Windows:
    """For every block the ops [from, to) of its forward and of its backward, each up to where the next one begins."""
    backwards = sorted({(b.backward or 0) + 1 for b in chain})
    step = next((op.id for op in trace.ops if op.site.phase.value == "step"), len(trace.ops))
    found = {}
    for n, block in enumerate(chain):
        until = chain[n + 1].first if n + 1 < len(chain) else block.last + 1
        begin = (block.backward or 0) + 1
        end = next((k for k in backwards if k > begin), step)
        found[block.id] = ((block.first, max(until, block.last + 1)), (begin, max(end, begin + 1)))
    return found


def _example(chain: Sequence[Block], kind: int) -> Block:
    """The block of this kind to simulate: the second if there is one, since the first may have other surroundings."""
    alike = [b for b in chain if kind in (b.id, b.same_as)]
    return alike[1] if len(alike) > 2 else alike[0]


def kind_of(block: Block) -> int:
    """Equal for blocks that are copies of each other."""
    return block.id if block.same_as is None else block.same_as


def _compare(choice: Choice, block: Block, windows: Windows, plain: MemoryCurve, curve: MemoryCurve, launch: float) -> MenuLine:
    """The menu line of a choice that was simulated on a block. `launch`: seconds of a launch."""
    f, b = windows[block.id]
    changed_before = plain.before[f[0]] - curve.before[f[0]]
    after = f[1]
    if choice.late:  # freed when the next block's forward is over
        following = [w for w in windows.values() if w[0][0] >= f[1]]
        after = min((w[0][1] for w in following), default=f[1])
    after = min(after, len(plain.before) - 1)
    freed = (plain.before[after] - curve.before[after]) - changed_before
    at_once = (plain.before[f[1]] - curve.before[f[1]]) - changed_before
    copied_out = sum(curve.out[f[0] : after + 1]) if choice.moves else 0
    launches = sum(curve.launches[k] for k in (*range(*f), *range(*b)))
    launches += 2 * sum(curve.copying[f[0] : after + 1]) if choice.moves else 0.0
    return MenuLine(
        choice=choice,
        freed=freed,
        forward=max(curve.high[k] for k in range(*f)) - curve.before[f[0]],
        backward=max(curve.high[k] for k in range(*b)) + changed_before - plain.before[b[0]],
        seconds=sum(curve.seconds[k] for k in (*range(*f), *range(*b))),
        launching=launch * launches,
        out=copied_out,
        back=copied_out,
        slow=max(0, freed - at_once) if choice.late else 0,
    )


def _worthwhile(lines: Iterable[MenuLine]) -> list[MenuLine]:
    """The lines that free something and that no other line dominates."""
    useful = [c for c in lines if c.freed > 0]
    preferred = {id(c): (*_preference(c.choice), -n) for n, c in enumerate(useful)}
    kept: list[MenuLine] = []
    for c in useful:
        beaten = any(
            o is not c
            and o.freed >= c.freed
            and o.forward <= c.forward
            and o.backward <= c.backward
            and o.seconds <= c.seconds
            and o.launching <= c.launching
            and o.out <= c.out
            and (o.late == c.late or not o.out)  # at once takes less memory, but nothing hides its copies
            and (o.choice.tier == c.choice.tier or not o.out)  # one tier may have room while another is full
            and (o.freed, -o.seconds, -o.out, preferred[id(o)]) > (c.freed, -c.seconds, -c.out, preferred[id(c)])
            for o in useful
        )
        if not beaten:
            kept.append(c)
    return kept


def _preference(choice: Choice) -> tuple[bool, ...]:
    """Of two equal lines, the larger preference wins."""
    return choice.exact, choice.recomputes, not choice.by_program, choice.moves, not choice.late
