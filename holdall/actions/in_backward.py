"""In backward: update each parameter as soon as its gradient is complete, and free the gradient at once.

After LOMO (Lv et al., ACL 2024, arXiv 2306.09782), for every optimizer that treats each parameter by itself: torch's own and
the members of `optim`. Gradients in memory shrink from all of them to those of one node of the graph.

Exact: the same bits as the same optimizer without its foreach or fused form. With `max_norm` gradients are clipped by their
global norm, in place of the loop's `clip_grad_norm_`: they are held until backward is over, then measured, clipped and used one
by one. That costs as many bytes as all gradients; a second backward would cost time instead, and under a plan a graph is walked
once. Held gradients may be sums of several backwards (`accumulate`). Without `max_norm` they may not: the traced backward is
the last of a step, which frees sums as it goes, so an earlier backward would need more memory.

`place` does the same for parameters that the model does not compute with itself: masters with working copies, and masters on
the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from holdall.actions.place import Place
from holdall.actions.reschedule import region
from holdall.errors import InvalidInput, Unsupported
from holdall.types import Action, Facts, Kind, Op, Phase, Problem, Run, Schedule, Trace, Unit
from holdall.types.layout import allocated_bytes
from holdall.types.trace import OpId, TensorId

if TYPE_CHECKING:
    from holdall.runtime.harness import Harness


@dataclass(frozen=True, kw_only=True)
class InBackward(Facts):
    late: tuple[str, ...] = ()  # blocks that hand over all gradients at the end of their backward: blocks run op by op
    max_norm: float | None = None  # clip by the global norm; gradients are then held until backward is over
    accumulate: int = 1  # backwards per step, with `max_norm` only

    name: ClassVar[str] = "in_backward"
    exact: ClassVar[bool] = True
    rank: ClassVar[int] = 35  # after every action that moves tensors of backward
    settles_states: ClassVar[bool] = True
    what: ClassVar[str] = "parameters are updated in backward, as gradients are made (reads_gradients=False)"

    @staticmethod
    def of(trace: Trace, actions: Iterable[Action] = (), *, max_norm: float | None = None, accumulate: int = 1) -> Action:
        """The action for a trace, given the plan's other actions: this one, or `place` where the model has working copies."""
        if trace.about.precision:
            if max_norm is not None or accumulate > 1:
                raise Unsupported(
                    "`in_backward` can neither clip nor accumulate the gradients of working copies",
                    hint='plan with allow=["place"], under which the loop may do both',
                )
            return Place.all(trace, when="backward")
        late = tuple(block for a in actions for block in a.by_ops)
        return InBackward(late=late, max_norm=max_norm, accumulate=accumulate)

    @staticmethod
    def samples(trace: Trace) -> list[InBackward]:  # noqa: ARG004
        """None: the contract tests plan for a loop that clips. Its own tests combine it with the other actions."""
        return []

    def rewrite(self, schedule: Schedule, problem: Problem) -> Schedule:
        _refuse(problem, self)
        steps = [op for op in problem.trace.ops if op.site.phase is Phase.STEP]
        if any(op.reads and not schedule.run(op.id).reads for op in steps):
            raise Unsupported(
                "`in_backward` and `place` both decide when parameters are updated",
                hint='use `place` with when="backward" alone',
            )
        return _Rewrite(schedule.copy(), problem, steps, self.late, holds=self.max_norm is not None).apply()

    def install(self, harness: Harness) -> None:
        from holdall.optim._in_backward.in_backward import BackwardUpdates

        late = {block for block, policy in harness._policies.items() if policy.runner is not None}
        if late != set(self.late):
            raise InvalidInput(
                "`in_backward` lacks the names of the blocks that run op by op",
                hint="make it with `InBackward.of(trace, actions)`",
            )
        if harness.optimizer is None:
            raise Unsupported("`in_backward` needs an optimizer", hint="call holdall.apply(plan, model, optimizer)")
        if getattr(harness.optimizer, "consumes_gradients", False):  # it updates in backward by itself
            held: Any = harness.optimizer
            if (held.held_norm, held.accumulate) != (self.max_norm, self.accumulate):
                raise InvalidInput(
                    f"{type(harness.optimizer).__name__} holds gradients otherwise than the plan does "
                    f"(max_norm={self.max_norm}, accumulate={self.accumulate})",
                    hint='give the optimizer the same values: clip_grad_norm=..., clip="hold", accumulate=...',
                )
            return
        harness.updates = BackwardUpdates(harness.optimizer, max_norm=self.max_norm, accumulate=self.accumulate)
        harness.on_close(harness.updates.close)


