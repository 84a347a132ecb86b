"""A table of planners and budgets: one row per pair, predicted and optionally measured; and measured rows of peers."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from holdall.api import plan
from holdall.cli._errors import first_line
from holdall.errors import HoldallError, Infeasible, InvalidInput
from holdall.experiments.choices import PlanChoice
from holdall.experiments.peer_runs import Seen, reason, run_peer
from holdall.experiments.peers import Peer, Subject, Variant, all_variants
from holdall.experiments.real_steps import RealRun, run_steps
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.experiments.workload import Workload
from holdall.registry import allowed_by_default
from holdall.types import Action, Hardware, Outcome, Plan, Progress, Trace
from holdall.units import parse_bytes

log = logging.getLogger("holdall")

STEPS = 3  # steps of one measured run: the first warms up, the median of the others is reported


@dataclass(frozen=True, kw_only=True)
class Target:
    """One budget: as it was written, and in bytes."""

    label: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    planner: str
    target: Target
    plan: Plan | None = None  # None: `problem` says why
    run: RealRun | None = None  # None: not measured
    identical: bool | None = None  # losses and weights equal those of plain training; None: not compared
    smallest: int | None = None  # if no plan fits: the smallest budget with a plan
    problem: str = ""
    failed: bool = False  # a plan was made, and its run failed or exceeded the budget

    @property
    def predicted(self) -> Outcome | None:
        return self.plan.predicted if self.plan else None

    @property
    def measured(self) -> Outcome | None:
        return outcome_of(self.run)


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    variant: Variant
    seen: Seen | None = None  # None: `problem` says why
    identical: bool | None = None  # losses equal those of plain training; None: not compared
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The planners, budgets and peers to compare, with the workload. `measure`: also run each plan for a few steps, and the
    peers."""

    workload: Workload
    machine: Hardware
    trace: Trace
    plain: Outcome  # predicted
    planners: Sequence[PlanChoice]
    targets: Sequence[Target]
    measure: bool
    peers: Sequence[Peer] = ()
    commit: str = ""

    @property
    def home(self) -> str:
        return self.machine.home.name


@dataclass(frozen=True, kw_only=True)
class Comparison:
    sweep: Sweep
    rows: Sequence[SweepRow]
    reference: RealRun | None  # plain training, measured; None: not asked for, or it does not fit this machine
    peers: Sequence[PeerRow] = ()

    def records(self) -> list[dict[str, Any]]:
        """All rows, as rows of a CSV file."""
        return [*map(self.record, self.rows), *map(self.peer_record, self.peers)]

    def record(self, row: SweepRow) -> dict[str, Any]:
        """A row as a self-contained row of a CSV file."""
        sweep, said, seen = self.sweep, row.predicted, row.measured
        return {
            **self._setting("planner", row.planner, row.target.label),
            "budget_bytes": row.target.nbytes,
            "feasible": row.plan is not None,
            "numerics": numerics(row.plan.actions) if row.plan else None,
            "cramped": said.cramped if said else None,
            "smallest_bytes": row.smallest,
            "predicted_peak_bytes": said.peak[sweep.home] if said else None,
            "predicted_seconds": said.seconds if said else None,
            "predicted_overhead": overhead(said, sweep.plain),
            "measured_peak_bytes": seen.peak[sweep.home] if seen else None,
            "measured_seconds": seen.seconds if seen else None,
            "measured_overhead": overhead(seen, outcome_of(self.reference)),
            "overhead_over": "plain",
            "identical": row.identical,
            "solve_seconds": row.plan.solve_seconds if row.plan else None,
            "setup_seconds": None,
            "problem": row.problem,
        }

    def peer_record(self, row: PeerRow) -> dict[str, Any]:
        """The same columns for a peer: nothing is predicted, and its overhead is over its own unlimited run."""
        seen, own = row.seen, self._unlimited(row.variant.family)
        blank = dict.fromkeys(
            (
                "budget_bytes",
                "numerics",
                "cramped",
                "smallest_bytes",
                "predicted_peak_bytes",
                "predicted_seconds",
                "predicted_overhead",
            )
        )
        return {
            **self._setting("peer", row.variant.peer, row.variant.setting),
            **blank,
            "feasible": seen is not None,
            "measured_peak_bytes": seen.peak if seen else None,
            "measured_seconds": seen.seconds if seen else None,
            "measured_overhead": seen.seconds / own.seen.seconds - 1 if seen and own and own.seen else None,
            "overhead_over": str(own.variant) if own else None,
            "identical": row.identical,
            "solve_seconds": None,
            "setup_seconds": seen.setup_seconds if seen else None,
            "problem": row.problem,
        }

    def _unlimited(self, family: str) -> PeerRow | None:
        return next((r for r in self.peers if r.variant.unlimited and r.variant.family == family), None)

    def _setting(self, kind: str, name: str, budget: str) -> dict[str, Any]:
        sweep = self.sweep
        return {
            "model": sweep.workload.source.name,
            "batch": sweep.workload.batch,
            "seq": sweep.workload.seq,
            "dtype": sweep.workload.dtype,
            "precision": sweep.workload.precision,
            "optimizer": sweep.workload.optimizer,
            "hardware": sweep.machine.name,
            **versions(),
            "commit": sweep.commit,
            "seed": 0,
            "kind": kind,
            "planner": name,
            "budget": budget,
        }


