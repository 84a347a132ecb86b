"""Planners that place states beside `auto`, all simulated: where is one faster than `auto` at the same budget?

python benchmarks/state_members.py [--models tiny-gpt2,tiny-llama,llama-3.2-3b] [--out FILE]

Tiny models are planned for a CPU with a slow link, budgets in shares of plain training's peak; the others for an H200 with bf16
working copies, budgets in GiB. `reads_gradients=False` has updates in backward.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import holdall
from holdall import models
from holdall.machine.presets import gpu
from holdall.testing.worlds import family, machine
from holdall.types import Hardware, Trace
from holdall.units import GiB

MEMBERS = (
    "zero_offload,protrain,stronghold,superoffload,patrickstar,gemini,elixir,angel_ptm,zero_infinity,ratel,l2l,smart_infinity"
)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny-gpt2,tiny-llama,llama-3.2-3b")
    parser.add_argument("--members", default=MEMBERS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--gib", default="24,12,8", help="budgets of models that are not tiny")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"torch": torch.__version__, "commit": commit.stdout.strip()}
    for name in options.models.split(","):
        trace, hardware, budgets = world(name, options.batch, options.seq, [int(size) for size in options.gib.split(",")])
        for reads_gradients in (True, False):
            for budget in budgets:
                for row in compare(trace, hardware, budget, options.members.split(","), reads_gradients=reads_gradients):
                    rows.append(
                        {
                            "model": name,
                            "reads_gradients": reads_gradients,
                            "budget": budget,
                            **row,
                            "hardware": hardware.name,
                            **about,
                        }
                    )
                    print(rows[-1], flush=True)
    for row in rows:
        if row["over_auto"] and row["over_auto"] < 0.999:
            print("faster than auto:", row)
    if options.out:
        with Path(options.out).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def world(name: str, batch: int, seq: int, sizes: list[int]) -> tuple[Trace, Hardware, list[int]]:
    """The trace of one model, the machine, and budgets in bytes."""
    if name.startswith("tiny"):
        model, data = family(name)
        trace = holdall.trace(model, data, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        hardware = replace(machine(overlap=True, read=1e8, write=1e8), updates=2e7)
        plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak["cpu"]
        return trace, hardware, [int(share * plain) for share in SHARES]
    source = models.describe(name)
    net = models.build(source, device="meta", dtype="float32")
    data = models.sample_batch(source, batch=batch, seq=seq)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    trace = holdall.trace(net, data, optimizer=optimizer, device="cuda", precision="bf16")
    return trace, gpu("h200"), [size * GiB for size in sizes]


def compare(
    trace: Trace, hardware: Hardware, budget: int, members: list[str], *, reads_gradients: bool
) -> Iterator[dict[str, str | float | None]]:
    """A row for every planner: predicted seconds, their ratio to auto's, how long planning took."""
    auto = None
    for planner in ("auto", *members):
        began = time.perf_counter()
        try:
            plan = holdall.plan(trace, planner=planner, budget=budget, hardware=hardware, reads_gradients=reads_gradients)
        except (holdall.Infeasible, holdall.Unsupported):
            yield {
                "planner": planner,
                "seconds": None,
                "over_auto": None,
                "plan_s": round(time.perf_counter() - began, 1),
                "why": "",
            }
            continue
        free = plan.about.seconds_if_not_clipped
        seconds = plan.predicted.seconds if free is None else (plan.predicted.seconds + free) / 2
        auto = seconds if planner == "auto" else auto
        yield {
            "planner": planner,
            "seconds": seconds,
            "over_auto": round(seconds / auto, 4) if auto else None,
            "plan_s": round(time.perf_counter() - began, 1),
            "why": "; ".join(plan.why[:2]),
        }


if __name__ == "__main__":
    main()