def _refuse(problem: Problem, action: InBackward) -> None:
    """What updating in backward cannot give, with the price of each way out."""
    if problem.trace.about.precision:
        raise Unsupported(
            "the model computes with working copies, which `in_backward` cannot update",
            hint='use `place` with when="backward", which `InBackward.of(trace, actions)` returns',
        )
    if problem.reads_gradients and action.max_norm is None:
        raise Unsupported(
            "clipping by the global norm needs all gradients before the first update, so none can be made in backward",
            hint="plan with reads_gradients=False; or compute the norm in a second backward (`Lomo.grad_norm`, twice as slow); "
            "or hold the gradients (`InBackward.of(..., max_norm=...)`: as many bytes as trained weights)",
        )
    if problem.accumulate != action.accumulate or (action.accumulate > 1 and action.max_norm is None):
        raise Unsupported(
            f"the loop adds up the gradients of {problem.accumulate} backwards, but `in_backward` uses each gradient at once",
            hint="plan with accumulate=1; or hold the gradients (`InBackward.of(..., accumulate=..., max_norm=...)`: as "
            "many bytes as trained weights); or accumulate compressed gradients with `holdall.optim.Flora`",
        )


def moments(trace: Trace, late: Iterable[str] = ()) -> dict[TensorId, OpId]:
    """Gradient -> the op after which it is complete: when the node of the graph that made it, or added to it, is over."""
    end = _last_of_backward(trace)
    ends = dict(trace.node_ends)
    for block in late:
        ops, _ = region(trace, trace.block(block))
        ends.update(dict.fromkeys((op.id for op in ops), ops[-1].id))
    made = {g: max(k for k in trace.uses(g) if k <= end) for unit in trace.units for g in unit.grads}
    return {g: ends.get(op, op) for g, op in made.items()}


def used_up(trace: Trace) -> Trace:
    """The same step without its update, each gradient freed when it is complete: the input for planners of activations."""
    end, gone = _last_of_backward(trace), moments(trace)
    tensors = {
        x: replace(t, freed=gone[x]) if x in gone else replace(t, freed=None) if (t.freed or 0) > end else t
        for x, t in trace.tensors.items()
        if t.born <= end
    }
    saves = tuple(replace(s, released=None) if (s.released or 0) > end else s for s in trace.saves)
    return replace(trace, ops=trace.ops[: end + 1], tensors=tensors, saves=saves, about=replace(trace.about, precision=None))


def _last_of_backward(trace: Trace) -> OpId:
    return next((op.id for op in trace.ops if op.site.phase is Phase.STEP), len(trace.ops)) - 1


@dataclass(slots=True)
class _Parameter:
    """One parameter, its gradient, and the ops of the step that update it."""

    unit: Unit
    weight: TensorId
    grad: TensorId
    states: tuple[TensorId, ...]
    ready: OpId = -1  # the op after which its gradient is complete
    ops: list[Op] = field(default_factory=list)


