"""The schedule side of `host_states`: pieces of states on their way through the device, in the order of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdall.types import Copy, Kind, Op, Phase, Problem, Run, Schedule, Step, Trace, Wait
from holdall.types.layout import ALIGN, ELEMENTWISE_NAMES, allocated_bytes, round_up
from holdall.types.trace import Bytes, OpId, TensorId, once_per_trace
from holdall.units import MiB

_PIECE = 64 * MiB  # bytes of states that move together, unless one parameter has more
_FEWEST = 16  # pieces, where there are as many parameters


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """What the optimizer's step does to one parameter."""

    name: str
    weight: TensorId
    states: tuple[TensorId, ...]  # without scalar counters
    ops: tuple[OpId, ...]  # empty: ops update several parameters together


def obstacle(trace: Trace) -> str:
    """Why the states of this step cannot be on the host; empty: they can."""
    if trace.about.shards is None:
        return "the model is not sharded (`place` is for one process)"
    if trace.about.optimizer not in ELEMENTWISE_NAMES:
        return f"{trace.about.optimizer or 'no optimizer'} does not update each element separately"
    if _is_foreach(trace):
        return "ops of the update have temporaries of all parameters together (`foreach=True`)"
    return "" if updates(trace) else f"{trace.about.optimizer} has none"


def updates(trace: Trace) -> tuple[ParameterUpdate, ...]:
    """The parameters that have states, in the order of their updates."""
    return once_per_trace(trace, "_parameter_updates", _updates)


