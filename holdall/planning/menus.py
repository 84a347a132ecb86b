"""What can be done with each block, and what each choice holds, peaks at and costs.

Where copies overlap with computation, offloading comes in two forms: hidden by the next block, which needs room for both, or
at once ("now").

A choice is tried on one block of every kind in a whole simulated step, beside the untouched step; the difference is its
entry. So menus follow the simulator, to the byte, and a stack of a hundred equal blocks costs as much as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdall.actions.compress import Compress, codable
from holdall.actions.offload import Offload
from holdall.actions.recompute import Recompute, obstacle
from holdall.actions.reschedule import Reschedule, effects, region
from holdall.actions.reschedule import obstacle as op_obstacle
from holdall.errors import Unsupported
from holdall.planning.op_graph import programs
from holdall.simulator.curve import Curve, memory_curve
from holdall.types import Action, Block, Problem, Trace
from holdall.types.program import fault

_BITS = (8, 4)  # of compressed activations, where the user agreed to them
_PROGRAMS = 8  # on a menu, of those that run ops again one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One line of a block's menu. Bytes and seconds are relative to keeping the block."""

    label: str
    freed: int  # bytes it does not hold between its forward and its backward
    forward: int  # highest bytes during its forward, above what was live before it
    backward: int  # the same for its backward; what was live includes the block as if it were kept
    seconds: float = 0.0  # recomputation
    out: int = 0  # bytes copied out after its forward
    back: int = 0  # bytes copied back before its backward
    slow: int = 0  # of `freed`, the bytes that go only after the next block's forward (late choices)
    late: bool = False  # the memory is free only after the next block's forward, and taken before its backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A block in the chain: its menu and the untouched step around it."""

    block: Block
    before_forward: int  # live bytes before its forward in the untouched step
    before_backward: int
    forward_seconds: float
    backward_seconds: float
    choices: tuple[Choice, ...]


def actions_for(problem: Problem, block: Block, label: str) -> list[Action]:
    """The actions that a choice stands for."""
    trace = problem.trace
    overlap = problem.hardware.overlap
    name, _, order = label.partition(":")
    if name == "compress":
        return [Compress.of(trace, block, bits=int(order))]
    if name == "program":
        return [program_for(trace, block, tuple(int(n) for n in order.split(",")))]
    actions: list[Action] = []
    if "recompute" in name:
        actions.append(Recompute.of(trace, [block]))
    if "offload" in name:
        actions.append(Offload.of(trace, block, overlap=overlap and not name.endswith("now")))
    return actions


Windows = dict[int, tuple[tuple[int, int], tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Menus:
    """What was tried on every kind of block; `items` sets it into the step as it is under some placement of states."""

    chain: tuple[Block, ...]
    windows: Windows
    found: dict[int, tuple[Choice, ...]]  # kind of block -> its choices
    curves: dict[tuple[Action, ...], Curve] = field(default_factory=dict)  # of steps with some actions around

    def items(self, problem: Problem, around: Sequence[Action] = (), *, without: str = "") -> tuple[Item, ...]:
        """The chain of blocks in a step with the actions `around`. `without`: choices with this word are left out."""
        trace = problem.trace
        key = tuple(around)
        if key not in self.curves:
            self.curves[key] = memory_curve(problem, around)
        plain = self.curves[key]
        items = []
        for block in self.chain:
            ahead, behind = self.windows[block.id]
            kept = Choice(
                label="keep",
                freed=0,
                forward=max(plain.high[k] for k in range(*ahead)) - plain.before[ahead[0]],
                backward=max((plain.high[k] for k in range(*behind)), default=0) - plain.before[behind[0]],
            )
            others = [c for c in self.found.get(kind_of(block), ()) if not without or without not in c.label]
            items.append(
                Item(
                    block=block,
                    before_forward=plain.before[ahead[0]],
                    before_backward=plain.before[behind[0]],
                    forward_seconds=sum(trace.ops[k].seconds for k in range(*ahead)),
                    backward_seconds=sum(trace.ops[k].seconds for k in range(*behind)),
                    choices=(kept, *_worthwhile(others)),
                )
            )
        if self.chain:  # from the end of the last block to the first backward: nothing to decide, but what is freed counts
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
                        choices=(Choice(label="keep", freed=0, forward=high, backward=0),),
                    )
                )
        return tuple(items)


def try_choices(problem: Problem) -> Menus:
    """Try every choice on one block of every kind."""
    chain = _chain(problem.trace)
    return try_labels(problem, {b.id: _labels(problem, b, last=b is chain[-1]) for b in chain if b.same_as is None})


def _chain(trace: Trace) -> list[Block]:
    return [b for b in trace.blocks if b.backward is not None and b.saves]


def try_labels(problem: Problem, labels: Mapping[int, Sequence[str]]) -> Menus:
    """Try these choices on one block of every kind (a kind is the number of its first block)."""
    trace = problem.trace
    chain = _chain(trace)
    plain = memory_curve(problem, [])
    windows = _windows(trace, chain)
    found: dict[int, list[Choice]] = {b: [] for b in labels}
    examples = {b: _example(chain, b) for b in labels}
    rounds = max((len(v) for v in labels.values()), default=0)
    for n in range(rounds):
        for parity in (0, 1):  # neighbours are tried apart: a late choice reaches into the next block
            group = [b for k, b in enumerate(labels) if k % 2 == parity and n < len(labels[b])]
            if not group:
                continue
            for b, curve in _tried(problem, {b: actions_for(problem, examples[b], labels[b][n]) for b in group}):
                found[b].append(_compare(labels[b][n], examples[b], windows, plain, curve, problem))
        problem.progress("menus", n + 1, rounds, "")
    return Menus(chain=tuple(chain), windows=windows, found={b: tuple(c) for b, c in found.items()})


