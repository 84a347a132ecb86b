"""Memory of every phase of a run, not only its steps: runs also fail while loading, in the first update, at a long batch, in
evaluation, while saving, and when resumed.

How each is computed (`PhasePeak.how`):

load          sums of traced sizes: weights and buffers, weights made before they are tied to others, the plan's buffers
first step    simulated, with the optimizer's state created by the first update; if a plan places states, they exist
              from the start and the first step is like any other
steady step   the plan's own prediction
longest       another trace, simulated under the same actions
evaluation    another trace, simulated, with the states that stay; streamed weights count as the two largest units,
              and as all of them if the budget has room: then they are cached from one forward to the next
save, resume  sums of traced sizes: `holdall.training` writes weights, then states, each file through host memory, and
              reads states back one tensor at a time. An upper bound

The host's figures are what holdall allocates: Python, torch and data loader workers are extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from holdall.analysis.evaluation import evaluation_of
from holdall.cost.roofline import cost_trace
from holdall.planning.finish import allocator_of
from holdall.simulator import lower, simulate
from holdall.types import Action, Kind, Outcome, Phase, Plan, Problem, Trace
from holdall.types.layout import flat_bytes

SUMMED, SIMULATED, BOUND = "summed", "simulated", "at most"


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """Bytes at the peak of one phase."""

    name: str
    device: int  # bytes on the device
    host: int  # bytes of the farther tier; `far` on a machine that computes on its CPU
    pinned: int  # of `host`, pinned for copies
    disk: int
    how: str  # summed, simulated, or "at most" for a bound
    note: str = ""


def phases(
    problem: Problem, plan: Plan, *, evaluation: Trace | None = None, longest: Trace | None = None, tied: int = 0
) -> tuple[PhasePeak, ...]:
    """The peaks of a plan's phases. `problem`: the plan's problem, with a trace that has seconds.

    `evaluation`: from `trace_evaluation`; None: a bound from the training trace. `longest`: a trace of the step on the longest
    batch; None: leave that phase out. `tied`: from `tied_bytes`.
    """
    there = _There.of(problem, plan)
    found = [_load(there, tied), _first_step(there), _step(there, "steady step", plan.predicted)]
    if longest is not None:
        found.append(_longest(there, longest))
    return (*found, _evaluation(there, evaluation), _save(there), _resume(there))


def tied_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a model creates separately and then replaces by tied ones."""
    seen: set[int] = set()
    extra = 0
    for _, p in model.named_parameters(remove_duplicate=False):
        extra += p.nbytes if id(p) in seen else 0
        seen.add(id(p))
    return extra


def deciding(found: Sequence[PhasePeak]) -> dict[str, PhasePeak]:
    """For each memory in use, the phase with the highest peak; the first of equals."""
    memories = ("device", "host", "pinned", "disk")
    return {m: max(found, key=lambda p: getattr(p, m)) for m in memories if any(getattr(p, m) for p in found)}


