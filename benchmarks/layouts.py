"""What layouts and allocators reserve for planned steps of model families, and how long each takes to find. Simulated.

Every model is planned by `auto` for a budget that leaves half of plain training's activation memory, or for the budgets named
after it; all layouts are found in one process with one thread. Rows of the models named replace their old ones.

python benchmarks/layouts.py [--models gpt2:8x1024,llama-3.2-3b:1x2048:24GiB:8GiB] [--out benchmarks/results/layouts.csv]
                             [--apart]

`--apart` prints what an arena would take that holds the engine's buffers alone, beside torch's allocator for all others: what
could be done where no compiler is. No file is written.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from holdall.analysis import compare_layouts
from holdall.api import environment, plan
from holdall.cost.roofline import cost_trace
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.experiments.workload import describe_workload
from holdall.layouts.best_fit import BestFit
from holdall.layouts.expandable import ExpandableLayout
from holdall.machine.presets import gpu
from holdall.planning.finish import with_traced
from holdall.registry import member_classes
from holdall.simulator.lifetimes import PlannedStep
from holdall.types import Plan, Problem
from holdall.types.arena import lay_out
from holdall.types.lifetimes import StepLifetimes
from holdall.units import format_bytes, parse_bytes

MODELS = (
    "gpt2:8x1024,llama-3.2-3b:1x2048:24GiB:8GiB,qwen2.5-0.5b:2x1024,opt-125m:8x1024,pythia-160m:8x1024,bert-base:16x512,"
    "t5-base:8x512,vit-base:64x1,resnet-50:64x1,vgg-16:32x1,inception-v3:32x1"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/layouts.csv"))
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    if options.apart:
        for typed in options.models.split(","):
            print_apart(typed, options.gpu)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {**environment(), "commit": commit.stdout.strip(), "cpu": platform.processor() or platform.machine()}
    for typed in options.models.split(","):
        rows = [{**row, **about} for row in rows_of(typed, options.gpu)]
        write(options.out, rows)


def planned(typed: str, name: str) -> Iterator[tuple[Problem, Plan, int, int]]:
    """The plans of a model, given as NAME:BATCHxSEQ and budgets, with its rows and tokens."""
    model, shape, *budgets = typed.split(":")
    batch, seq = map(int, shape.split("x"))
    workload = describe_workload(model, batch=batch, seq=seq, dtype="float32", optimizer="adamw", precision="bf16")
    machine = gpu(name)
    trace = workload.trace(machine.device)
    sizes = [parse_bytes(text) for text in budgets] or [budget_leaving(plain_outcome(trace, machine), 0.5)]
    for size in sizes:
        budget = {machine.home.name: size}
        made = plan(trace, budget=budget, planner="auto", hardware=machine)
        yield Problem(trace=cost_trace(trace, machine), hardware=machine, budget=budget), made, batch, seq


def print_apart(typed: str, name: str) -> None:
    """Reserved for live bytes: by torch's allocator, and with the engine's buffers in an arena of their own, by best fit."""
    for problem, made, _, _ in planned(typed, name):
        lifetimes, _ = PlannedStep.of(problem, with_traced(problem, made.actions)).run()
        known, seen = problem.trace.tensors, set[int]()
        buffers, again = set[int](), set[int]()
        for number, tensor in enumerate(lifetimes.tensors):
            if tensor.begin > 0 and tensor.key >= 0:
                (buffers if tensor.key not in known else again if tensor.key in seen else set()).add(number)
            seen.add(tensor.key)

        def only(numbers: Iterable[int], lifetimes: StepLifetimes = lifetimes) -> StepLifetimes:
            return replace(lifetimes, tensors=tuple(lifetimes.tensors[n] for n in sorted(numbers)), dynamic=frozenset())

        every = set(range(len(lifetimes.tensors)))
        size, live = format_bytes(problem.budget[problem.home]), lifetimes.load
        print(f"{typed.partition(':')[0]} {size}: torch's allocator {ExpandableLayout()(lifetimes).reserved / live:.3f}")
        for label, chosen in {"the engine's buffers": buffers, "these and what is computed again": buffers | again}.items():
            apart = lay_out(BestFit(), only(chosen), 0).reserved if chosen else 0
            others = ExpandableLayout()(only(every - chosen)).reserved
            print(f"  {label} apart: {(apart + others) / live:.3f}", flush=True)


def rows_of(typed: str, name: str) -> list[dict[str, object]]:
    """The rows of one model, given as NAME:BATCHxSEQ and budgets."""
    model, rows = typed.partition(":")[0], []
    for problem, made, batch, seq in planned(typed, name):
        size = problem.budget[problem.home]
        for row in compare_layouts(problem, made.actions, [member() for member in member_classes("layouts")]):
            print(f"{model} {format_bytes(size)}: {row.name} {row.ratio:.4f} in {row.seconds:.2f} s", flush=True)
            rows.append(
                {
                    "model": model,
                    "batch": batch,
                    "seq": seq,
                    "precision": "bf16",
                    "gpu": name,
                    "budget_bytes": size,
                    "planner": "auto",
                    "layout": row.name,
                    "is_static": row.is_static,
                    "tensors": row.tensors,
                    "live_bytes": row.live,
                    "bound_bytes": row.bound,
                    "reserved_bytes": row.reserved,
                    "reserved_over_live": round(row.ratio, 5),
                    "seconds": round(row.seconds, 3),
                }
            )
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Replace the rows of these models."""
    old: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            old = [dict(row) for row in csv.DictReader(file)]
    models = {row["model"] for row in rows}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*(row for row in old if row["model"] not in models), *rows])


if __name__ == "__main__":
    main()
