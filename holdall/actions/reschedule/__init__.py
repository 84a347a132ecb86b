"""Reschedule: run the ops of a block in an order of our own, some of them again in backward, each result freed at its last use.

The common deed of planners that decide op by op (Checkmate, Moccasin, Rockmate's menus): `forward` and `backward` list op
numbers within the block, the forward's ops first, then those of its backward. A number of a forward op that comes a second
time is a recomputation. Nobody lists frees: a value goes after its last use, and what backward reads before it is made again
was kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from holdall.errors import InvalidInput, Unsupported
from holdall.types import Action, Block, Choice, Facts, Kind, Op, Phase, Problem, Run, Save, Schedule, Step, Trace
from holdall.types.program import Effect, fault, lazily
from holdall.types.schedule import Kept
from holdall.types.trace import TensorId, digest_of

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness

_OFFERED = 8  # programs on the menus of planners


@dataclass(frozen=True, kw_only=True)
class Reschedule(Facts):
    block: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    ops: str  # digest of the names of the block's ops, so that no other block is run by these numbers
    wanted: tuple[int, ...] | None = None  # leaves of what it returns that get a gradient; None: all that can

    name: ClassVar[str] = "reschedule"
    exact: ClassVar[bool] = True
    alone: ClassVar[bool] = True  # no other action may treat the same block
    beside: ClassVar[frozenset[str]] = frozenset({"offload"})  # but for these: what a program keeps may wait elsewhere
    rank: ClassVar[int] = 5
    spares_activations: ClassVar[bool] = True
    permitted_by: ClassVar[frozenset[str]] = frozenset({"recompute"})  # the same by smaller pieces
    what: ClassVar[str] = "a block is run op by op, in an order of its own"

    @property
    def by_ops(self) -> tuple[str, ...]:
        return (self.block,)

    @staticmethod
    def of(trace: Trace, block: Block, backward: Sequence[int], forward: Sequence[int] = ()) -> Reschedule:
        """The action for a block of a trace; the forward as it is unless told otherwise."""
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
        """A block whose ops are all run again at once, and one whose ops are run again when they are needed."""
        return Reschedule.samples_of(trace, trace.blocks)

    @staticmethod
    def samples_of(trace: Trace, blocks: Sequence[Block]) -> list[Reschedule]:
        """The samples, of these blocks."""
        can = [b for b in blocks if b.saves and not obstacle(trace, b)]
        found = []
        for block, lazy in zip(can, (False, True), strict=False):
            ops, count = region(trace, block)
            order = lazily(effects(ops), count) if lazy else [*range(count), *range(count, len(ops))]
            found.append(Reschedule.of(trace, block, order))
        return found

    @classmethod
    def choices(cls, problem: Problem, block: Block) -> Iterable[Choice]:
        """A few of the programs that keep some results of a block and run the rest again op by op."""
        from holdall.actions.reschedule.op_graph import programs  # which makes actions of this class

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
        rewrite.walk(self.forward, block.first - 1)
        rewrite.walk_backward(self.backward)
        rewrite.schedule.programs[block.id] = Kept(rewrite.kept(self.backward), rewrite.begin)
        return rewrite.schedule

    def check(self, trace: Trace) -> None:
        """Raise if the block cannot be run by this program."""
        checked: set[Reschedule] = trace.__dict__.setdefault("_programs_checked", set())  # a search asks many times
        if self not in checked:
            block = trace.block(self.block)
            self._check(trace, block, *region(trace, block))
            checked.add(self)

    def _check(self, trace: Trace, block: Block, ops: Sequence[Op], count: int) -> None:
        why_not = obstacle(trace, block)
        if why_not:
            raise Unsupported(f"`{self.block}` cannot be run op by op: {why_not}", hint="keep, recompute or offload it whole")
        if digest_of([op.site.op for op in ops]) != self.ops:
            raise InvalidInput(f"`{self.block}` has other ops than this program was made for", hint="plan again")
        wrong = fault(effects(ops), count, self.forward, self.backward)
        if wrong:
            raise InvalidInput(f"the program of `{self.block}` is not one: {wrong}", hint="plan again")

    def install(self, harness: Harness) -> None:
        from holdall.runtime.programs.runner import Runner

        runner = Runner(self.block, self.forward, self.backward, self.ops, harness.note(), harness.compiler, wanted=self.wanted)
        harness.policy(self.block).runner = runner


def choice_of(block: Block, backward: tuple[int, ...]) -> Choice:
    """The choice to run a block with this backward."""
    count = block.last - block.first + 1
    again = sum(n < count for n in backward)
    label = f"recompute {again} of {count} ops"
    return Choice(label=label, make=program_for, given=(backward,), recomputes=True, by_program=True)


def program_for(trace: Trace, block: Block, backward: Sequence[int], forward: Sequence[int] = ()) -> tuple[Action]:
    """The block run by a program that was made for another of its kind; whole, where it turns out to differ."""
    from holdall.actions.recompute import Recompute  # whose segments may have programs in them

    ops, count = region(trace, block)
    if obstacle(trace, block) or fault(effects(ops), count, forward or range(count), backward):
        return (Recompute.of(trace, [block]),)
    return (Reschedule.of(trace, block, backward, forward),)


_UNFAKED = ("aten._grouped_mm.default",)  # in bfloat16 alone, although the real kernel takes more
_SUM = "aten.add.Tensor"  # how autograd adds up the gradients of a tensor that several have read
_RECURRENT = ("LSTM", "GRU", "RNN")


def region(trace: Trace, block: Block) -> tuple[list[Op], int]:
    """The ops of a block, forward then backward, and how many are the forward's.

    Without what autograd does with its gradients when it has handed them over.
    """
    ops = [*trace.ops[block.first : block.last + 1]]
    back = [op for op in trace.backward_of(block.module) if not op.accumulates and op.id not in block.beside]
    if not block.module and back and back[0].site.op == "aten.ones_like.default":
        back = back[1:]  # the gradient of the loss itself, which whoever calls backward makes
    return [*ops, *back], len(ops)


def is_recurrent(trace: Trace, block: Block) -> bool:
    """Whether a recurrent layer is in it. These choose their kernels below Python, and are never captured."""
    inside = trace.ops[block.first : block.last + 1]
    return block.kind in _RECURRENT or any("rnn" in op.site.op or "lstm" in op.site.op for op in inside)


def obstacle(trace: Trace, block: Block) -> str:
    """Why the ops of a block cannot be run one by one; empty if they can."""
    if block.nth or sum(b.module == block.module for b in trace.blocks) > 1:
        return "its module is called more than once"
    if not block.module and any(op.site.phase is Phase.FORWARD for op in trace.ops[block.last + 1 :]):
        return "the loss is computed outside of the model"
    if is_recurrent(trace, block):
        return "its recurrent kernels keep a workspace only under autograd"
    if any(op.site.op in _UNFAKED and op.dtype != "bfloat16" for op in trace.ops[block.first : block.last + 1]):
        return "torch cannot run one of its ops on fake tensors in this precision"
    if block.apart:
        return block.apart
    if block.odd:
        return f"it is called with a {block.odd}, which it may change"
    if block.name in trace.about.asked:
        return "it asks for a value, and what it does may depend on it"
    ops, count = region(trace, block)
    if len(ops) == count:
        return "it has no backward"
    own: set[TensorId] = set()
    for op in ops[:count]:
        own.update(op.writes)
        for x in op.mutates:
            if x not in own and trace.tensors[x].kind is not Kind.BUFFER:
                return f"`{op.site.op}` changes {trace.tensors[x].name} in place, which is not its own"
    if set(block.outputs) - own:
        return "it returns what it was given"
    later = (op for op in trace.ops[block.last + 1 :] if op.site.phase is Phase.FORWARD and op.mutates)
    if any(x in block.outputs for op in later for x in op.mutates):
        return "what it returns is changed in place outside of it"
    mine = {op.id for op in ops}
    known = {x for op in ops[:count] for x in (*op.reads, *op.writes)}
    given: set[TensorId] = set()  # gradients that the block's backward begins with
    for op in ops[count:]:
        made = {x: trace.tensors[x].born for x in op.reads if x not in known}
        foreign = {x for x, born in made.items() if born >= 0 and born not in mine}  # a head in pieces makes some in forward
        if op.site.op == _SUM and foreign - given:
            # autograd adds gradients in the order in which they come; a block that added up its own first would give other bits
            return "what it reads is read elsewhere too, and their gradients are added in turns"
        given |= foreign
    return ""


def made_outside(trace: Trace, block: Block, names: Sequence[str]) -> tuple[int, ...] | None:
    """The sums in the block's backward that are not its own, if `names` are those of its ops when it is run by itself.

    Where others read an input of the block too, autograd adds their gradients up; the sum seems to be the block's if that gave
    the last of them. None: the ops differ in more than such sums.
    """
    ops, count = region(trace, block)
    made = {x for op in ops for x in op.writes}
    read = {x for op in ops for x in op.reads}
    found: list[int] = []
    expected = list(names)
    for n, op in enumerate(ops):
        at = n - len(found)
        is_sum = n >= count and op.site.op == _SUM and not made.issuperset(op.reads) and not read.intersection(op.writes)
        rest = len(ops) - n - (len(expected) - at)  # ops that are too many from here on
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
    """The ops as `types.program` sees them."""
    return [Effect(op.reads, op.writes, op.mutates) for op in ops]


class ProgramRewrite:
    """The schedule side of one block that runs by a program.

    `ran`: how often its forward has run when its backward comes, and `now`: what the last of these runs made, by the tensor
    that was made first. Both are for blocks that are replayed.
    """

    def __init__(
        self, schedule: Schedule, trace: Trace, block: Block, *, now: Mapping[TensorId, TensorId] | None = None, ran: int = 0
    ) -> None:
        self.schedule = schedule
        self.trace = trace
        self.block = block
        self.ops, self.count = region(trace, block)
        self.begin = self.ops[self.count].id - 1  # its backward begins after this op
        self.now = dict(now or {})  # tensor -> its newest copy
        self.runs: dict[int, int] = dict.fromkeys(range(self.count), ran) if ran else {}  # op number -> how often it has run
        self.own = {x for op in self.ops[: self.count] for x in op.writes}

    def walk_backward(self, order: Sequence[int]) -> None:
        """The block's backward by the program."""
        self.walk(order, self.begin)
        self._hold_tangents()
        self._hold_handed_over()

    def release(self) -> None:
        """Neither autograd nor a Python frame of the block holds what it made; whoever is outside still does."""
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

    def walk(self, order: Sequence[int], at: int) -> None:
        """Originals stay where they are; what is run again goes right before the next original."""
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
        """What the backward reads before it has made it (again)."""
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
        copied = [x for x in op.mutates if x not in self.own]  # buffers have had their change: a copy is changed instead
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
        """Autograd hands the gradient of the block's result over for the whole of its backward, and takes those of its
        parameters when that is over."""
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
        """Gradients that autograd adds up or copies when the block has handed them over are all there until then."""
        last = self.ops[-1].id
        mine = {op.id for op in self.ops}
        for op in self.trace.backward_of(self.block.module):
            if op.id < last and op.id not in mine and (op.accumulates or op.id in self.block.beside):
                for x in op.reads:
                    if self.trace.tensors[x].born in mine:
                        self.schedule.hold(x, (last, 0))
