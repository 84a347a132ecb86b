"""Techniques that shrink bytes, each alone and together with the engine at smaller budgets, on one GPU in one process.

python benchmarks/shrink_on_gpu.py --commit $(git rev-parse --short HEAD) [--time-limit 300] [--out shrink_on_gpu.csv]

Llama 3.2 3B, bf16 parameters, 4 x 4096 tokens. Each row is written as soon as it is there; rows for which there was no time are
named at the end. `--tiny`: the same on a CPU with a tiny model, in float32.

alone      the optimizer or technique with nothing else but the chunked head; peak by the allocator (a CPU: by the ledger)
combined   the planner `auto` at a budget, with the technique; gradients are used up in backward wherever that is said. Where
           that does not fit, because weights and states stay on the device, or is said to be slower, they are placed too
           (LOMO's rule is then SGD's). Compression is one means beside others: `actions` says how many blocks have it.
           A plan that runs out of memory after all is made once more for 5 % less, as `fit` would; the row says so

`--folder`: traces and plans go there, and those that are there are used.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import holdall
from holdall import models
from holdall.actions.in_backward import used_up
from holdall.api import environment
from holdall.cost.roofline import cost_trace
from holdall.experiments.ladder_plans import decide
from holdall.experiments.request import needed_bytes
from holdall.optim import in_backward
from holdall.optim._math.adam8bit_fused import is_there
from holdall.optim._math.quantise import ON_GPU
from holdall.optim.adam8bit import Adam8bit
from holdall.optim.galore import GaLore
from holdall.optim.lomo import Lomo
from holdall.runtime.budget.ledger import Ledger
from holdall.runtime.head.lazy_logits import chunk_head, head_of, rows_for
from holdall.types import Hardware, Plan, Problem, Trace
from holdall.updates.stretches import piece_of


@dataclass(frozen=True)
class Method:
    optimizer: str
    in_backward: bool = False
    compress: bool = False  # activations in 4 bits
    placed: str = ""  # the optimizer whose states and weights may be placed, where that is better
    traced: bool = True  # false: its update, not fused, has too many ops; the planner is told of so many bytes less


METHODS = {
    "adamw": Method("adamw"),
    "adamw in backward": Method("adamw", in_backward=True),
    "galore": Method("galore"),
    "galore in backward": Method("galore", in_backward=True, placed="galore"),
    "adam8bit": Method("adam8bit", traced=is_there()),
    "adam8bit in backward": Method("adam8bit", in_backward=True, placed="adam8bit" if is_there() else "", traced=is_there()),
    "lomo": Method("lomo", in_backward=True, placed="sgd"),
    "actnn": Method("adamw", compress=True),
    "actnn and lomo": Method("lomo", in_backward=True, compress=True, placed="sgd"),
}
_PATIENCE = 10.0  # seconds of a step; a device's time is dear
_TIGHTER = 0.95  # of a budget, for a plan that ran out of memory
_KERNELS = 128 * 2**20  # bytes that kernels may take which rows load after the plans are made
COMBINED = ("adamw", "lomo", "galore in backward", "adam8bit in backward", "adamw in backward", "actnn and lomo")
BUDGETS = (24, 16, 12, 8)  # GiB; weights take 6, AdamW's moments in bf16 12, 8-bit ones 6
TINY = {24: 4, 16: 3, 12: 2.5, 8: 1.5}  # MiB
FIELDS = (
    "method", "kind", "budget_gib", "tokens_per_s", "step_s", "peak_gib", "device_gib", "predicted_gib", "predicted_s",
    "host_gib", "state_gib", "fits", "actions", "solve_s", "losses", "why", "retries",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A plan for a combined row."""

    name: str
    limit: int
    kept: int = 0  # bytes of it that are not the plan's
    placed: bool = False  # an alternative to the method as it is

    @property
    def method(self) -> Method:
        usual = METHODS[self.name]
        return Method(usual.placed, compress=usual.compress) if self.placed else usual

    @property
    def file(self) -> str:
        return f"{self.name.replace(' ', '-')}-{self.limit}{'-placed' if self.placed else ''}.json"


