"""The end of every planner: lower, check, simulate, compare with the budget. No planner computes its own peak."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Sequence

from holdall.actions.head import Head
from holdall.actions.offload import Offload
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.actions.shard import Shard
from holdall.errors import Infeasible, Unsupported
from holdall.planning.block_rows import block_rows
from holdall.planning.laid_out import with_layout
from holdall.simulator import simulate
from holdall.simulator.allocators import usable_by
from holdall.types import Action, Outcome, Plan, PlanInfo, Planner, Problem, TierRate
from holdall.units import MiB, format_bytes

NEVER = 1 << 62  # bytes of a candidate that cannot be carried out


def finish(
    planner: Planner, problem: Problem, actions: Sequence[Action], *, why: Sequence[str] = (), began: float | None = None
) -> Plan:
    """The plan of these actions; `Infeasible` if it does not fit. `began`: when planning started (`time.perf_counter`)."""
    actions = with_traced(problem, actions)
    outcome = simulate(problem, actions, full=True, checked=True, allocator=allocator_of(problem))
    outcome, layout = with_layout(problem, actions, outcome)
    refuse_over_budget(problem, outcome, planner.name)
    trace = problem.trace
    return Plan(
        planner=planner.name,
        options=dataclasses.asdict(planner),  # type: ignore[call-overload]
        actions=tuple(actions),
        predicted=outcome,
        trace=trace.fingerprint,
        signature=trace.about.signature,
        budget={tier.name: problem.limit(tier.name) for tier in problem.hardware.tiers},
        hardware=problem.hardware.name,
        solve_seconds=time.perf_counter() - began if began is not None else 0.0,
        why=tuple(why),
        about=dataclasses.replace(_about(problem, actions, outcome), layout=layout),
    )


def _if_not_clipped(problem: Problem, actions: Sequence[Action], clipped: Outcome) -> float | None:
    """Seconds of a step whose gradients are not clipped, where that makes a difference; memory is the same, and so is what the
    allocator does."""
    if not any(isinstance(a, Place) and a.ahead for a in actions):
        return None
    outcome = simulate(dataclasses.replace(problem, clipped=False), actions)
    return outcome.seconds + clipped.churn


def allocator_of(problem: Problem) -> str | None:
    """The allocator that the runtime will use on the problem's device; None: only bytes count."""
    if problem.layout:
        return "arena" if problem.hardware.device == "cuda" else "host_arena"
    return "expandable" if problem.hardware.device == "cuda" else None


def usable_bytes(problem: Problem, limit: int) -> int:
    """The most bytes that can be live under a limit on what the device's allocator reserves."""
    return usable_by(allocator_of(problem), limit)


def outcome_of(problem: Problem, actions: Sequence[Action]) -> Outcome:
    """The outcome that `finish` judges: the actions with those implied by the trace, and the device's allocator."""
    return simulate(problem, with_traced(problem, actions), allocator=allocator_of(problem))


def outcome_or_never(problem: Problem, actions: Sequence[Action]) -> Outcome:
    """The outcome of a candidate. One that cannot be carried out takes infinite time and fits nowhere, so that no planner
    chooses it while there is another; if there is none, `finish` raises the reason."""
    try:
        return outcome_of(problem, actions)
    except Unsupported:
        return Outcome(source="simulated", seconds=math.inf, peak={problem.home: NEVER})


def with_traced(problem: Problem, actions: Sequence[Action]) -> list[Action]:
    """The actions with those implied by the trace: how it is sharded, its chunked head, and working copies in its precision."""
    shard = Shard.samples(problem.trace)
    head = [] if any(isinstance(a, Head) for a in actions) else Head.samples(problem.trace)
    if shard:
        return [*(s.over_backwards(problem.accumulate) for s in shard), *head, *_on_shards(problem, actions)]
    is_narrow = problem.trace.about.precision is not None
    is_placed = any(isinstance(a, Place) for a in actions)
    place = [Place.all(problem.trace)] if is_narrow and not is_placed else []
    return [*head, *actions, *place]


def _on_shards(problem: Problem, actions: Sequence[Action]) -> list[Action]:
    """The actions besides the sharding itself; all must work on shards."""
    others = [a for a in actions if not isinstance(a, Shard)]
    wrong = next((a.name for a in others if not a.on_shards), "")
    if wrong or problem.layout:
        what = f"`{wrong}`" if wrong else "a layout"
        raise Unsupported(f"{what} is not planned for a step that is sharded over ranks yet", hint='use planner="auto"')
    return others


def _about(problem: Problem, actions: Sequence[Action], outcome: Outcome) -> PlanInfo:
    """What the harness and reports need to know of the step."""
    trace = problem.trace
    as_one = trace.whole is not None and any(getattr(a, "block", None) == "" for a in actions)
    blocks = (trace.whole,) if as_one and trace.whole is not None else trace.blocks
    return dataclasses.replace(
        PlanInfo.of(trace.about),
        context=problem.hardware.context,
        units=tuple((u.name, u.params) for u in trace.units),
        blocks=tuple((b.name, b.shapes) for b in blocks),
        quiet=tuple(b.name for b in blocks if b.quiet),
        rows=tuple(block_rows(problem, actions)),
        rates=_rates(problem, outcome),
        seconds_if_not_clipped=_if_not_clipped(problem, actions, outcome),
    )


