"""A training step as a list of five primitives: Run, Copy, Collect, Drop, Wait.

`Schedule` is what actions rewrite. It keeps the trace's ops in their order and lists, for every op, what was put after it;
so a rewrite costs what it changes and not the length of the step. Frees are not written by anyone: each tensor lists the
moments until which something refers to it (`holds`), and the simulator derives one Drop per stay in a memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdall.types.trace import Bytes, OpId, Save, Seconds, TensorId, TensorInfo, Trace, once_per_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Execute an op. `again` > 0: a recomputation, its n-th."""

    op: OpId  # -1: an op that is not in the trace (a codec, a host update)
    reads: tuple[TensorId, ...]
    writes: tuple[TensorId, ...]
    mutates: tuple[TensorId, ...] = ()
    seconds: Seconds = 0.0
    workspace: Bytes = 0
    again: int = 0
    name: str = ""
    stream: str = "compute"  # else beside it, making nothing new; "host": by the host's processors, where it lies there


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Start copying tensors between tiers; they take space at `dst` from here on and are usable there after a Wait.

    `lands` false: they overwrite what lies at `dst` already (a gradient into its buffer, new weights over old ones).
    """

    tensors: tuple[TensorId, ...]
    src: str
    dst: str
    name: str = ""
    lands: bool = True
    lane: str = ""  # copies of one lane go one after the other; lanes share the link
    uses: tuple[TensorId, ...] = ()  # room that it works in: whoever uses it too goes before or after
    aside: bool = False  # on the home side it is that room which is copied, wherever the tensors are
    nbytes: Bytes = 0  # besides the tensors: a part of some that are not named, so that nobody waits for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """Start a collective of this rank with others; its tensors, which are there, may be used after a Wait.

    Collectives of one `lane` go one after the other, beside computation.
    """

    tensors: tuple[TensorId, ...]
    kind: str  # "all_gather" and so on, as in `cost.collectives`
    dim: str  # dimension of the mesh
    nbytes: Bytes  # that this rank sends
    seconds: Seconds
    lane: str = ""  # empty: one for the dimension

    @property
    def link(self) -> str:
        """Its name in an outcome's traffic."""
        return f"{self.dim} {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Computation goes on only when all copies and collectives of these tensors are done."""

    tensors: tuple[TensorId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The tensor's space in a tier is free from here on."""

    tensor: TensorId
    tier: str


Step = Run | Copy | Collect | Wait | Drop


class Kept(NamedTuple):
    """What a block's program keeps from its forward for its backward."""

    tensors: frozenset[TensorId]
    until: OpId  # its backward begins after this op


def _again(like: TensorInfo, new: TensorId) -> TensorInfo:
    """The same tensor under another id; a search makes hundreds of thousands, and `replace` takes four times as long."""
    return TensorInfo(
        id=new,
        name=like.name,
        kind=like.kind,
        shape=like.shape,
        dtype=like.dtype,
        nbytes=like.nbytes,
        born=like.born,
        freed=like.freed,
        saved=like.saved,
    )


def reading(run: Run, reads: tuple[TensorId, ...]) -> Run:
    """The same run with other inputs."""
    return Run(
        op=run.op,
        reads=reads,
        writes=run.writes,
        mutates=run.mutates,
        seconds=run.seconds,
        workspace=run.workspace,
        again=run.again,
        name=run.name,
        stream=run.stream,
    )


Mark = tuple[OpId, int]  # after the n-th run of an op; (op, 0) is the original run


def plain_runs(trace: Trace) -> list[Run]:
    """The ops of a trace as they are; made once, since every schedule begins with them."""
    return once_per_trace(trace, "_plain_runs", _plain_runs)


def _plain_runs(trace: Trace) -> list[Run]:
    return [
        Run(
            op=o.id, reads=o.reads, writes=o.writes, mutates=o.mutates, seconds=o.seconds, workspace=o.workspace, name=o.site.op
        )
        for o in trace.ops
    ]


@dataclass(kw_only=True)
class Schedule:
    trace: Trace
    home: str  # the accelerator's tier
    runs: dict[OpId, Run] = field(default_factory=dict)  # originals that differ from the trace's op
    after: dict[OpId, list[Step]] = field(default_factory=dict)  # steps inserted after an op (-1: before the first)
    holds: dict[TensorId, list[Mark]] = field(default_factory=dict)  # references by moment, where they differ from the trace
    added: dict[TensorId, TensorInfo] = field(default_factory=dict)
    replays: dict[int, OpId] = field(default_factory=dict)  # block -> the op after which it is run again
    retained: dict[int, frozenset[int]] = field(
        default_factory=dict
    )  # such a block -> numbers of saves that autograd still holds
    programs: dict[int, Kept] = field(default_factory=dict)  # block that runs by a program -> what that keeps
    moved: dict[OpId, OpId] = field(default_factory=dict)  # op -> the earlier one after which it runs instead
    placed: int = 0  # parameters whose norms and updates are handled one by one, between a backward and the next forward
    start: dict[TensorId, str] = field(default_factory=dict)  # tensors that live in a farther tier, from before the step on
    carried: dict[TensorId, TensorId] = field(default_factory=dict)  # there at the start -> which tensor of the last step it is

    def copy(self) -> Schedule:
        """A schedule to rewrite; lists are shared, since a change makes a new one."""
        return replace(
            self,
            runs=dict(self.runs),
            after=dict(self.after),
            holds=dict(self.holds),
            added=dict(self.added),
            replays=dict(self.replays),
            retained=dict(self.retained),
            programs=dict(self.programs),
            moved=dict(self.moved),
            start=dict(self.start),
            carried=dict(self.carried),
        )

    # what is there

    def info(self, tensor: TensorId) -> TensorInfo:
        return self.added.get(tensor) or self.trace.tensors[tensor]

    def run(self, op: OpId) -> Run:
        """The original run of an op, as it stands after earlier rewrites."""
        return self.runs.get(op) or plain_runs(self.trace)[op]

    def held(self, tensor: TensorId) -> list[Mark]:
        """The moments until which something refers to the tensor: eager locals and autograd's saves."""
        if tensor in self.holds:
            return self.holds[tensor]
        info = self.trace.tensors[tensor]
        end = len(self.trace.ops)
        marks: list[Mark] = [(end if info.freed is None else info.freed, 0)]
        marks += [(end if s.released is None else s.released, 0) for s in self.trace.saves_of(tensor)]
        return marks

    def uses(self, tensor: TensorId) -> tuple[OpId, ...]:
        return self.trace.uses(tensor)

    def steps(self) -> Iterator[Step]:
        """Every step in order."""
        runs, after = self.runs, self.after
        yield from after.get(-1, ())
        for op, plain in enumerate(plain_runs(self.trace)):
            yield runs.get(op) or plain
            if op in after:
                yield from after[op]

    def compute_seconds(self) -> Seconds:
        """Of all runs on the device."""
        plain = plain_runs(self.trace)
        total = once_per_trace(self.trace, "_plain_seconds", lambda trace: sum(run.seconds for run in plain_runs(trace)))
        total += sum(run.seconds - plain[op].seconds for op, run in self.runs.items())
        added = (step for steps in self.after.values() for step in steps)
        return total + sum(step.seconds for step in added if isinstance(step, Run) and step.stream == "compute")

    # changing it

    def insert(self, after: OpId, steps: Iterable[Step], *, first: bool = False) -> None:
        """Put steps after an op; `first`: before what was put there earlier."""
        there = self.after.get(after, [])
        self.after[after] = [*steps, *there] if first else [*there, *steps]

    def add(self, like: TensorInfo, **changes: object) -> TensorId:
        """A new tensor made after the pattern of another; its id."""
        new = len(self.added) + self.trace.next_id
        self.added[new] = replace(like, id=new, **changes) if changes else _again(like, new)  # type: ignore[arg-type]
        self.holds[new] = []
        return new

    def carry(self, tensor: TensorId, name: str) -> TensorId:
        """The same tensor as the step before has left it: there at the start of this one; its id."""
        new = self.add(self.info(tensor), name=name, born=-1)
        self.carried[new] = tensor
        return new

    def unhold(self, tensor: TensorId, saves: Iterable[Save]) -> None:
        """Autograd no longer refers to the tensor through these saves."""
        marks = list(self.held(tensor))
        end = len(self.trace.ops)
        for save in saves:
            mark = (end if save.released is None else save.released, 0)
            if mark in marks:
                marks.remove(mark)
        self.holds[tensor] = marks

    def hold(self, tensor: TensorId, *marks: Mark) -> None:
        """Something refers to the tensor until each of these moments."""
        self.holds[tensor] = [*self.held(tensor), *marks]

    def hold_more(self, tensors: Iterable[TensorId], mark: Mark) -> None:
        """The same for several tensors and one moment."""
        for x in tensors:
            self.hold(x, mark)