def choose(folder: Path, asked: Asked) -> int:
    """Plan a row, in a process of its own. Returns the bytes that the plan needs, be they there or not."""
    if (folder / asked.file).exists():
        return needed_bytes(Plan.load(folder / asked.file).predicted) + asked.kept
    hardware, method = Hardware.load(folder / "hardware.json"), asked.method
    trace = Trace.load(folder / trace_file(method.optimizer if method.traced else ""))
    problem = pose(trace if method.traced else used_up(trace), hardware, asked.limit - asked.kept, method)
    plan = decide(problem, "auto", {}, in_backward=method.in_backward and method.traced)
    plan.save(folder / asked.file)
    return needed_bytes(plan.predicted) + asked.kept


def pose(trace: Trace, hardware: Hardware, limit: int | None, method: Method) -> Problem:
    home = hardware.home
    allow = {"keep", "head", "recompute", "offload"}
    if method.compress:
        allow.add("compress")
    if not method.in_backward:
        allow.add("place")
    budget = {home.name: home.capacity if limit is None else limit}
    return Problem(trace=trace, hardware=hardware, budget=budget, allow=frozenset(allow), reads_gradients=False)


def trace_file(optimizer: str) -> str:
    return f"trace-{_traced_as(optimizer) or 'none'}.json"


