"""The runs of `holdall ladder`: one real training per rung, on the bundled text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import as_file, files
from typing import Any

import torch

from holdall.api import environment, trace
from holdall.cli._errors import first_line
from holdall.cost.roofline import cost_trace
from holdall.errors import HoldallError
from holdall.experiments.ladder_plans import decide
from holdall.experiments.ladder_rungs import LOSSY, Rung, Settings, climb
from holdall.experiments.real_steps import RealRun, run_steps
from holdall.models import ModelSource, build
from holdall.precision import find
from holdall.problem import resolve_budget
from holdall.training.data import Sequences, load_sequences, make_encoder
from holdall.types import Hardware, Kind, Plan, Problem, Progress


@dataclass(frozen=True, kw_only=True)
class LadderStep:
    """The result of a rung, or why it could not run."""

    rung: Rung
    settings: Settings
    plan: Plan | None = None
    run: RealRun | None = None
    kept: int | None = None  # bytes that the step saves for backward
    identical: bool | None = None  # losses and weights equal those of the rung before; None: not compared
    fits: bool = False
    problem: str = ""

    @property
    def peak(self) -> int | None:
        """Measured peak bytes on the accelerator."""
        report = self.run.report if self.run else None
        return report.measured.peak[report.home] if report and report.measured else None

    @property
    def keeps_its_word(self) -> bool:
        """Is a rung declared exact bitwise equal to the rung before?"""
        return self.identical is not False or self.rung.numerics != "exact"


@dataclass(frozen=True, kw_only=True)
class Ladder:
    source: ModelSource
    machine: Hardware
    batch: int
    seq: int
    steps: int
    budget: Any  # None: half of what plain training takes
    first: Settings = field(default_factory=Settings)  # of the lowest rung
    narrow: bool = True  # with the rungs in bf16
    progress: Progress

    def climb(self, *, everything: bool = True) -> Iterator[LadderStep]:
        """Run the rungs and yield each result; stops at the first that fits, unless `everything`."""
        rungs = list(climb(self.first, narrow=self.narrow))
        text = self._text()
        limit = resolve_budget(self.budget, self.machine)[self.machine.home.name] if self.budget is not None else None
        before: RealRun | None = None
        for n, (rung, settings) in enumerate(rungs):
            self.progress(rung.name, n, len(rungs), "")
            step = self._step(rung, settings, text, limit)
            if step.run is None:
                yield step
                continue
            if limit is None:
                limit = (step.peak or 0) // 2
            identical = step.run.equals(before) if before else None
            step = replace(step, identical=identical, fits=step.peak is not None and step.peak <= limit)
            before = step.run
            yield step
            if step.fits and not everything:
                return

    def recipes(self, names: Sequence[str]) -> Iterator[LadderStep]:
        """Run the lowest rung under each precision recipe instead of its own."""
        text = self._text()
        limit = resolve_budget(self.budget, self.machine)[self.machine.home.name] if self.budget is not None else None
        for n, name in enumerate(names):
            self.progress(name, n, len(names), "")
            rung = Rung(name=name, numerics=LOSSY, says=find(name, alone=False).what, changes={"precision": name})
            step = self._step(rung, replace(self.first, dtype="float32", precision=name), text, None)
            yield replace(step, fits=limit is not None and step.peak is not None and step.peak <= limit)

    def _step(self, rung: Rung, settings: Settings, text: Sequences, limit: int | None) -> LadderStep:
        """Plan and run, or say why not."""
        try:
            made, kept = self._plan(settings, text, limit)
            return LadderStep(rung=rung, settings=settings, plan=made, kept=kept, run=self._run(settings, text, made))
        except HoldallError as error:
            return LadderStep(rung=rung, settings=settings, problem=error.fact)
        except torch.OutOfMemoryError as error:
            return LadderStep(rung=rung, settings=settings, problem=f"ran out of memory: {first_line(error)}")

    def _text(self) -> Sequences:
        with as_file(files("holdall") / "data" / "corpus.txt") as path:
            encoder = make_encoder(self.source.folder)
            return load_sequences(path, encoder, seq=self.seq, vocabulary=self.source.config.vocab_size)

    def _plan(self, settings: Settings, text: Sequences, limit: int | None) -> tuple[Plan, int]:
        """The plan, and the bytes that the step saves for backward without it."""
        model = build(self.source, device="meta", dtype=settings.dtype)
        optimizer = settings.build_optimizer(model)
        batch = text.batch(0, self.batch)
        head = settings.head if isinstance(settings.head, str) else max(1, self.batch * self.seq // settings.head)
        traced = trace(model, batch, optimizer=optimizer, device=self.machine.device, precision=settings.precision, head=head)
        home = self.machine.home
        posed = Problem(
            trace=cost_trace(traced, self.machine),
            hardware=self.machine,
            budget={home.name: home.capacity if limit is None else limit},
            allow=frozenset(settings.allow),
            reads_gradients=not settings.in_backward,
        )
        saved = {s.tensor: traced.tensors[s.tensor] for s in traced.saves}
        kept = sum(t.nbytes for t in saved.values() if t.kind is Kind.ACTIVATION)
        return decide(posed, settings.planner, settings.options, in_backward=settings.in_backward), kept

    def _run(self, settings: Settings, text: Sequences, made: Plan) -> RealRun:
        device = self.machine.device
        model = build(self.source, device=device, dtype=settings.dtype)
        optimizer = settings.build_optimizer(model)
        batches = (text.batch(n * self.batch, self.batch, device) for n in range(self.steps))
        return run_steps(model, optimizer, batches, plan=made)

    def record(self, step: LadderStep) -> dict[str, Any]:
        """A rung as a self-contained row of a CSV file."""
        run, made = step.run, step.plan
        home = self.machine.home.name
        return {
            "rung": step.rung.name,
            "numerics": step.rung.numerics,
            "what": step.rung.says,
            "peak_bytes": step.peak,
            "kept_bytes": step.kept,
            "predicted_peak_bytes": made.predicted.peak[home] if made else None,
            "tokens_per_second": round(self.batch * self.seq / run.seconds, 1) if run else None,
            "first_loss": run.losses[0] if run else None,
            "final_loss": run.losses[-1] if run else None,
            "identical_to_the_rung_before": step.identical,
            "fits": step.fits,
            "optimizer": step.settings.optimizer,
            "precision": step.settings.precision or step.settings.dtype,
            "actions": " ".join(f"{name}:{count}" for name, count in sorted(made.count().items())) if made else "",
            "problem": step.problem,
            "model": self.source.name,
            "batch": self.batch,
            "seq": self.seq,
            "steps": self.steps,
            "seed": 0,
            "hardware": self.machine.name,
            **environment(),
        }