def _rates(problem: Problem, outcome: Outcome) -> tuple[TierRate, ...]:
    """The rates of the farther tiers in use, each over its own link."""
    used = {tier for link, nbytes in outcome.traffic.items() if nbytes for tier in link.split("->")}
    found = []
    for tier in (t.name for t in problem.hardware.others if t.name in used):
        there, back = problem.hardware.path(problem.home, tier)[-1], problem.hardware.path(tier, problem.home)[0]
        read, write, latency = back.rate * back.duplex, there.rate * there.duplex, max(there.latency, back.latency)
        found.append(TierRate(tier=tier, read=read, write=write, latency=latency))
    return tuple(found)


def over_budget(problem: Problem, outcome: Outcome) -> dict[str, int]:
    """Tiers that are too small, with the bytes missing. With a simulated allocator its reserved bytes count."""
    missing = {}
    for tier in problem.hardware.tiers:
        needed = outcome.peak.get(tier.name, 0)
        if tier.name == problem.home and outcome.reserved is not None:
            needed = max(needed, outcome.reserved)
        excess = needed - problem.limit(tier.name)
        if excess > 0:
            missing[tier.name] = excess
    return missing


def refuse_over_budget(problem: Problem, outcome: Outcome, planner: str) -> None:
    """Raise `Infeasible` if the outcome does not fit, with the smallest peak found and its largest parts."""
    missing = over_budget(problem, outcome)
    if not missing:
        return
    if problem.home not in missing:
        raise _host_too_small(problem, outcome, planner, next(iter(missing)))
    tier = problem.home
    least = problem.limit(tier) + missing[tier]
    kinds = ", ".join(f"{k.value} {format_bytes(v)}" for k, v in outcome.peak_kinds.items() if v)
    where = f"; at the peak ({outcome.peak_where}): {kinds}" if kinds else ""
    options = "" if problem.allow >= {Recompute.name, Offload.name} else "allow recompute and offload, or "
    if "_foreach_" in outcome.peak_where:
        options += "build the optimizer with `fused=True`, which needs no temporaries, or "
    cure = f"use a budget of at least {least} bytes"
    others = [other for other in missing if other != tier]
    if others:  # the plan exceeds other tiers too
        cure = f"use {_typed_budget(problem, outcome, missing)}"
        where = f", and {', '.join(_lacks(problem, outcome, other) for other in others)}{where}"
    raise Infeasible(
        f"no plan of `{planner}` fits {exact_bytes(problem.limit(tier))} of {tier}; "
        f"the smallest found needs {exact_bytes(least)}{where}",
        hint=f"{options}{cure}",
        smallest=None if others else least,
    )


def _host_too_small(problem: Problem, outcome: Outcome, planner: str, tier: str) -> Infeasible:
    """The error for a plan that fits the device but not a farther tier."""
    needed = outcome.peak[tier]
    by_auto = "" if planner == "auto" else 'use planner="auto" (--planner auto), which divides model states between both, or '
    return Infeasible(
        f"no plan of `{planner}` fits {exact_bytes(problem.limit(tier))} of {tier}; the closest one "
        f"needs {exact_bytes(needed)} there, and {format_bytes(outcome.peak[problem.home])} of {problem.home}",
        hint=f"{by_auto}if this machine has more, use {_typed_budget(problem, outcome, [tier])}; "
        "smaller optimizer states (`holdall.optim.adam8bit.Adam8bit`) need less of it",
    )


def _lacks(problem: Problem, outcome: Outcome, tier: str) -> str:
    return f"{format_bytes(outcome.peak[tier])} of {tier}, which has {format_bytes(problem.limit(tier))}"


def _typed_budget(problem: Problem, outcome: Outcome, short: Collection[str]) -> str:
    """A budget under which this outcome fits, as it is written in Python and on the command line."""
    sizes = {tier.name: problem.limit(tier.name) for tier in problem.hardware.tiers}
    excess = over_budget(problem, outcome)
    typed = {name: _typed(limit + excess[name]) if name in short else _typed(limit) for name, limit in sizes.items()}
    python = ", ".join(f'"{name}": "{size}"' for name, size in typed.items())
    line = ",".join(f"{name}={size}" for name, size in typed.items())
    return f"budget={{{python}}} (--budget {line})"


def _typed(size: int) -> str:
    """A size that can be typed, never less than `size`: in whole MiB, or GiB where that is exact."""
    mib = -(-size // MiB)
    return f"{mib // 1024}GiB" if mib % 1024 == 0 else f"{mib}MiB"


def exact_bytes(size: int) -> str:
    return f"{format_bytes(size)} ({size:,} bytes)"