def numerics(actions: Iterable[Action]) -> str:
    """What a plan does to the numbers: the same bits, the same within a stated tolerance, or others."""
    done = list(actions)
    if all(action.exact for action in done):
        return "exact"
    return "close" if {action.name for action in done} <= allowed_by_default() else "lossy"


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on; empty: not installed."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("holdall", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def prepare_sweep(
    workload: Workload,
    machine: Hardware,
    *,
    planners: Sequence[PlanChoice],
    budgets: str,
    measure: bool,
    progress: Progress,
    peers: Sequence[Peer] = (),
    commit: str = "",
) -> Sweep:
    """Trace the model and turn fractions into bytes."""
    progress(f"tracing {workload.source.name}", 0, 0, "")
    trace = workload.trace(machine.device)
    plain = plain_outcome(trace, machine)
    return Sweep(
        workload=workload,
        machine=machine,
        trace=trace,
        plain=plain,
        planners=planners,
        targets=read_targets(budgets, plain),
        measure=measure,
        peers=peers,
        commit=commit,
    )


def run_sweep(sweep: Sweep, progress: Progress) -> Comparison:
    """Every planner at every budget, and every peer; measured runs are compared with plain training."""
    reference = _measure_plain(sweep, progress) if sweep.measure else None
    pairs = [(choice, target) for target in sweep.targets for choice in sweep.planners]
    variants = all_variants(sweep.peers, [t.nbytes for t in sweep.targets])
    total = len(pairs) + len(variants)
    rows = []
    for done, (choice, target) in enumerate(pairs):
        here = _within(progress, f"{choice.label} at {target.label}", done, total)
        here("", 0, 0, "")
        rows.append(_row(sweep, choice, target, reference, here))
    peers = []
    for done, variant in enumerate(variants, len(pairs)):
        progress(str(variant), done, total, "")
        peers.append(_peer_row(sweep, variant, reference))
    return Comparison(sweep=sweep, rows=rows, reference=reference, peers=peers)


def _within(progress: Progress, what: str, done: int, total: int) -> Progress:
    """A planner's own progress, mapped to its part of the whole sweep."""

    def told(part: str, _done: int, _total: int, best: str) -> None:
        progress(f"{what}: {part}" if part else what, done, total, best)

    return told


def overhead(outcome: Outcome | None, plain: Outcome | None) -> float | None:
    """The extra time of a step as a share of plain training; None: not known."""
    return outcome.seconds / plain.seconds - 1 if outcome and plain else None