@dataclass(frozen=True, kw_only=True)
class _There:
    """Bytes between steps under the plan, by tier and kind."""

    problem: Problem
    actions: tuple[Action, ...]
    sizes: Mapping[tuple[str, Kind], int]
    places: bool  # the plan places states
    unpinned: int  # states that the host updates in place
    weights: int  # bytes of the parameters in a checkpoint, in their training precision
    states: int
    largest_state: int

    @staticmethod
    def of(problem: Problem, plan: Plan) -> _There:
        trace = problem.trace
        schedule = lower(problem, plan.actions)
        sizes: dict[tuple[str, Kind], int] = {}
        for x, t in {**trace.tensors, **schedule.added}.items():
            if t.born < 0:
                key = (schedule.start.get(x, schedule.home), _kind(t.name, t.kind))
                sizes[key] = sizes.get(key, 0) + t.nbytes
        masters = {t.name.removesuffix(_MASTER): t.nbytes for t in trace.tensors.values() if t.name.endswith(_MASTER)}
        params = {t.name: t.nbytes for t in trace.tensors.values() if t.kind is Kind.PARAM}
        states = [t.nbytes for t in trace.tensors.values() if t.kind is Kind.STATE and not t.name.endswith(_MASTER)]
        rows = {row[0]: row[2] for a in plan.actions if a.places_states for row in getattr(a, "units", ())}
        by_host = [x for u in trace.units if rows.get(u.name) == "host" for x in u.states]
        return _There(
            problem=problem,
            actions=plan.actions,
            sizes=sizes,
            places=(bool(rows) and any(update != "device" for update in rows.values())) or bool(masters),
            unpinned=sum(trace.tensors[x].nbytes for x in by_host),
            weights=sum((params | masters).values()),
            states=sum(states),
            largest_state=max(states, default=0),
        )

    @property
    def is_gpu(self) -> bool:
        return self.problem.hardware.device == "cuda"

    @property
    def far(self) -> str:
        far = self.problem.hardware.far
        return far.name if far is not None else ""

    @property
    def whole(self) -> int:
        """Bytes of the model where it computes, before a plan moves any of it."""
        return self.weights + self.sizes.get((self.problem.home, Kind.BUFFER), 0)

    def on(self, tier: str, *without: Kind) -> int:
        return sum(n for (where, kind), n in self.sizes.items() if where == tier and kind not in without)

    def peak(
        self, name: str, how: str, *, device: int, host: int = 0, pinned: int = 0, disk: int = 0, note: str = ""
    ) -> PhasePeak:
        return PhasePeak(
            name=name, device=device, host=host, pinned=pinned if self.is_gpu else 0, disk=disk, how=how, note=note
        )


_MASTER = ".master"
_LATER = (Kind.STATE, Kind.INPUT, Kind.TEMP)  # created after the model; TEMP: a loss that the loop still holds


def _kind(name: str, kind: Kind) -> Kind:
    """A master is the parameter itself: it exists from loading on."""
    return Kind.PARAM if name.endswith(_MASTER) else kind


def _load(there: _There, tied: int) -> PhasePeak:
    """A GPU model whose states a plan places is built on the host, any other where it computes; files pass through the host."""
    laid_out = there.on(there.far, Kind.STATE)
    if there.is_gpu and there.places:
        note = "built on the host; the plan moves a part to the device"
        device, host = there.on(there.problem.home, *_LATER), laid_out + there.weights + tied
    else:
        note = ""
        device, host = there.whole + tied, laid_out + (there.weights if there.is_gpu else 0)
    return there.peak("load", SUMMED, device=device, host=host, pinned=laid_out, note=note)


def _step(there: _There, name: str, outcome: Outcome, how: str = SIMULATED, note: str = "") -> PhasePeak:
    host = outcome.peak.get(there.far, 0)
    pinned = max(0, host - there.unpinned)
    return there.peak(name, how, device=_device_bytes(there.problem, outcome), host=host, pinned=pinned, note=note)


def _device_bytes(problem: Problem, outcome: Outcome) -> int:
    return max(outcome.peak[problem.home], outcome.reserved or 0)


def _simulated(problem: Problem, actions: Sequence[Action]) -> Outcome:
    return simulate(problem, actions, allocator=allocator_of(problem))


def _first_step(there: _There) -> PhasePeak:
    problem = there.problem
    if there.places:
        note = "the plan allocates the states before it"
        return _step(there, "first step", _simulated(problem, there.actions), BOUND, note)
    late = replace(problem, trace=_without_state(problem.trace))
    note = "the optimizer's state appears in its update" if there.states else "the optimizer keeps no state"
    return _step(there, "first step", _simulated(late, there.actions), note=note)