def _traced_as(optimizer: str) -> str:
    """LOMO's step is SGD's, whose numbers it has."""
    return "sgd" if optimizer == "lomo" else optimizer


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cpu" if options.tiny else "cuda"
        self.unit = 2**20 if options.tiny else 2**30  # what budgets and peaks are counted in
        self.began = time.perf_counter()
        source = models.describe("tiny-llama" if options.tiny else "llama-3.2-3b")
        self.model = models.build(source, device=self.device, dtype="float32" if options.tiny else "bfloat16")
        rows, length = (2, 32) if options.tiny else (options.batch, options.seq)
        self.batch = models.sample_batch(source, batch=rows, seq=length, device=self.device)
        self.tokens = rows * length
        self.head = max(8, self.tokens // 4) if options.tiny else rows_for(self.tokens, source.config.vocab_size)
        self.traces: dict[str, Any] = {}
        self._place = TemporaryDirectory()  # of traces and plans, where no other is given; gone when this is
        self.folder = Path(options.folder or self._place.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.needs: dict[Asked, int] = {}  # what was planned, in the order in which it is tried
        self.hardware: Any = None
        self.about = {
            **environment(), "commit": options.commit, "model": source.name, "batch": rows, "seq": length,
            "dtype": str(next(self.model.parameters()).dtype), "steps": options.steps, "unit": "MiB" if options.tiny else "GiB",
        }  # fmt: skip

    # what is trained

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        params = self.model.parameters()
        if name == "adam8bit":
            return Adam8bit(Adam8bit.groups(self.model), lr=1e-5)
        if name == "galore":
            rank = 8 if self.options.tiny else 256
            return GaLore(GaLore.groups(self.model, rank=rank, basis="iteration"), lr=1e-4)
        if name == "lomo":
            return Lomo(params, lr=1e-5)
        if name == "sgd":
            return torch.optim.SGD(params, lr=1e-5)
        return torch.optim.AdamW(params, lr=1e-5, fused=True)

    def states(self, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of state from the second step on."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if hasattr(optimizer, "state_bytes"):
            return sum(optimizer.state_bytes(p) for p in every)
        return sum(2 * p.nbytes for p in every) if isinstance(optimizer, torch.optim.AdamW) else 0

    def trace(self, optimizer: str) -> Any:
        """Of a step with this optimizer, or with none."""
        name = _traced_as(optimizer)
        known = self.folder / "hardware.json", self.folder / trace_file(optimizer)
        if name not in self.traces and all(file.exists() for file in known):
            self.hardware, self.traces[name] = Hardware.load(known[0]), Trace.load(known[1])
        if name not in self.traces:
            began = time.perf_counter()
            made = self.optimizer(name) if name else None
            traced = holdall.trace(self.model, self.batch, optimizer=made, head=self.head)
            self.hardware = self.hardware or self._probe()
            self.traces[name] = cost_trace(traced, self.hardware)
            self.traces[name].save(self.folder / trace_file(optimizer))
            print(
                f"traced {name or 'without an optimizer'}: {len(traced.ops)} ops, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
        return self.traces[name]

    def _probe(self) -> Hardware:
        found = holdall.probe(self.device, quick=True)
        return replace(found, context=found.context + _KERNELS) if found.device == "cuda" else found

    # rows

    def alone(self, name: str) -> dict[str, Any]:
        method = METHODS[name]
        if method.compress:
            trace = self.trace("")
            problem = self.problem(trace, None, method)
            plan = decide(problem, "actnn", {"bits": 4.0})
            return self.run(method, plan, budget=None)
        return self.run(method, None, budget=None)

    def combined(self, name: str, budget: float) -> dict[str, Any]:
        limit = round(budget * self.unit)
        needs = {asked: size for asked, size in self.needs.items() if (asked.name, asked.limit) == (name, limit)}
        fitting = [asked for asked, size in needs.items() if size <= limit]
        found = sorted(fitting, key=lambda asked: Plan.load(self.folder / asked.file).predicted.seconds)
        if not found:
            return {"why": f"nothing fits; the least found needs {min(needs.values()) / self.unit:.2f}"}
        try:
            return self.run_planned(found[0], limit)
        except torch.OutOfMemoryError as error:
            traceback.print_exception(error, limit=-12)
            first = str(error).split(". ")[1]
        self.clean()
        for asked in (replace(one, limit=round(_TIGHTER * limit)) for one in found):
            if choose(self.folder, asked) <= asked.limit:
                row = self.run_planned(asked, limit)
                return row | {"why": f"planned for {_TIGHTER:.0%}: the first plan ran out ({first})"}
        return {"why": f"the first plan ran out ({first}), and nothing fits {_TIGHTER:.0%}"}

    def run_planned(self, asked: Asked, limit: int) -> dict[str, Any]:
        plan = Plan.load(self.folder / asked.file)
        print(f"{asked.name} at {limit / self.unit:g}: {plan.summary()}", flush=True)
        if plan.predicted.seconds > _PATIENCE:
            return {"why": f"not run: said to take {plan.predicted.seconds:.0f} s a step"}
        return self.run(asked.method, plan, budget=limit)

    def plan_all(self, jobs: Sequence[tuple[str, float | None]]) -> None:
        """The plans of all combined rows, in processes side by side: the device waits for the longest alone."""
        every = []
        for name, budget in jobs:
            if budget is not None:
                method, limit = METHODS[name], round(budget * self.unit)
                every.append(Asked(name, limit, 0 if method.traced else self._kept_free(method)))
                every += [Asked(name, limit, placed=True)] if method.placed else []
        for asked in every:
            self.trace(asked.method.optimizer if asked.method.traced else "")
        if not every:
            return
        began = time.perf_counter()
        self.hardware.save(self.folder / "hardware.json")
        workers = max(1, min(len(every), (os.cpu_count() or 1) // 2))
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            self.needs = dict(zip(every, pool.map(partial(choose, self.folder), every), strict=True))
        print(f"{len(every)} plans in {time.perf_counter() - began:.1f} s", flush=True)

    def _kept_free(self, method: Method) -> int:
        """Bytes for an update that is not in the trace: its states, and a stretch of values, gradient, moments and codes."""
        optimizer = self.optimizer(method.optimizer)
        piece = min(piece_of(torch.device(self.device), on_gpu=ON_GPU), max(p.numel() for p in self.model.parameters()))
        return self.states(optimizer) + 48 * piece

    def problem(self, trace: Any, limit: int | None, method: Method) -> Problem:
        self.hardware = self.hardware or self._probe()
        return pose(trace, self.hardware, limit, method)

    def run(self, method: Method, plan: Any, *, budget: int | None) -> dict[str, Any]:
        optimizer = self.optimizer(method.optimizer)
        before = self.retries()
        by_plan = plan is not None and any(a.name == "in_backward" for a in plan.actions)
        consumes = getattr(optimizer, "consumes_gradients", False)
        with ExitStack() as stack:
            if consumes:
                stack.callback(optimizer.close)
            elif method.in_backward and not by_plan:
                stack.enter_context(in_backward(optimizer))
            if plan is not None:
                whole = method.traced and (budget is not None or not method.compress)
                shown = replace(plan, budget={**plan.budget, next(iter(plan.budget)): budget or 2**50})
                of = optimizer if whole else None
                harness = stack.enter_context(holdall.apply(shown, self.model, of, enforce=budget is not None))
            else:
                harness = None
                stack.callback(chunk_head(head_of(self.model)[1], rows=self.head))
            losses, seconds, peak = self.steps(optimizer, ledger=harness is None)
            measured = harness.measured() if harness is not None else None
            if measured is not None and self.device == "cpu":
                peak = harness.step_peaks[-1]
            row = {
                "tokens_per_s": round(self.tokens / seconds, 1),
                "step_s": round(seconds, 4),
                "peak_gib": round(peak / self.unit, 3),
                "device_gib": self.on_device(),
                "state_gib": round(self.states(optimizer) / self.unit, 3),
                "losses": " ".join(f"{float(x):.4f}" for x in losses),
                "retries": self.retries() - before,
            }
        if plan is not None and method.traced and budget is not None:
            row |= {"predicted_gib": round(next(iter(plan.predicted.peak.values())) / self.unit, 3)}
            row |= {"predicted_s": round(plan.predicted.seconds, 4)}
        if plan is not None:
            row |= {"actions": json.dumps(plan.count()), "solve_s": round(plan.solve_seconds, 1)}
        if measured is not None and len(measured.peak) > 1:
            row["host_gib"] = round(list(measured.peak.values())[1] / self.unit, 3)
        if budget is not None:
            row["fits"] = peak <= budget
        return row

    def steps(self, optimizer: torch.optim.Optimizer, *, ledger: bool) -> tuple[list[torch.Tensor], float, int]:
        """(losses, seconds of a step, peak bytes). The first steps make states, and are not timed."""
        losses, seconds = [], []

        def step() -> None:
            loss = self.model(**self.batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(self.options.warmup):
            step()
        held = [*self.model.parameters(), *self.model.buffers(), *self.batch.values(), *losses]
        held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        watch = Ledger(seed=held) if ledger and self.device == "cpu" else nullcontext()
        self.wait()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with watch as counted:
            for _ in range(self.options.steps):
                began = time.perf_counter()
                step()
                self.wait()
                seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else counted.peak if counted is not None else 0
        return losses, statistics.median(seconds), peak

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def retries(self) -> int:
        """Times that the allocator has come to its limit and given pages back; in a row, those of all its steps."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if self.device == "cuda" else 0

    def on_device(self) -> float | str:
        """What the driver says is taken, by whomever."""
        if self.device == "cpu":
            return ""
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 2**30, 3)

    def clean(self) -> None:
        self.model.zero_grad()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @property
    def left(self) -> float:
        return self.options.time_limit - (time.perf_counter() - self.began)


def wanted(methods: str, kind: str) -> list[tuple[str, float | None]]:
    """(method, GiB; None: alone), in the order of `methods` where those are given."""
    alone = [(name, None) for name in METHODS] if kind != "combined" else []
    combined = [(name, budget) for name in COMBINED for budget in BUDGETS] if kind != "alone" else []
    every: list[tuple[str, float | None]] = [*alone, *combined]
    if not methods:
        return every
    found = []
    for asked in methods.split(","):
        name, _, budget = asked.strip().partition("@")
        these = [job for job in every if job[0] == name and budget in ("", str(job[1]))]
        if not these:
            raise SystemExit(f"there is no row {asked.strip()!r}: methods are {', '.join(METHODS)}")
        found += these
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--commit", default="", help="written into every row")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds after which no further row is begun")
    parser.add_argument("--methods", default="", help="only these, between commas; `lomo@8`: at 8 GiB only")
    parser.add_argument("--kind", default="both", choices=("both", "alone", "combined"))
    parser.add_argument("--folder", default="", help="of traces and plans, to be kept and used again")
    parser.add_argument("--out", default="shrink_on_gpu.csv")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    bench = Bench(options)
    jobs = wanted(options.methods, options.kind)
    if options.tiny:
        jobs = [(name, budget and TINY[budget]) for name, budget in jobs]
    bench.plan_all(jobs)
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *bench.about])
        writer.writeheader()
        for n, (name, budget) in enumerate(jobs):
            if bench.left <= 0:
                print(f"no time for {[f'{m} at {b}' if b else m for m, b in jobs[n:]]}", flush=True)
                break
            row: dict[str, Any] = {
                "method": name,
                "kind": "alone" if budget is None else "combined",
                "budget_gib": budget or "",
            }
            try:
                row |= bench.alone(name) if budget is None else bench.combined(name, budget)
            except Exception as error:  # one row's failure is one row
                if not isinstance(error, holdall.HoldallError):
                    traceback.print_exception(error, limit=-12)
                row["why"] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            writer.writerow({**row, **bench.about})
            file.flush()
            print(json.dumps(row), flush=True)
            bench.clean()


if __name__ == "__main__":
    main()
