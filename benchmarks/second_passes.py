"""What the passes of `auto` after its first search are worth: predicted step time and planning time without each of them.

python benchmarks/second_passes.py out.csv

Thirteen shapes on an H200 by its datasheet and measured host rates, in bfloat16, for budgets of 80, 65, 50 and 35 % of what
plain training takes. A row has the predicted seconds of a step as `auto` judges it (the mean of clipped and unclipped steps,
with the allocator's time), whether the allocator may run out of pages, and the processor seconds of planning. Nothing is
measured on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import holdall
from holdall import models
from holdall.machine.presets import gpu
from holdall.planners import auto
from holdall.planners.auto import search

SHARES = (80, 65, 50, 35)
SHAPES = (
    "gpt2,gpt2-large,llama-3.2-1b,llama-3.2-3b,gpt2-medium,qwen2.5-0.5b,qwen3-0.6b,"
    "smollm2-135m,pythia-160m,opt-125m,bert-base,t5-small,vit-base"
)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no plans in 97 and 94 %": {"_ROOM": ()},
    "clipped steps only": {"_TRIED_TWICE": 1},
    "one number of streamed weights": {"CLOSE": 1.0},
    "no hidden offloading": {"PLACEMENTS": 0},
}
COLUMNS = ("shape", "share", "variant", "seconds", "cramped", "planning")


@contextmanager
def changed(values: dict[str, Any]) -> Iterator[None]:
    """Constants of the planner replaced for a while."""
    patches = [mock.patch.object(m, n, v) for n, v in values.items() for m in (auto, search) if hasattr(m, n)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def rows(shape: str) -> Iterator[dict[str, Any]]:
    source = models.describe(shape)
    model = models.build(source, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = models.sample_batch(source, batch=4, seq=512)
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16")
    hardware = replace(gpu("h200"), updates=4.5e9, updates_beside=3.6e9, read_beside=0.65)
    full = holdall.plan(trace, planner="nop", hardware=hardware).predicted.peak["gpu"]
    for share in SHARES:
        for name, values in VARIANTS.items():
            with changed(values):
                begun = time.process_time()
                try:
                    plan = holdall.plan(trace, hardware=hardware, budget=full * share // 100)
                except holdall.HoldallError:
                    continue
                planning = time.process_time() - begun
            unclipped = plan.about.seconds_if_not_clipped or plan.predicted.seconds
            seconds = (plan.predicted.seconds + unclipped) / 2
            cramped = plan.predicted.cramped
            yield dict(zip(COLUMNS, (shape, share, name, f"{seconds:.6f}", cramped, f"{planning:.2f}"), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default=SHAPES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HOLDALL_CACHE"] = "off"  # a plan that was remembered says nothing of a variant
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for shape in options.shapes.split(","):
            for row in rows(shape):
                writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