def _without_state(trace: Trace) -> Trace:
    """The same step without optimizer state before it: it is created when the update begins, for all parameters."""
    first = next((op for op in trace.ops if op.site.phase is Phase.STEP), None)
    states = [t for t in trace.tensors.values() if t.kind is Kind.STATE and t.born < 0]
    if first is None or not states:
        return trace
    made = replace(first, writes=(*first.writes, *(t.id for t in states)))
    tensors = {**trace.tensors, **{t.id: replace(t, born=first.id) for t in states}}
    return replace(trace, ops=tuple(made if op.id == first.id else op for op in trace.ops), tensors=tensors)


def _longest(there: _There, longest: Trace) -> PhasePeak:
    problem = replace(there.problem, trace=cost_trace(longest, there.problem.hardware))
    return _step(there, "longest batch", _simulated(problem, there.actions), note="the same plan on the longest batch")


def _evaluation(there: _There, traced: Trace | None) -> PhasePeak:
    """The evaluation's own activations plus the states that stay; the plan's activations do not count."""
    problem, home = there.problem, there.problem.home
    costed = cost_trace(traced if traced is not None else evaluation_of(problem.trace), problem.hardware)
    outcome = _simulated(replace(problem, trace=_without_states(costed)), ())
    resident = sum(t.nbytes for t in costed.tensors.values() if t.born < 0 and t.kind in (Kind.PARAM, Kind.BUFFER))
    own = _device_bytes(problem, outcome) - resident
    sizes = _streamed_sizes(there)
    least = there.on(home, Kind.INPUT) + sum(sizes[:2]) + own
    device = max(least, min(problem.limit(home), least + sum(sizes[2:])))  # the rest is cached, up to the budget
    how = SIMULATED if traced is not None and not there.places else BOUND
    note = "the loss alone; collected outputs are extra" if traced is not None else "with dropout, as in training"
    host = there.on(there.far)
    if len(sizes) > 2:
        note += "; streamed weights stay while there is room"
    return there.peak("evaluation", how, device=device, host=host, pinned=max(0, host - there.unpinned), note=note)


def _without_states(trace: Trace) -> Trace:
    return replace(trace, tensors={x: t for x, t in trace.tensors.items() if t.kind is not Kind.STATE})


def _streamed_sizes(there: _There) -> list[int]:
    """Bytes of streamed units, largest first: two are on the device at once, more if there is room."""
    rows = {row[0] for a in there.actions if a.places_states for row in getattr(a, "units", ()) if row[1] == "streamed"}
    tensors = there.problem.trace.tensors
    units = [u for u in there.problem.trace.units if u.name in rows]
    return sorted((flat_bytes(tensors[x].nbytes for x in u.weights) for u in units), reverse=True)


def _save(there: _There) -> PhasePeak:
    """Each of the two files is assembled in host memory before it is written, one after the other."""
    page = max(there.weights, there.states)
    device = there.on(there.problem.home, Kind.INPUT) + (0 if there.is_gpu else page)
    host = there.on(there.far) + (page if there.is_gpu else 0)
    disk = there.weights + there.states
    note = "in addition to the checkpoints that are kept"
    return there.peak(
        "save", BOUND, device=device, host=host, pinned=max(0, there.on(there.far) - there.unpinned), disk=disk, note=note
    )


def _resume(there: _There) -> PhasePeak:
    """Weights as in loading, then states one by one, each read next to its copy; the plan is applied after that."""
    passing = 2 * there.largest_state
    laid_out = there.on(there.far)
    if not there.is_gpu:
        device, host = there.whole + there.states + passing, laid_out
    else:
        late = there.sizes.get((there.problem.home, Kind.STATE), 0) if there.places else 0
        device, host = there.on(there.problem.home, Kind.INPUT), laid_out + there.weights + late + passing
    pinned = max(0, laid_out - there.unpinned)
    note = "into a model built on the host" if there.is_gpu and there.places else ""
    return there.peak("resume", BOUND, device=device, host=host, pinned=pinned, disk=there.weights + there.states, note=note)