def pieces_of(trace: Trace) -> tuple[tuple[str, ...], ...]:
    """All of them in pieces: neighbours together, up to a size."""
    every = [(u.name, _flat(trace, u)) for u in updates(trace)]
    most = min(_PIECE, sum(size for _, size in every) // _FEWEST)
    pieces: list[list[str]] = []
    room = 0
    for name, size in every:
        if not pieces or size > room:
            pieces.append([])
            room = most
        pieces[-1].append(name)
        room -= size
    return tuple(map(tuple, pieces))


def _flat(trace: Trace, update: ParameterUpdate) -> Bytes:
    """In a buffer in which tensors are aligned."""
    return sum(round_up(trace.tensors[x].nbytes, ALIGN) for x in update.states)


def _steps(trace: Trace) -> tuple[Op, ...]:
    """The ops that update, without those by which ranks exchange new weights afterwards."""
    return once_per_trace(trace, "_updating_ops", _updating_ops)


def _updating_ops(trace: Trace) -> tuple[Op, ...]:
    every = [op for op in trace.ops if op.site.phase is Phase.STEP]
    sent = {c.op for c in trace.about.shards.collectives} if trace.about.shards is not None else set()
    buffers = {x for op in every if op.id in sent for x in (*op.reads, *op.mutates, *op.writes)}
    return tuple(op for op in every if not buffers & {*op.reads, *op.mutates, *op.writes})


def _owners(trace: Trace) -> dict[TensorId, str]:
    """Weight or state -> the name of the parameter."""
    weights = {t.name: x for x, t in trace.tensors.items() if t.kind is Kind.PARAM and t.born < 0}
    found = {x: name for name, x in weights.items()}
    for x, t in trace.tensors.items():
        name = t.name.rpartition(".")[0]
        if t.kind is Kind.STATE and name in weights:
            found[x] = name
    return found


def _touched(op: Op, owner: dict[TensorId, str]) -> list[str]:
    return list(dict.fromkeys(owner[x] for x in (*op.reads, *op.mutates) if x in owner))


def _is_foreach(trace: Trace) -> bool:
    """Are there ops on several parameters, with temporaries? A fused op has none."""
    owner = _owners(trace)
    several = any(len(_touched(op, owner)) > 1 for op in _steps(trace))
    return several and any(trace.tensors[x].shape for op in _steps(trace) for x in op.writes)


def _updates(trace: Trace) -> tuple[ParameterUpdate, ...]:
    owner = _owners(trace)
    weights = {name: x for x, name in owner.items() if trace.tensors[x].kind is Kind.PARAM}
    states: dict[str, list[TensorId]] = {}
    for x, name in owner.items():
        if trace.tensors[x].kind is Kind.STATE and trace.tensors[x].shape:
            states.setdefault(name, []).append(x)
    ops: dict[str, list[OpId]] = {}
    now = ""
    for op in _steps(trace):
        whose = _touched(op, owner)
        now = whose[0] if whose else now  # temporaries are those of the parameter before
        for name in whose or [now]:
            ops.setdefault(name, []).append(op.id)
    shared = len({k for some in ops.values() for k in some}) < sum(map(len, ops.values()))
    return tuple(
        ParameterUpdate(name, weights[name], tuple(states[name]), () if shared else tuple(ops[name]))
        for name in ops
        if name in states
    )


def rewrite_with_states_on_host(schedule: Schedule, problem: Problem, pieces: Sequence[Sequence[str]], slots: int) -> Schedule:
    known = {u.name: u for u in updates(problem.trace)}
    return _Rewrite(schedule, problem, [[known[name] for name in piece] for piece in pieces]).apply(slots)


class _Rewrite:
    def __init__(self, schedule: Schedule, problem: Problem, pieces: Sequence[Sequence[ParameterUpdate]]) -> None:
        self.schedule, self.pieces = schedule, pieces
        self.trace, self.hardware = problem.trace, problem.hardware
        self.home, self.far = problem.home, problem.other()
        self._all = sum(_flat(self.trace, u) for u in updates(self.trace))
        self._own = {x for op in _steps(self.trace) for x in op.writes}  # made by updates, and what they change
        self._own.update(x for u in updates(self.trace) for x in (*u.states, u.weight))

    def apply(self, count: int) -> Schedule:
        schedule = self.schedule
        for x in (x for piece in self.pieces for u in piece for x in u.states):
            info = schedule.info(x)
            schedule.start[x] = self.far
            schedule.added[x] = replace(info, nbytes=round_up(info.nbytes, ALIGN))
        slots = self._slots(min(count, len(self.pieces)))
        runs = [self._run(piece, slots[n % len(slots)]) for n, piece in enumerate(self.pieces)]
        awaited = dict.fromkeys(x for run in runs for x in (*run.reads, *run.mutates) if x not in slots)
        self._leave_the_rest()
        steps: list[Step] = [Wait(tensors=tuple(awaited))]
        steps += [Run(op=-1, reads=(), writes=(slot,), name="room for updates") for slot in slots]
        steps += [self._copy(n, slots, out=False) for n in range(len(slots))]
        for n, run in enumerate(runs):
            steps += [Wait(tensors=(slots[n % len(slots)],)), run, self._copy(n, slots, out=True)]
            if n + len(slots) < len(runs):
                steps.append(self._copy(n + len(slots), slots, out=False))
        steps.append(Wait(tensors=tuple(slots)))
        schedule.insert(_steps(self.trace)[0].id - 1, steps)
        return schedule

    def _slots(self, count: int) -> list[TensorId]:
        """Room on the device, which pieces take by turns."""
        sizes = [sum(_flat(self.trace, u) for u in piece) for piece in self.pieces]
        like, found = self.trace.tensors[self.pieces[0][0].weight], []
        for n in range(count):
            size = allocated_bytes(max(sizes[n::count]), self.hardware.device)
            found.append(self.schedule.add(like, name="room for updates", kind=Kind.TEMP, nbytes=size, born=0))
        return found

    def _copy(self, number: int, slots: Sequence[TensorId], *, out: bool) -> Copy:
        """Of a piece, between the host and its slot; states have no memory of their own on the device."""
        src, dst = (self.home, self.far) if out else (self.far, self.home)
        moving = tuple(x for u in self.pieces[number] for x in u.states)
        room = (slots[number % len(slots)],)
        return Copy(tensors=moving, src=src, dst=dst, lands=False, lane="states", uses=room, aside=True, name="states")

    def _run(self, piece: Sequence[ParameterUpdate], slot: TensorId) -> Run:
        """The update of a piece: the ops of its parameters as one."""
        own = {k for u in piece for k in u.ops}
        ops = [op.id for op in _steps(self.trace) if op.id in own or not own]
        share = 1.0 if own else sum(_flat(self.trace, u) for u in piece) / self._all
        runs = [self.schedule.run(k) for k in ops]
        used = dict.fromkeys(x for run in runs for x in (*run.reads, *run.mutates))
        return Run(
            op=-1,
            reads=_without(used, self._own),
            writes=(),
            mutates=(slot, *dict.fromkeys(u.weight for u in piece)),
            seconds=share * sum(run.seconds for run in runs),
            workspace=self._workspace(ops) if own else 0,
            name=f"update of {piece[0].name}" + (f" and {len(piece) - 1} more" if len(piece) > 1 else ""),
        )

    def _workspace(self, ops: Sequence[OpId]) -> Bytes:
        """The most that temporaries of these ops take; the last of them end with the piece."""
        made = [self.trace.tensors[x] for k in ops for x in self.trace.ops[k].writes]

        def there(k: OpId) -> Bytes:
            return sum(t.nbytes for t in made if t.born <= k and (t.freed is None or t.freed >= k))

        return max(there(k) + self.trace.ops[k].workspace for k in ops)

    def _leave_the_rest(self) -> None:
        """What the optimizer's own step still does: the update of the other parameters."""
        away = {x for piece in self.pieces for u in piece for x in (*u.states, u.weight)}
        gone = {k for piece in self.pieces for u in piece for k in u.ops}
        left = 1 - sum(_flat(self.trace, u) for piece in self.pieces for u in piece) / self._all
        for op in _steps(self.trace):
            run = self.schedule.run(op.id)
            if op.id in gone:
                self.schedule.runs[op.id] = Run(op=op.id, reads=(), writes=(), name=run.name)
            elif not gone:
                reads, mutates = _without(run.reads, away), _without(run.mutates, away)
                self.schedule.runs[op.id] = replace(run, reads=reads, mutates=mutates, seconds=left * run.seconds)


def _without(tensors: Iterable[TensorId], away: set[TensorId]) -> tuple[TensorId, ...]:
    return tuple(x for x in tensors if x not in away)
