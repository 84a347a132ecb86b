"""How long tracing and planning take, and how much memory tracing needs: an 8B shape for a GPU, on a laptop.

An 8B shape whose states fit neither an A100 nor the host beside it, divided between the two:
holdall plan llama-3.1-8b --seq 4096 --dtype bf16-mixed --gpu a100-80gb --budget gpu=80GiB,cpu=64GiB

python benchmarks/planning.py [--out benchmarks/results/planning.csv] [--models llama-3.1-8b,gpt2-xl] [--planners auto,rockmate]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import resource
import subprocess
import time
from pathlib import Path

import torch

import holdall
from holdall import models
from holdall.api import environment
from holdall.machine.presets import gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/planning.csv")
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--planners", default="auto,rockmate,rotor")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {**environment(), "commit": commit.stdout.strip(), "cpu": platform.processor() or platform.machine()}
    rows = []
    for name in options.models.split(","):
        source = models.describe(name)
        model = models.build(source, device="meta", dtype="bfloat16")
        batch = models.sample_batch(source, batch=options.batch, seq=options.seq)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        began = time.perf_counter()
        trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda")
        traced = time.perf_counter() - began
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
        plain = holdall.plan(trace, planner="nop", hardware=gpu("h200")).predicted
        fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
        for planner, share in itertools.product(options.planners.split(","), (75, 50)):
            budget = fixed + (plain.peak["gpu"] - fixed) * share // 100
            began = time.perf_counter()
            try:
                plan = holdall.plan(trace, planner=planner, budget=budget, hardware=gpu("h200"))
                said = plan.summary()
            except holdall.Infeasible as refused:
                said = refused.fact
            row = {
                "model": name,
                "batch": options.batch,
                "seq": options.seq,
                "ops": len(trace.ops),
                "trace_s": round(traced, 2),
                "trace_rss_gib": round(resident, 2),
                "planner": planner,
                "share": share,
                "plan_s": round(time.perf_counter() - began, 2),
                "said": said,
            }
            rows.append(row)
            print(row)
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


if __name__ == "__main__":
    main()
