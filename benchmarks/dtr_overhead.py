"""What online eviction costs per op, beside the ops themselves and beside what it recomputes.

    python benchmarks/dtr_overhead.py [--steps 5] [--out FILE.csv]

A transformer-like stack on the CPU: plainly, under the policy with room for everything, and under each policy at 70 % of what
plain training adds. `handling_us` is time in the runtime per op, the op itself left out; where storages are evicted it contains
the ops that are run again. The ledger's counting is part of all seconds.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time

import torch
from torch import nn

import holdall
from holdall.errors import Infeasible
from holdall.testing.worlds import machine


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()


def measure(plan: holdall.Plan, model: nn.Module, x: torch.Tensor, steps: int) -> dict[str, float]:
    with holdall.apply(plan, model) as harness:
        for n in range(steps + 2):
            if n == 2:  # shapes are known from here on
                for context in harness.contexts:
                    context.ops, context.seconds = 0, 0.0
                began = time.perf_counter()
            model.zero_grad()
            loss = model(x)
            loss.backward()
        seconds = (time.perf_counter() - began) / steps
    if not harness.contexts:
        return {"seconds": seconds, "peak": max(harness.step_peaks)}
    evictor = harness.contexts[0]
    counts = evictor.past[-1]
    return {
        "seconds": seconds,
        "peak": max(harness.step_peaks),
        "ops": evictor.ops / steps,
        "handling_us": 1e6 * evictor.seconds / evictor.ops,
        "evictions": counts.evictions,
        "reruns": counts.reruns,
        "recomputed": counts.again / counts.useful,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.manual_seed(0)
    model, x = Stack(given.width, given.depth), torch.randn(256, given.width)
    trace = holdall.trace(model, x)
    plain = holdall.plan(trace, planner="nop", hardware=machine())
    before = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    tight = before + (plain.predicted.peak["cpu"] - before) * 7 // 10
    plans = {"plain": plain, "dtr, roomy": holdall.plan(trace, planner="dtr", hardware=machine(), always=True)}
    for planner in ("dtr", "megtaichi", "coop"):
        try:
            plans[f"{planner}, 70 %"] = holdall.plan(trace, planner=planner, hardware=machine(), budget=tight)
        except Infeasible as error:
            print(f"{planner}: {error.fact}")
    rows = []
    for name, plan in plans.items():
        runs = [measure(plan, model, x, given.steps) for _ in range(3)]
        row = {"policy": name, **runs[0], "seconds": statistics.median(r["seconds"] for r in runs)}
        if "handling_us" in runs[0]:
            row["handling_us"] = statistics.median(r["handling_us"] for r in runs)
        rows.append(row)
        shown = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "policy")
        print(f"{name:<16} {shown}")
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    if given.out:
        with open(given.out, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[-1]), restval="")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
