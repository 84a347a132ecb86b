"""The runs of `holdall demo`: the same training plain, measured, and under two smaller budgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdall.api import plan, trace
from holdall.errors import Infeasible
from holdall.experiments.demo_model import TinyGPT, batches
from holdall.experiments.real_steps import RealRun, run_steps
from holdall.experiments.request import budget_leaving, needed_bytes, plain_outcome
from holdall.machine.probe import probe
from holdall.reporting import Report
from holdall.types import Hardware, Plan, Progress, Trace
from holdall.units import format_bytes

FRACTIONS = {"half": 0.5, "quarter": 0.25}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of model and batch. A GPU gets a larger one, since its allocator rounds to megabytes."""

    rows: int = 8
    length: int = 128
    width: int = 128
    blocks: int = 6


SIZES = {"cpu": Size(), "cuda": Size(rows=16, length=256, width=512, blocks=12)}


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """One run of the table."""

    name: str
    run: RealRun
    plan: Plan
    identical: bool  # to the untouched model, bit for bit
    note: str = ""

    @property
    def report(self) -> Report:
        assert self.run.report is not None
        return self.run.report

    @property
    def budget(self) -> int:
        return next(iter(self.plan.budget.values()))

    @property
    def predicted(self) -> int:
        return self.plan.predicted.peak[self.report.home]

    @property
    def measured(self) -> int:
        return self.report.latest.peak[self.report.home]

    @property
    def fits(self) -> bool:
        return self.measured <= self.budget

    @property
    def decision(self) -> str:
        """The numbers of blocks kept, recomputed and offloaded, as text."""
        counted = Counter(row.decision for row in self.plan.about.rows)
        return ", ".join(f"{decision} {n}" for decision, n in sorted(counted.items()))


@dataclass(frozen=True, kw_only=True)
class Demo:
    steps: int
    device: str
    planner: str
    allow: list[str] | None
    progress: Progress

    @property
    def size(self) -> Size:
        return SIZES[self.device]

    def rows(self) -> Iterator[DemoRow]:
        """The table, line by line, as the runs end.

        One thread on a CPU: kernels this small gain little from a second one, and lose much if another process needs the core.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if self.device == "cpu" else threads)
        try:
            yield from self._rows()
        finally:
            torch.set_num_threads(threads)

    def _rows(self) -> Iterator[DemoRow]:
        reference = self.train("training untouched")
        machine = probe(self.device, quick=True, progress=self.progress)
        self.progress("tracing", 0, 0, "")
        traced = self.trace()
        needed = plain_outcome(traced, machine)
        plain = plan(traced, budget=needed_bytes(needed), planner="nop", hardware=machine)
        yield self.row("plain", plain, reference)
        for name, fraction in FRACTIONS.items():
            made, note = self.decide(name, traced, machine, budget_leaving(needed, fraction))
            yield self.row(name, made, reference, note)

    def build(self) -> tuple[TinyGPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = TinyGPT(blocks=self.size.blocks, width=self.size.width, length=self.size.length).to(self.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batches(self, steps: int) -> Iterator[dict[str, Any]]:
        return batches(steps=steps, rows=self.size.rows, length=self.size.length, device=self.device)

    def trace(self) -> Trace:
        model, optimizer = self.build()
        return trace(model, next(self.batches(1)), optimizer=optimizer)

    def decide(self, name: str, traced: Trace, machine: Hardware, budget: int) -> tuple[Plan, str]:
        """A plan for the budget, or for the smallest one that works, with the reason."""
        options: dict[str, Any] = {"planner": self.planner, "hardware": machine, "allow": self.allow, "progress": self.progress}
        try:
            return plan(traced, budget=budget, **options), ""
        except Infeasible as error:
            if error.smallest is None:
                raise
            note = f"{name}: nothing fits {format_bytes(budget)}; run with the smallest budget found instead"
            return plan(traced, budget=error.smallest, **options), note

    def row(self, name: str, made: Plan, reference: RealRun, note: str = "") -> DemoRow:
        run = self.train(f"training {name}", made)
        identical = run.equals(reference)
        return DemoRow(name=name, run=self.judged(run, identical), plan=made, identical=identical, note=note)

    def judged(self, run: RealRun, identical: bool) -> RealRun:
        """The run with the comparison written into its report."""
        assert run.report is not None
        word = "identical to" if identical else "different from"
        parity = f"{word} the untouched model, bit for bit ({self.steps} steps, seed 0)"
        return replace(run, report=replace(run.report, parity=parity))

    def train(self, what: str, made: Plan | None = None) -> RealRun:
        model, optimizer = self.build()
        self.progress(what, 0, self.steps, "")
        return run_steps(
            model,
            optimizer,
            self.batches(self.steps),
            plan=made,
            after_step=lambda step: self.progress(what, step, self.steps, ""),
        )
