"""Planners against budgets: one row per pair, predicted, and measured where real runs are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdall.api import plan
from holdall.cli._errors import first_line
from holdall.cli._planning import budget_leaving, plain_outcome
from holdall.cli._training import Run, run_steps
from holdall.cli._workload import Workload
from holdall.errors import HoldallError, Infeasible, InvalidInput
from holdall.types import Hardware, Outcome, Plan, Progress, Trace
from holdall.units import parse_bytes

STEPS = 3  # of one measured run: the first warms up, the median of the others counts


@dataclass(frozen=True, kw_only=True)
class Target:
    """One budget: as it was written, and in bytes."""

    label: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    planner: str
    target: Target
    plan: Plan | None = None  # None: `problem` says why
    run: Run | None = None  # None: not measured
    identical: bool | None = None  # losses and weights, to those of plain training; None: not compared
    smallest: int | None = None  # where nothing fits: the least budget found to work
    problem: str = ""
    failed: bool = False  # a plan was made, and its run went over the budget

    @property
    def predicted(self) -> Outcome | None:
        return self.plan.predicted if self.plan else None

    @property
    def measured(self) -> Outcome | None:
        return outcome_of(self.run)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is compared, on what. `measure`: also run each plan for a few steps."""

    workload: Workload
    machine: Hardware
    trace: Trace
    plain: Outcome  # predicted
    planners: Sequence[str]
    targets: Sequence[Target]
    measure: bool

    @property
    def home(self) -> str:
        return self.machine.home.name


@dataclass(frozen=True, kw_only=True)
class Comparison:
    sweep: Sweep
    rows: Sequence[Row]
    reference: Run | None  # plain training, measured; None: not asked for, or it does not fit this machine

    def record(self, row: Row) -> dict[str, Any]:
        """A row as a line of a file, with everything that is needed to read it alone."""
        sweep, said, seen = self.sweep, row.predicted, row.measured
        return {
            "model": sweep.workload.source.name,
            "batch": sweep.workload.batch,
            "seq": sweep.workload.seq,
            "dtype": sweep.workload.dtype,
            "optimizer": sweep.workload.optimizer,
            "hardware": sweep.machine.name,
            "torch": torch.__version__,
            "seed": 0,
            "planner": row.planner,
            "budget": row.target.label,
            "budget_bytes": row.target.nbytes,
            "feasible": row.plan is not None,
            "smallest_bytes": row.smallest,
            "predicted_peak_bytes": said.peak[sweep.home] if said else None,
            "predicted_seconds": said.seconds if said else None,
            "predicted_overhead": overhead(said, sweep.plain),
            "measured_peak_bytes": seen.peak[sweep.home] if seen else None,
            "measured_seconds": seen.seconds if seen else None,
            "measured_overhead": overhead(seen, outcome_of(self.reference)),
            "identical": row.identical,
            "solve_seconds": row.plan.solve_seconds if row.plan else None,
            "problem": row.problem,
        }


def prepare_sweep(
    workload: Workload, machine: Hardware, *, planners: Sequence[str], budgets: str, measure: bool, progress: Progress
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
    )


def run_sweep(sweep: Sweep, progress: Progress) -> Comparison:
    """Every planner at every budget; measured runs are compared with plain training."""
    reference = _measure_plain(sweep, progress) if sweep.measure else None
    pairs = [(name, target) for target in sweep.targets for name in sweep.planners]
    rows = []
    for done, (name, target) in enumerate(pairs):
        progress(f"{name} at {target.label}", done, len(pairs), "")
        rows.append(_row(sweep, name, target, reference))
    return Comparison(sweep=sweep, rows=rows, reference=reference)


def overhead(outcome: Outcome | None, plain: Outcome | None) -> float | None:
    """How much longer a step takes than plain training, as a share of it; None: not known."""
    return outcome.seconds / plain.seconds - 1 if outcome and plain else None


def outcome_of(run: Run | None) -> Outcome | None:
    """What was measured in a run, if there was one."""
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
        raise InvalidInput(f"`budgets` has {label}, which is no share", hint="write 1% to 100%, or a size such as 3GiB")
    return budget_leaving(plain, share)


def _row(sweep: Sweep, name: str, target: Target, reference: Run | None) -> Row:
    try:
        made = plan(sweep.trace, budget={sweep.home: target.nbytes}, planner=name, hardware=sweep.machine)
    except Infeasible as error:
        return Row(planner=name, target=target, smallest=error.smallest, problem="does not fit")
    except (HoldallError, ImportError) as error:
        fact = error.fact if isinstance(error, HoldallError) else first_line(error)
        return Row(planner=name, target=target, problem=fact)
    if not sweep.measure:
        return Row(planner=name, target=target, plan=made)
    try:
        run = _run(sweep, made)
    except torch.OutOfMemoryError as error:
        return Row(planner=name, target=target, plan=made, problem=f"ran out of memory: {first_line(error)}", failed=True)
    same = run.equals(reference) if reference is not None else None
    row = Row(planner=name, target=target, plan=made, run=run, identical=same)
    over = row.measured is not None and row.measured.peak[sweep.home] > target.nbytes
    return replace(row, problem="its run went over the budget", failed=True) if over else row


def _measure_plain(sweep: Sweep, progress: Progress) -> Run | None:
    progress("measuring plain training", 0, 0, "")
    try:
        return _run(sweep, plan(sweep.trace, planner="nop", hardware=sweep.machine))
    except Infeasible:
        return None


def _run(sweep: Sweep, made: Plan) -> Run:
    device = sweep.machine.device
    model, optimizer = sweep.workload.build(device)
    batches = (sweep.workload.sample(device, seed=step) for step in range(STEPS))
    return run_steps(model, optimizer, batches, plan=made)