def _tried(problem: Problem, actions: Mapping[int, Sequence[Action]]) -> Iterator[tuple[int, Curve]]:
    """The step with these actions on several blocks at once; one by one, without those that cannot be carried out, if some
    cannot."""
    try:
        curve = memory_curve(problem, [a for some in actions.values() for a in some])
    except Unsupported:
        for block, some in actions.items():
            if len(actions) > 1:
                yield from _tried(problem, {block: some})
    else:
        yield from ((block, curve) for block in actions)


def make_menus(problem: Problem) -> tuple[Item, ...]:
    """The chain of blocks that hold something for backward, each with its menu."""
    return try_choices(problem).items(problem)


def _windows(trace: Trace, chain: Sequence[Block]) -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
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
    """A block of this kind to try things on: the second if there is one, since the first may differ in what surrounds it."""
    alike = [b for b in chain if kind in (b.id, b.same_as)]
    return alike[1] if len(alike) > 2 else alike[0]


def _labels(problem: Problem, block: Block, *, last: bool) -> list[str]:
    """The choices worth trying on a block."""
    can_recompute = "recompute" in problem.allow and not obstacle(problem.trace, [block])
    can_offload = "offload" in problem.allow and problem.hardware.far is not None
    labels = []
    if can_recompute:
        labels.append("recompute")
        if can_offload:
            labels += ["recompute + offload", *(["recompute + offload now"] if problem.hardware.overlap else [])]
        labels += _programs(problem.trace, block)
    if can_offload and not (last and problem.hardware.overlap):
        labels += ["offload", *(["offload now"] if problem.hardware.overlap else [])]
    if "compress" in problem.allow and codable(problem.trace, block):  # by consent: gradients are approximate
        labels += [f"compress:{bits}" for bits in _BITS]
    return labels


def _programs(trace: Trace, block: Block) -> list[str]:
    """Labels of a few of the programs that keep some results of a block and run the rest again op by op."""
    if op_obstacle(trace, block) or all(op.seconds == 0 for op in trace.ops[block.first : block.last + 1]):
        return []
    return ["program:" + ",".join(str(n) for n in order) for order in programs(trace, block, most=_PROGRAMS)]


def program_for(trace: Trace, block: Block, backward: Sequence[int], forward: Sequence[int] = ()) -> Action:
    """The block run by a program that was made for another of its kind; whole, where it turns out to differ."""
    ops, count = region(trace, block)
    if op_obstacle(trace, block) or fault(effects(ops), count, forward or range(count), backward):
        return Recompute.of(trace, [block])
    return Reschedule.of(trace, block, backward, forward)


def kind_of(block: Block) -> int:
    """Equal for blocks that repeat each other."""
    return block.id if block.same_as is None else block.same_as


def _compare(
    label: str,
    block: Block,
    windows: dict[int, tuple[tuple[int, int], tuple[int, int]]],
    plain: Curve,
    curve: Curve,
    problem: Problem,
) -> Choice:
    """The entry of a choice that was tried on a block."""
    f, b = windows[block.id]
    late = "offload" in label and problem.hardware.overlap and not label.endswith("now")
    changed_before = plain.before[f[0]] - curve.before[f[0]]
    after = f[1]
    if late:  # let go when the next block's forward is over
        following = [w for w in windows.values() if w[0][0] >= f[1]]
        after = min((w[0][1] for w in following), default=f[1])
    after = min(after, len(plain.before) - 1)
    freed = (plain.before[after] - curve.before[after]) - changed_before
    at_once = (plain.before[f[1]] - curve.before[f[1]]) - changed_before
    copied_out = _between(curve.out, f[0], after + 1) if "offload" in label else 0
    return Choice(
        label=label,
        freed=freed,
        forward=max(curve.high[k] for k in range(*f)) - curve.before[f[0]],
        backward=max(curve.high[k] for k in range(*b)) + changed_before - plain.before[b[0]],
        seconds=sum(curve.seconds[k] for k in (*range(*f), *range(*b))),
        out=copied_out,
        back=copied_out,
        slow=max(0, freed - at_once) if late else 0,
        late=late,
    )


def _between(values: list[int], start: int, end: int) -> int:
    return sum(values[start:end])


def _worthwhile(choices: Iterable[Choice]) -> list[Choice]:
    """Without what frees nothing, and without what another choice beats in everything."""
    kept: list[Choice] = []
    useful = [c for c in choices if c.freed > 0]
    for c in useful:
        beaten = any(
            o is not c
            and o.freed >= c.freed
            and o.forward <= c.forward
            and o.backward <= c.backward
            and o.seconds <= c.seconds
            and o.out <= c.out
            and (o.late == c.late or not o.out)  # at once is smaller, but nothing hides its copies
            and (o.freed, -o.seconds, -o.out, o.label) > (c.freed, -c.seconds, -c.out, c.label)
            for o in useful
        )
        if not beaten:
            kept.append(c)
    return kept
