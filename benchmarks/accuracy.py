"""Predicted against measured peak on the CPU: model families x activation budgets.

python benchmarks/accuracy.py [--out benchmarks/results/accuracy.csv] [--families tied,tiny-llama] [--shares 100,75,50,35]

A budget of 50 % means: the plain peak less half of what is not parameters, gradients, optimizer state, buffers or batch at that
peak. A row is a plan that ran for three real steps, or a refusal. Step times of tiny models on a CPU are mostly the start of
ops; they are reported, not judged.
"""

from __future__ import annotations

import argparse
import copy
import csv
import subprocess
from pathlib import Path

import torch
from rich.progress import track

import holdall
from holdall import models
from holdall.api import environment
from holdall.testing.contracts import train
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family
from holdall.types import Kind

FIXED = {Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER, Kind.INPUT}


def larger(name: str) -> tuple[torch.nn.Module, object]:
    """A family with a batch large enough for activations to matter."""
    model, _ = family(name)
    if name in HUGGING_FACE:
        return model, models.sample_batch(models.describe(name), batch=8, seq=64)
    if name == "convnet":
        return model, (torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,)))
    return model, (torch.randint(0, 64, (16, 48)),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/accuracy.csv")
    parser.add_argument("--families", default=",".join([*PLAIN, *HUGGING_FACE]))
    parser.add_argument("--shares", default="100,75,50,35")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hardware = holdall.probe("cpu", quick=True)
    about = environment()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about |= {"commit": commit.stdout.strip(), "hardware": hardware.name, "seed": 0}
    rows = []
    for name in track(options.families.split(","), description="families"):
        model, batch = larger(name)
        start = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        expected = train(model, batch, optimizer)
        trace = holdall.trace(model, batch, optimizer=optimizer)
        plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted
        activations = sum(v for k, v in plain.peak_kinds.items() if k not in FIXED)
        for share in (int(s) for s in options.shares.split(",")):
            budget = plain.peak["cpu"] - activations * (100 - share) // 100
            row = {"family": name, "share": share, "budget": budget, "plain_peak": plain.peak["cpu"]}
            try:
                plan = holdall.plan(trace, budget=budget, hardware=hardware)
            except holdall.Infeasible as refused:
                rows.append({**row, "result": "refused", "smallest": refused.smallest})
                continue
            model.load_state_dict(start)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            with holdall.apply(plan, model, optimizer) as harness:
                losses = train(model, batch, optimizer)
            predicted, measured = plan.predicted, harness.measured()
            assert measured is not None
            rows.append(
                {
                    **row,
                    "result": "ran",
                    "actions": " ".join(f"{n}x{k}" for k, n in sorted(plan.count().items())) or "none",
                    "predicted_peak": predicted.peak["cpu"],
                    "measured_peak": measured.peak["cpu"],
                    "peak_error": predicted.peak["cpu"] / measured.peak["cpu"] - 1,
                    "within_budget": measured.peak["cpu"] <= budget,
                    "losses_identical": losses == expected,
                    "predicted_s": round(predicted.seconds, 5),
                    "measured_s": round(measured.seconds, 5),
                    "solve_s": round(plan.solve_seconds, 3),
                }
            )
    fields = list(dict.fromkeys(k for row in rows for k in row))
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*fields, *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    ran = [r for r in rows if r["result"] == "ran"]
    for r in rows:
        if r["result"] == "ran":
            peaks = f"{r['predicted_peak']:>12,} {r['measured_peak']:>12,} {r['peak_error']:+8.3%}"
            print(f"{r['family']:>13} {r['share']:>4}%  {peaks}  {r['actions']}")
        else:
            print(f"{r['family']:>13} {r['share']:>4}%  refused; the smallest is {r['smallest'] / r['budget'] - 1:.1%} above")
    exact = sum(r["peak_error"] == 0 for r in ran)
    print(
        f"{len(ran)} ran, {len(rows) - len(ran)} refused; {exact} exact to the byte, "
        f"worst error {max(abs(r['peak_error']) for r in ran):.3%}, "
        f"over budget {sum(not r['within_budget'] for r in ran)}, losses differ {sum(not r['losses_identical'] for r in ran)}"
    )


if __name__ == "__main__":
    main()