class _Rewrite:
    def __init__(self, schedule: Schedule, problem: Problem, steps: Sequence[Op], late: Sequence[str], *, holds: bool) -> None:
        self.schedule = schedule
        self.problem = problem
        self.trace = problem.trace
        self.steps = steps
        self.late = late
        self.holds = holds
        self.parameters = _parameters(self.trace)
        self.now: dict[TensorId, TensorId] = {}  # tensor of the step -> its copy in backward; a gradient -> its sum
        if problem.accumulate > 1:
            for op in steps:
                run = schedule.run(op.id)
                self.now.update(zip((*op.reads, *op.mutates), (*run.reads, *run.mutates), strict=True))

    def apply(self) -> Schedule:
        if not self.steps:
            raise Unsupported(
                "the traced step has no update", hint="trace with the optimizer: holdall.trace(model, batch, optimizer=...)"
            )
        apart = self._share_out()
        end, ready = _last_of_backward(self.trace), moments(self.trace, self.late)
        for p in self.parameters:
            p.ready = end if self.holds else ready[p.grad]
        for op in self.steps:
            self.schedule.runs[op.id] = Run(op=op.id, reads=(), writes=(), name=op.site.op)
        trained = [p for p in self.parameters if p.ops or (not apart and p.unit.numel)]
        updates: dict[OpId, list[Run]] = {}
        for p in sorted(trained, key=self._turn):
            updates.setdefault(p.ready, []).extend(self._moved(p) if apart else [self._as_a_whole(p)])
            self.schedule.holds[self.now.get(p.grad, p.grad)] = []
        if self.holds and trained:
            self.schedule.insert(end, [*self._norm(trained), *updates[end]])
            return self.schedule
        for at, runs in updates.items():
            self.schedule.insert(at, runs, first=True)  # before the next node starts a fetch or a replay
        return self.schedule

    def _norm(self, trained: Sequence[_Parameter]) -> list[Run]:
        """The norm of each gradient, their global norm and the factor; the last step's norm is still in memory."""
        grads = tuple(self.now.get(p.grad, p.grad) for p in trained)
        like = self.schedule.info(grads[0])
        number = allocated_bytes(4, self.problem.hardware.device)
        make = partial(self.schedule.add, like, kind=Kind.TEMP)
        before = make(name="norm of the step before", nbytes=number, born=-1)
        norms = make(name="norms", nbytes=number * len(grads))
        norm, factor = (make(name=name, nbytes=number) for name in ("norm", "clipping factor"))
        for x in (norm, factor):
            self.schedule.hold(x, (len(self.trace.ops), 0))
        hardware = self.problem.hardware
        seconds = sum(self.schedule.info(g).nbytes for g in grads) / hardware.bandwidth + len(grads) * hardware.overhead
        stacked = allocated_bytes(4 * len(grads), self.problem.hardware.device)
        return [
            Run(op=-1, reads=grads, writes=(norms,), seconds=seconds, name="norms of gradients"),
            Run(op=-1, reads=(norms,), writes=(norm,), workspace=stacked, seconds=2 * hardware.overhead, name="their norm"),
            Run(
                op=-1,
                reads=(norm, norms, before),
                writes=(factor,),
                workspace=2 * number,
                seconds=4 * hardware.overhead,
                name="clipping factor",
            ),
        ]

    def _share_out(self) -> bool:
        """Assign every op of the step to the parameter it updates; false where one op updates several (foreach)."""
        owner = {x: p for p in self.parameters for x in (p.weight, p.grad, *p.states)}
        waiting: list[Op] = []  # without inputs: they belong to the next parameter
        last: _Parameter | None = None
        for op in self.steps:
            touched = [owner[x] for x in (*op.reads, *op.mutates) if x in owner]
            if any(p is not touched[0] for p in touched):
                for p in self.parameters:
                    p.ops = []
                return False
            if not touched:
                waiting.append(op)
                continue
            last = touched[0]
            for mine in (*waiting, op):
                last.ops.append(mine)
                owner.update(dict.fromkeys(mine.writes, last))
            waiting = []
        if last is not None:
            last.ops += waiting
        return True

    def _turn(self, p: _Parameter) -> tuple[int, int, int]:
        """The order of updates after one node: a bias, made last, before its weight, whose gradient is a view."""
        if self.holds:
            return p.ready, p.ops[0].id if p.ops else 0, p.weight
        born = self.trace.tensors[p.grad].born
        writes = self.trace.ops[born].writes
        return p.ready, -born, writes.index(p.grad) if p.grad in writes else 0

    def _moved(self, p: _Parameter) -> list[Run]:
        """The ops of the update, with the lifetimes of their results; the gradient lives until the last op."""
        runs = [self._run(op) for op in p.ops]
        place = {op.id: n for n, op in enumerate(p.ops)}
        for x in {x for op in p.ops for x in (*op.writes, *op.reads, *op.mutates)}:
            freed = self.trace.tensors[x].freed
            new = self.now.get(x, x)
            if x == p.grad or (new != x and freed is not None) or (freed is not None and freed >= p.ops[0].id):
                # a local variable of the update: lives until it is rebound, or the function returns
                last = len(runs) - 1 if x == p.grad or freed is None else place.get(freed, len(runs) - 1)
                if new not in runs[last].writes:  # else it is freed at once
                    runs[last] = replace(runs[last], reads=tuple(dict.fromkeys((*runs[last].reads, new))))
                self.schedule.holds[new] = []
            elif new != x:
                self.schedule.hold(new, (len(self.trace.ops), 0))
        return runs

    def _run(self, op: Op) -> Run:
        now = self.now
        for x in op.writes:
            now[x] = self.schedule.add(self.trace.tensors[x])
        return Run(
            op=-1,
            reads=tuple(now.get(x, x) for x in op.reads),
            writes=tuple(now[x] for x in op.writes),
            mutates=tuple(now.get(x, x) for x in op.mutates),
            seconds=op.seconds,
            workspace=op.workspace,
            name=op.site.op,
        )

    def _as_a_whole(self, p: _Parameter) -> Run:
        """One op in place of a foreach op of the trace: this parameter's share of the unit's update time."""
        share = self.trace.tensors[p.weight].nbytes / max(1, sum(self.trace.tensors[x].nbytes for x in p.unit.weights))
        hardware = self.problem.hardware
        return Run(
            op=-1,
            reads=(self.now.get(p.grad, p.grad),),
            writes=(),
            mutates=(p.weight, *p.states),
            seconds=p.unit.moved * share / hardware.bandwidth + 8 * hardware.overhead,
            workspace=round(p.unit.workspace * share),
            name=f"update of {self.trace.tensors[p.weight].name}",
        )


def _parameters(trace: Trace) -> list[_Parameter]:
    """Every parameter that gets a gradient."""
    found = []
    for unit in trace.units:
        grads = {trace.tensors[g].name.removesuffix(".grad"): g for g in unit.grads}
        states: dict[str, list[TensorId]] = {}
        for x in unit.states:
            states.setdefault(trace.tensors[x].name.rpartition(".")[0], []).append(x)
        for name, weight in zip(unit.params, unit.weights, strict=True):
            if name in grads:
                found.append(_Parameter(unit=unit, weight=weight, grad=grads[name], states=tuple(states.get(name, ()))))
    return found
