"""What a real run reserves for what is live: today's allocator (expandable segments) and arenas with planned offsets.

python benchmarks/layouts_on_gpu.py [--model gpt2] [--batch 8] [--seq 1024] [--precision bf16] [--budgets 6GiB,4GiB]
                                    [--layouts none,none,best_fit,stalloc] [--steps 30] [--minutes 8] [--out FILE]
                                    [--commit HASH] [--smoke]

Every cell is one call of `holdall.fit`, from the same weights and with the same batches, in one process: its plan, and then
steps in the user's own loop. Budgets: sizes, or "half", which leaves half of plain training's activation memory. Reserved and
live bytes are those at the peak of the last step, by torch's own counters; live bytes are without what lies idle in the arena.
Tokens per second are the median of the steps after the arena was in use; halts, of the allocator, are counted in these. A row
says whether its losses are those of the first cell at its budget, and by what share they differ at most; `none` runs twice,
since some kernels add in no certain order and a plan with a layout may divide the vocabulary head otherwise. `--smoke`: a tiny
model on the CPU, where torch's allocator reserves what is live.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import holdall
from holdall.api import environment
from holdall.errors import HoldallError
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.experiments.workload import Workload, describe_workload
from holdall.problem import resolve_hardware
from holdall.units import GiB, parse_bytes

WARM = 3  # steps: the first one is recorded, the second is the first one in the arena


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--budgets", default="half")
    parser.add_argument("--layouts", default="none,none,best_fit,stalloc")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell is begun after so many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/layouts_on_gpu.csv"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.model, options.batch, options.seq, options.steps = "tiny-gpt2", 2, 32, 6
        options.out = options.out.with_name("layouts_smoke.csv")
    device = "cpu" if options.smoke else "cuda"
    optimizer = "adamw" if options.smoke else "adamw:fused=True"
    given = {"dtype": "float32", "optimizer": optimizer, "precision": options.precision}
    workload = describe_workload(options.model, batch=options.batch, seq=options.seq, **given)
    about = {**environment(), "commit": options.commit or commit(), "cpu": platform.processor() or platform.machine()}
    began, rows = time.monotonic(), []
    for budget in sizes_of(options.budgets, workload, device):
        first: list[float] | None = None
        for layout in options.layouts.split(","):
            if time.monotonic() - began > 60 * options.minutes:
                print("no time is left", flush=True)
                break
            row, losses = cell(workload, device, budget, layout, options)
            first = losses if first is None else first
            row["same_losses"] = losses == first
            row["losses_differ_by"] = max((abs(a / b - 1) for a, b in zip(losses, first, strict=False)), default="")
            rows.append({**row, **about})
            print(line(row), flush=True)
            write(options.out, rows)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def sizes_of(typed: str, workload: Workload, device: str) -> list[int]:
    found = []
    for text in typed.split(","):
        if text == "half":
            machine = resolve_hardware(None, device)
            found.append(budget_leaving(plain_outcome(workload.trace(device), machine), 0.5))
        else:
            found.append(parse_bytes(text))
    return found


def cell(
    workload: Workload, device: str, budget: int, layout: str, options: argparse.Namespace
) -> tuple[dict[str, object], list[float]]:
    """One row, and the losses of its steps."""
    gc.collect()
    row: dict[str, object] = {
        "model": options.model,
        "batch": options.batch,
        "seq": options.seq,
        "precision": options.precision or "fp32",
        "planner": options.planner,
        "budget_bytes": budget,
        "layout": layout,
    }
    row |= dict.fromkeys(FIELDS, "")
    model, optimizer = workload.build(device)
    model.train()
    batches = [workload.sample(device, seed) for seed in range(2)]
    began, losses = time.perf_counter(), []
    home = "gpu" if device == "cuda" else "cpu"
    given: dict[str, Any] = {"budget": {home: budget}, "planner": options.planner, "precision": options.precision}
    try:
        harness = holdall.fit(model, optimizer, batches[0], layout=None if layout == "none" else layout, **given)
    except HoldallError as error:
        row["error"] = str(error).splitlines()[0]
        return row, losses
    with harness:
        row["fit_seconds"] = round(time.perf_counter() - began, 2)
        predicted = harness.plan.predicted
        row |= {"predicted_live": predicted.peak[home], "predicted_reserved": predicted.reserved or ""}
        row["predicted_seconds"] = round(predicted.seconds, 5)
        torch.manual_seed(0)
        pauses = 0
        try:
            for n in range(options.steps):
                if n == WARM:
                    pauses = halts(device)
                losses.append(step(model, batches[n % 2], optimizer))
                if layout == "none" or harness.arena.size:  # not in the first step of a plan
                    row |= used(harness, device)
        except (RuntimeError, HoldallError) as error:
            row["error"] = f"step {len(losses)}: {str(error).splitlines()[0]}"
        seconds = harness.step_seconds[WARM:]
        row["step_seconds"] = round(statistics.median(seconds), 5) if seconds else ""
        row["tokens_per_second"] = round(options.batch * options.seq / statistics.median(seconds), 1) if seconds else ""
        row |= {"slowest_step": round(max(seconds), 5), "halts": halts(device) - pauses} if seconds else {}
        row["notes"] = "; ".join(harness.notes)
    del model, optimizer, batches, harness
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return row, losses


FIELDS = (
    *("fit_seconds", "predicted_live", "predicted_reserved", "reserved_bytes", "live_bytes", "reserved_over_live"),
    *("arena_bytes", "arena_idle", "placed", "missed", "outside_bytes"),
    *("predicted_seconds", "step_seconds", "slowest_step", "halts"),
    "tokens_per_second",
    *("same_losses", "losses_differ_by", "notes", "error"),
)


def halts(device: str) -> int:
    """How often the allocator has waited for the device, to give memory back and ask again."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if device == "cuda" else 0


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer | None) -> float:
    assert optimizer is not None
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def used(harness: holdall.Harness, device: str) -> dict[str, object]:
    """Bytes at the peak of the step that has just ended."""
    arena = harness.arena
    idle = arena.idle if arena is not None else 0
    if device == "cuda":
        reserved, live = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated() - idle
    else:
        live = harness.all_peaks[-1]
        reserved = live + idle
    found: dict[str, object] = {"reserved_bytes": reserved, "live_bytes": live, "reserved_over_live": round(reserved / live, 5)}
    if arena is not None:
        counts = arena.counts
        found |= {"arena_bytes": arena.size, "arena_idle": idle, "placed": counts.placed, "missed": counts.missed}
        found["outside_bytes"] = counts.outside
    return found


def line(row: dict[str, object]) -> str:
    def gib(name: str) -> str:
        return f"{int(str(row[name])) / GiB:.3f}" if row[name] != "" else "--"

    same = "the same" if row["same_losses"] else f"differ by {row['losses_differ_by']:.1e}"
    told = row["error"] or f"{row['tokens_per_second']} tokens/s, losses {same}"
    ratio, where = row["reserved_over_live"], f"{row['model']} in {gib('budget_bytes')} GiB"
    placed = f", {row['placed']} placed, {row['missed']} not" if row["placed"] != "" else ""
    return f"{where}: {row['layout']}: reserved {gib('reserved_bytes')} GiB, live {gib('live_bytes')}, {ratio}{placed}; {told}"


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
