"""Reschedule: run the ops of a block in a planned order, some of them again in backward; free each result at its last use.

The action of planners that decide op by op (Checkmate, Moccasin, Rockmate's menus): `forward` and `backward` list op numbers
within the block, the forward's ops first, then those of its backward. A forward op that is listed a second time is recomputed.
Frees are not listed: a value is freed after its last use, and a value that backward reads before it is recomputed was kept
from the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.actions.reschedule.gathered import now_gathered, sharded_obstacle
from holdall.errors import InvalidInput, Unsupported
from holdall.types import Action, Block, Choice, Facts, Kind, Op, Phase, Problem, Run, Save, Schedule, Step, Trace
from holdall.types.program import Effect, fault, lazily
from holdall.types.schedule import Kept
from holdall.types.trace import TensorId, digest_of

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness
    from holdall.runtime.programs.runner import Runner

_OFFERED = 8  # programs that planners may choose


@dataclass(frozen=True, kw_only=True)
class Reschedule(Facts):
    block: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    ops: str  # digest of the names of the block's ops, to refuse any other block
    wanted: tuple[int, ...] | None = None  # leaves of its output that get a gradient; None: all that can

    name: ClassVar[str] = "reschedule"
    exact: ClassVar[bool] = True
    on_shards: ClassVar[bool] = True
    only_by_fit: ClassVar[bool] = True
    alone: ClassVar[bool] = True  # no other action may treat the same block
    beside: ClassVar[frozenset[str]] = frozenset({"offload", "offload_share", "layer_swap"})  # tensors that it keeps may leave
    rank: ClassVar[int] = 5
    spares_activations: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({"recompute"})  # it is recomputation of smaller pieces
    what: ClassVar[str] = "a block runs op by op, in a planned order"

    @property
    def by_ops(self) -> tuple[str, ...]:
        return (self.block,)

    @staticmethod
    def of(trace: Trace, block: Block, backward: Sequence[int], forward: Sequence[int] = ()) -> Reschedule:
        """The action for a block of a trace. `forward`: the traced order unless given."""
        ops, count = region(trace, block)
        return Reschedule(
            block=block.name,
            forward=tuple(forward) or tuple(range(count)),
            backward=tuple(backward),
            ops=digest_of([op.site.op for op in ops]),
            wanted=block.wanted,
        )

    @staticmethod
    def samples(trace: Trace) -> list[Reschedule]:
        """A block whose ops are recomputed all at once, and one whose ops are recomputed when needed."""
        return Reschedule.samples_of(trace, trace.blocks)

    @staticmethod
    def samples_of(trace: Trace, blocks: Sequence[Block]) -> list[Reschedule]:
        """The samples for these blocks."""
        can = [b for b in blocks if b.saves and not obstacle(trace, b)]
        found = []
        for block, lazy in zip(can, (False, True), strict=False):
            ops, count = region(trace, block)
            order = lazily(effects(ops), count) if lazy else [*range(count), *range(count, len(ops))]
            found.append(Reschedule.of(trace, block, order))
        return found

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        """A few programs that keep some results of a block and recompute the rest op by op."""
        from holdall.actions.reschedule.op_graph import programs  # it imports this class

        trace = problem.trace
        is_free = all(op.seconds == 0 for op in trace.ops[block.first : block.last + 1])
        if is_free or obstacle(trace, block):
            return
        yield from (choice_of(block, order) for order in programs(trace, block, most=_OFFERED))

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        trace = problem.trace
        block = trace.block(self.block)
        self.check(trace)
        rewrite = ProgramRewrite(schedule.copy(), trace, block)
        rewrite.release()
        if len(self.forward) == rewrite.count:
            rewrite.permute(self.forward)
        else:
            rewrite.walk(self.forward, block.first - 1)
        rewrite.walk_backward(self.backward)
        rewrite.schedule.programs[block.id] = Kept(rewrite.kept(self.backward), rewrite.begin)
        return rewrite.schedule

    def check(self, trace: Trace) -> None:
        """Raise if the block cannot be run by this program."""
        checked: set[Reschedule] = trace.__dict__.setdefault(
            "_programs_checked", set()
        )  # cached: a search checks the same action many times
        if self not in checked:
            block = trace.block(self.block)
            self._check(trace, block, *region(trace, block))
            checked.add(self)

    def _check(self, trace: Trace, block: Block, ops: Sequence[Op], count: int) -> None:
        why_not = obstacle(trace, block)
        if why_not:
            raise Unsupported(
                f"`{self.block}` cannot be run op by op: {why_not}", hint='plan the block with "keep", "recompute" or "offload"'
            )
        if digest_of([op.site.op for op in ops]) != self.ops:
            raise InvalidInput(
                f"the program of `{self.block}` was made for other ops", hint="plan again: holdall.plan(trace, ...)"
            )
        wrong = fault(effects(ops), count, self.forward, self.backward)
        if wrong:
            raise InvalidInput(
                f"the program of `{self.block}` cannot run: {wrong}", hint="plan again: holdall.plan(trace, ...)"
            )

    def install(self, harness: Harness) -> None:
        harness.policy(self.block).runner = self.runner(harness)

    def runner(self, harness: Harness, rows: Mapping[int, int] | None = None) -> Runner:
        """Runs the block. `rows`: of recomputed products, by number, the first rows that come from another tier."""
        from holdall.runtime.programs.runner import Runner

        note, compiler = harness.note(), harness.compiler
        return Runner(self.block, self.forward, self.backward, self.ops, note, compiler, wanted=self.wanted, rows=rows)


def choice_of(block: Block, backward: tuple[int, ...]) -> Choice:
    """The choice to run a block with this backward."""
    count = block.last - block.first + 1
    again = sum(n < count for n in backward)
    label = f"recompute {again} of {count} ops"
    return Choice(label=label, make=program_for, given=(backward,), recomputes=True, by_program=True)


def program_for(trace: Trace, block: Block, backward: Sequence[int], forward: Sequence[int] = ()) -> tuple[Action]:
    """Apply a program made for another block of the same kind; recompute the block as a whole if its ops differ."""
    from holdall.actions.recompute import Recompute  # its segments may contain programs

    ops, count = region(trace, block)
    if obstacle(trace, block) or fault(effects(ops), count, forward or range(count), backward):
        return (Recompute.of(trace, [block]),)
    return (Reschedule.of(trace, block, backward, forward),)


_UNFAKED = ("aten._grouped_mm.default",)  # fake tensors accept bfloat16 only, the real kernel more
_SUM = "aten.add.Tensor"  # the op by which autograd sums the gradients of a tensor with several readers
_RECURRENT = ("LSTM", "GRU", "RNN")


def region(trace: Trace, block: Block) -> tuple[list[Op], int]:
    """The ops of a block, forward then backward, and the number of forward ops.

    Ops that autograd runs on its gradients after the block's backward are left out.
    """
    ops = [*trace.ops[block.first : block.last + 1]]
    back = [op for op in trace.backward_of(block.module) if not op.accumulates and op.id not in block.beside]
    if not block.module and back and back[0].site.op == "aten.ones_like.default":
        back = back[1:]  # the gradient of the loss itself, made by the caller of backward
    return [*ops, *back], len(ops)


def is_recurrent(trace: Trace, block: Block) -> bool:
    """Does it contain a recurrent layer? These choose their kernels below Python, and are never captured."""
    inside = trace.ops[block.first : block.last + 1]
    return block.kind in _RECURRENT or any("rnn" in op.site.op or "lstm" in op.site.op for op in inside)


def obstacle(trace: Trace, block: Block) -> str:
    """Why the block cannot run op by op; empty if it can."""
    if block.nth or sum(b.module == block.module for b in trace.blocks) > 1:
        return "its module is called more than once"
    if not block.module and any(op.site.phase is Phase.FORWARD for op in trace.ops[block.last + 1 :]):
        return "the loss is computed outside of the model"
    if is_recurrent(trace, block):
        return "its recurrent kernels keep a workspace only under autograd"
    if any(op.site.op in _UNFAKED and op.dtype != "bfloat16" for op in trace.ops[block.first : block.last + 1]):
        return "torch cannot run one of its ops on fake tensors in this precision"
    if block.apart or sharded_obstacle(trace, block):
        return block.apart or sharded_obstacle(trace, block)
    if block.odd:
        return f"it is called with a {block.odd}, which it may change"
    if block.name in trace.about.asked:
        return "it reads a tensor's value in Python, so its ops may depend on data"
    ops, count = region(trace, block)
    if len(ops) == count:
        return "it has no backward"
    own: set[TensorId] = set()
    for op in ops[:count]:
        own.update(op.writes)
        for x in op.mutates:
            if x not in own and block.spoils(trace.tensors[x]):
                return f"`{op.site.op}` changes {trace.tensors[x].name} in place, which it did not make"
    if set(block.outputs) - own:
        return "it returns one of its inputs"
    later = (op for op in trace.ops[block.last + 1 :] if op.site.phase is Phase.FORWARD and op.mutates)
    if any(x in block.outputs for op in later for x in op.mutates):
        return "its output is changed in place outside of it"
    mine = {op.id for op in ops}
    known = {x for op in ops[:count] for x in (*op.reads, *op.writes)}
    given: set[TensorId] = set()  # gradients at the start of the block's backward
    for op in ops[count:]:
        made = {x: trace.tensors[x].born for x in op.reads if x not in known}
        foreign = {x for x, born in made.items() if born >= 0 and born not in mine}  # a chunked head makes some in forward
        if op.site.op == _SUM and foreign - given:
            # autograd adds gradients in order of arrival; a block that summed its own first would give other bits
            return "others read its input too, and autograd interleaves the sums of their gradients"
        given |= foreign
    return ""


def made_outside(trace: Trace, block: Block, names: Sequence[str]) -> tuple[int, ...] | None:
    """Sums in the block's backward that belong to others, if `names` are the names of its ops when it runs alone.

    If others read an input of the block too, autograd sums their gradients; the trace gives the sum to the block if its
    gradient came last. None: the ops differ in more than such sums.
    """
    ops, count = region(trace, block)
    made = {x for op in ops for x in op.writes}
    read = {x for op in ops for x in op.reads}
    found: list[int] = []
    expected = list(names)
    for n, op in enumerate(ops):
        at = n - len(found)
        is_sum = n >= count and op.site.op == _SUM and not made.issuperset(op.reads) and not read.intersection(op.writes)
        rest = len(ops) - n - (len(expected) - at)  # surplus ops from here on
        if is_sum and rest > 0 and [o.site.op for o in ops[n + 1 : n + 3]] != expected[at + 1 : at + 3]:
            found.append(op.id)
        elif at >= len(expected) or op.site.op != expected[at]:
            if not is_sum:
                return None
            found.append(op.id)
    return tuple(found) if len(ops) - len(found) == len(expected) else None


def _is_gradient_from_elsewhere(trace: Trace, x: TensorId, mine: set[int]) -> bool:
    born = trace.tensors[x].born
    return born >= 0 and born not in mine and trace.ops[born].site.phase is Phase.BACKWARD


def effects(ops: Sequence[Op]) -> list[Effect]:
    """The ops in the form of `types.program`."""
    return [Effect(op.reads, op.writes, op.mutates) for op in ops]


class ProgramRewrite:
    """The schedule side of one block that runs by a program.

    For blocks that are replayed, `ran`: how often the forward has run before the backward; `now`: tensors of the last of these
    runs, by their originals.
    """

    def __init__(
        self, schedule: Schedule, trace: Trace, block: Block, *, now: Mapping[TensorId, TensorId] | None = None, ran: int = 0
    ) -> None:
        self.schedule = schedule
        self.trace = trace
        self.block = block
        self.ops, self.count = region(trace, block)
        self.begin = self.ops[self.count].id - 1  # the block's backward begins after this op
        self.now = dict(now or {})  # tensor -> its newest copy
        self.runs: dict[int, int] = dict.fromkeys(range(self.count), ran) if ran else {}  # op number -> number of runs
        self.own = {x for op in self.ops[: self.count] for x in op.writes}

    def walk_backward(self, order: Sequence[int]) -> None:
        """The block's backward by the program."""
        self.now = {**now_gathered(self.trace, [self.block], self.begin), **self.now}
        self.walk(order, self.begin)
        self._hold_tangents()
        self._hold_handed_over()

    def release(self) -> None:
        """Release what autograd and the block's Python frame held; references from outside remain."""
        saves: dict[TensorId, list[Save]] = {}
        for i in set(self.block.saves):
            save = self.trace.saves[i]
            saves.setdefault(save.tensor, []).append(save)
        for x, own in saves.items():
            self.schedule.unhold(x, own)
        here = {id(s) for own in saves.values() for s in own}
        for x in self.own - set(self.block.outputs):
            if all(id(s) in here for s in self.trace.saves_of(x)):
                self.schedule.holds[x] = []
        inside = {op.id for op in self.ops}
        for op in self.ops[self.count :]:
            for x in op.writes:
                if self.trace.tensors[x].kind is not Kind.GRAD and set(self.trace.uses(x)) <= inside:
                    self.schedule.holds[x] = []

    def permute(self, order: Sequence[int]) -> None:
        """The ops of the forward once each, in this order: each takes the place of the one that it stands for."""
        runs = [self._run(n) for n in order]  # before any has moved
        for op, run in zip(self.ops, runs, strict=False):
            if run is not self.schedule.run(op.id):
                self.schedule.runs[op.id] = run

    def walk(self, order: Sequence[int], at: int) -> None:
        """Original runs stay in place; recomputed ops go right before the next original."""
        waiting: list[Step] = []
        for n in order:
            run = self._run(n)
            if run.again:
                waiting.append(run)
                continue
            at = self.ops[n].id
            if waiting:
                self.schedule.insert(at - 1, waiting)
                waiting = []
            if run is not self.schedule.run(at):
                self.schedule.runs[at] = run
        assert not waiting, "a program ends with the last op of its half"

    def kept(self, backward: Sequence[int]) -> frozenset[TensorId]:
        """Tensors that the backward reads before it has recomputed them."""
        made: set[TensorId] = set()
        needed: set[TensorId] = set()
        for n in backward:
            op = self.ops[n]
            needed.update(x for x in (*op.reads, *op.mutates) if x not in made)
            made.update(op.writes)
        return frozenset(needed)

    def _run(self, n: int) -> Run:
        op = self.ops[n]
        again = self.runs.get(n, 0)
        self.runs[n] = again + 1
        now = self.now
        reads, mutates = op.reads, op.mutates
        if now:
            reads = tuple([now.get(x, x) for x in reads])
            mutates = tuple([now.get(x, x) for x in mutates])
        if not again:
            base = self.schedule.run(op.id)
            is_same = reads == base.reads and mutates == base.mutates
            return base if is_same else replace(base, reads=reads, mutates=mutates)
        copied = [x for x in op.mutates if x not in self.own]  # buffers were already changed: change a copy instead
        for x in op.writes:
            now[x] = self.schedule.add(self.trace.tensors[x])
        return Run(
            op=op.id,
            reads=(*reads, *copied),
            writes=tuple(now[x] for x in op.writes),
            mutates=tuple(x for x, was in zip(mutates, op.mutates, strict=True) if was in self.own),
            seconds=op.seconds,
            workspace=op.workspace + sum(self.trace.tensors[x].nbytes for x in copied),
            again=again,
            name=op.site.op,
        )

    def _hold_tangents(self) -> None:
        """Hold the gradient of the block's output during its whole backward, as autograd does, and those of its parameters
        until its end."""
        mine = {op.id for op in self.ops}
        last = self.ops[-1].id
        for op in self.ops[self.count :]:
            for x in op.reads:
                if _is_gradient_from_elsewhere(self.trace, x, mine):
                    self.schedule.hold(x, (last, 0))
            for x in op.writes:
                if self.trace.tensors[x].kind is Kind.GRAD:
                    self.schedule.hold(x, (last, 0))

    def _hold_handed_over(self) -> None:
        """Gradients that autograd sums or copies after the block's backward are all held until its end."""
        last = self.ops[-1].id
        mine = {op.id for op in self.ops}
        for op in self.trace.backward_of(self.block.module):
            if op.id < last and op.id not in mine and (op.accumulates or op.id in self.block.beside):
                for x in op.reads:
                    if self.trace.tensors[x].born in mine:
                        self.schedule.hold(x, (last, 0))