def outcome_of(run: RealRun | None) -> Outcome | None:
    """The measured outcome of a run, if there was one."""
    return run.report.measured if run and run.report else None


def read_targets(text: str, plain: Outcome) -> tuple[Target, ...]:
    """100%,50%,3GiB: fractions are of the activation part of the plain peak, sizes are sizes."""
    labels = [part.strip() for part in text.split(",") if part.strip()]
    if not labels:
        raise InvalidInput("`budgets` is empty", hint="write it as `--budgets 100%,50%,3GiB`")
    return tuple(Target(label=label, nbytes=_read_target(label, plain)) for label in labels)


def _read_target(label: str, plain: Outcome) -> int:
    try:
        share = float(label.rstrip("%")) / (100 if label.endswith("%") else 1)
    except ValueError:
        return parse_bytes(label, what="budgets")
    if share > 1 and not label.endswith("%"):
        return parse_bytes(label, what="budgets")  # a whole number of bytes
    if not 0 < share <= 1:
        raise InvalidInput(
            f"`budgets` has {label}, which is not a share of the memory", hint="write 1% to 100%, or a size such as 3GiB"
        )
    return budget_leaving(plain, share)


def _row(sweep: Sweep, choice: PlanChoice, target: Target, reference: RealRun | None, progress: Progress) -> SweepRow:
    """The row of one planner at one budget; an error is recorded in the row."""
    row = SweepRow(planner=choice.label, target=target)
    budget = {sweep.home: target.nbytes}
    try:
        made = plan(
            sweep.trace, budget=budget, planner=choice.name, hardware=sweep.machine, progress=progress, **choice.options
        )
    except Infeasible as error:
        return replace(row, smallest=error.smallest, problem="does not fit")
    except (HoldallError, ImportError) as error:
        return replace(row, problem=error.fact if isinstance(error, HoldallError) else first_line(error))
    except Exception as error:
        return replace(row, problem=_told(error, choice.label), failed=True)
    row = replace(row, plan=made)
    if not sweep.measure:
        return row
    try:
        run = _run(sweep, made)
    except Exception as error:
        return replace(row, problem=_told(error, choice.label), failed=True)
    same = run.equals(reference) if reference is not None else None
    row = replace(row, run=run, identical=same)
    over = row.measured is not None and row.measured.peak[sweep.home] > target.nbytes
    return replace(row, problem="its run went over the budget", failed=True) if over else row


def _peer_row(sweep: Sweep, variant: Variant, reference: RealRun | None) -> PeerRow:
    if sweep.workload.precision is not None:
        return PeerRow(variant=variant, problem=f"peers do not know {sweep.workload.precision}")
    device = sweep.machine.device
    try:
        model, optimizer = sweep.workload.build(device)
        subject = Subject.of(sweep.trace, model, sweep.workload.sample(device))
        seen = run_peer(variant, subject, optimizer, _batches(sweep))
    except Exception as error:
        return PeerRow(variant=variant, problem=_told(error, str(variant)))
    same = seen.losses == reference.losses if reference is not None else None
    return PeerRow(variant=variant, seen=seen, identical=same)


def _told(error: Exception, who: str) -> str:
    log.debug("%s failed", who, exc_info=error)
    return reason(error)


def _measure_plain(sweep: Sweep, progress: Progress) -> RealRun | None:
    progress("measuring plain training", 0, 0, "")
    try:
        return _run(sweep, plan(sweep.trace, planner="nop", hardware=sweep.machine))
    except Infeasible:
        return None


def _run(sweep: Sweep, made: Plan) -> RealRun:
    device = sweep.machine.device
    model, optimizer = sweep.workload.build(device)
    return run_steps(model, optimizer, _batches(sweep), plan=made)


def _batches(sweep: Sweep) -> Iterator[dict[str, torch.Tensor]]:
    return (sweep.workload.sample(sweep.machine.device, seed=step) for step in range(STEPS))
