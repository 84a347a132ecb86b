"""FP8 beside bf16 on one GPU, uncapped and in a budget: tokens per second, peaks, losses.

python benchmarks/fp8_on_gpu.py [--rows plain,fp8,fp8@24,bf16@24] [--steps 50] [--row-seconds 240] [--out FILE] [--smoke]

Llama of the 3B shape, 4 x 4096 tokens, AdamW, clipped to 1.0; all rows start from the same weights and see the same batches of
random tokens, over and over. `plain`: bf16 weights with float32 masters on the GPU, no plan (`bf16_master` of `peers.py`);
`plain-autocast`: float32 weights under `torch.autocast`, no plan either.
`torchao`: the same with torchao's FP8 layers; `torchao-compiled`: with its decoder layers compiled. Any other name is a recipe
of `holdall.precision` through `holdall.fit` with its defaults, in all of the device or in the GiB after `@`; `fp8-unfused` is
`fp8` by torch's ops instead of the fused casts. A row is a process of its own, ended after `--row-seconds`, and goes to the
file at once. Step time is wall-clock time over the last half of the steps, with one synchronization at the end; `plan_step_s`
and `plan_gib` are what the plan said, and the peaks are the allocator's and the driver's. `--smoke`: a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a bare checkout is enough

from long_contexts import Watch
from peers import ADAMW, MAX_NORM, build_ids, build_model

import holdall
from holdall.narrow import casts
from holdall.precision import float8_training

GIB = 2**30
ROWS = "plain,plain-autocast,fp8,fp8-unfused,fp8:scaling=delayed,fp8:scaling=row,torchao,torchao-compiled,bf16@24,fp8@24"
AT = (1, 10, 25, 50)  # steps whose losses have a column
FIELDS = (
    "row", "budget_gib", "result", "tokens_per_s", "step_s", "plan_step_s", "peak_gib", "driver_gib", "plan_gib",
    *(f"loss_{n}" for n in AT), "steps", "setup_s", "first_s", "actions", "notes", "message", "shape", "batch", "seq",
    "hardware", "torch", "commit",
)  # fmt: skip


def run(asked: str, options: argparse.Namespace) -> dict[str, Any]:
    name, _, budget = asked.partition("@")
    device = "cpu" if options.smoke else "cuda"
    sets = [build_ids(options.shape, batch=options.batch * options.sets, seq=options.seq, device=device)]
    batches = [{"input_ids": ids, "labels": ids} for ids in sets[0].chunk(options.sets)]
    casts.switch(on=name != "fp8-unfused")
    began = time.perf_counter()
    is_plain = name.startswith(("plain", "torchao"))
    model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device=device if is_plain else "cpu")
    driver = Watch() if device == "cuda" else None
    row: dict[str, Any] = {}
    harness = None
    if name == "plain-autocast":
        step = autocast_step(model, device)
    elif is_plain:
        step = masters_step(model, name, options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        given: dict[str, Any] = {"budget": int(float(budget) * GIB)} if budget else {}
        recipe = name.removesuffix("-unfused")
        harness = holdall.fit(model, optimizer, batches[0], precision=recipe, device=device, **given)
        row["plan_step_s"] = harness.plan.predicted.seconds
        row["plan_gib"] = next(iter(harness.plan.predicted.peak.values())) / GIB
        row["actions"] = " ".join(f"{n}x{k}" for k, n in sorted(harness.plan.count().items()))

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    row["setup_s"] = time.perf_counter() - began
    with harness or nullcontext():
        row |= measure(step, batches, options)
        if harness is not None:  # the plan of the last step may be another than the first
            row["plan_step_s"] = harness.expected.seconds
            row["notes"] = " | ".join(" ".join(str(n).split()) for n in harness.notes)[:500]
            if device == "cpu":
                found = harness.measured()
                row["peak_gib"] = next(iter(found.peak.values())) / GIB if found is not None else None
        if driver is not None:
            row |= {"driver_gib": driver.stop() / GIB, "peak_gib": torch.cuda.max_memory_allocated() / GIB}
            if budget and row["driver_gib"] > float(budget):
                row["result"] = "over budget"
    return row


def autocast_step(model: torch.nn.Module, device: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """float32 weights and AdamW on the device, computing in bf16 by autocast: the loop that most people write."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def masters_step(
    model: torch.nn.Module, name: str, options: argparse.Namespace
) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """bf16 weights, float32 masters and AdamW, all on the device; gradients are cast to float32, then clipped."""
    masters = [p.detach() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if name.startswith("torchao"):
        head = model.get_output_embeddings()
        float8_training(model.model, emulate=options.smoke)  # the head keeps its precision, as under our recipe
        assert model.get_output_embeddings() is head
    if name == "torchao-compiled":
        for layer in model.model.layers:
            layer.compile()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        return loss.detach()

    return step


def measure(step: Callable[[Any], torch.Tensor], batches: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    wait = (lambda: None) if options.smoke else torch.cuda.synchronize
    losses: list[torch.Tensor] = []
    first, began, timed = 0.0, time.perf_counter(), max(1, options.steps // 2)
    for n in range(options.steps):
        if n == options.steps - timed:
            wait()
            began = time.perf_counter()
        if n == 0:
            start = time.perf_counter()
        losses.append(step(batches[n % len(batches)]))
        if n == 0:
            wait()
            first = time.perf_counter() - start
        if n + 1 in AT:
            print(f"step {n + 1}: loss {float(losses[-1]):.4f}", flush=True)
    wait()
    seconds = (time.perf_counter() - began) / timed
    found = {f"loss_{n}": float(losses[n - 1]) for n in AT if n <= len(losses)}
    numbers = torch.stack([x.float() for x in losses])
    tail = numbers[-len(batches) :].mean() < numbers[: len(batches)].mean()
    result = "ran" if bool(tail) else "does not learn" if bool(numbers.isfinite().all()) else "diverged"
    tokens = batches[0]["input_ids"].numel()
    return {"step_s": seconds, "tokens_per_s": tokens / seconds, "first_s": first, "result": result, **found}


def one_process(asked: str, options: argparse.Namespace, passed: list[str]) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"row": asked.partition("@")[0], "budget_gib": asked.partition("@")[2], "steps": options.steps}
    row |= {"shape": options.shape, "batch": options.batch, "seq": options.seq, "torch": torch.__version__}
    row |= {"commit": os.environ.get("HOLDALL_COMMIT") or git.stdout.strip()}
    row["hardware"] = "CPU" if options.smoke else torch.cuda.get_device_name()
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    process = subprocess.Popen(
        [sys.executable, __file__, *passed, "--child", asked], stdout=subprocess.PIPE, text=True, env=environment
    )
    timer = threading.Timer(options.row_seconds, process.kill)
    timer.start()
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            text = line[4:]
        else:
            print(line, end="", flush=True)
    process.wait()
    timer.cancel()
    return row | (json.loads(text) if text else {"result": "failed", "message": f"ended with status {process.returncode}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS, help="names, with @GiB for a budget, between commas")
    parser.add_argument("--shape", default="3b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--sets", type=int, default=2, help="batches that are repeated")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--row-seconds", type=float, default=240.0)
    parser.add_argument("--out", default="benchmarks/results/fp8_on_gpu.csv")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: does the code run?")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.shape, options.batch, options.seq = "tiny", 2, 64
    if options.child:
        try:
            made = run(options.child, options)
        except Exception as error:
            traceback.print_exc()
            made = {"result": "failed", "message": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        print("ROW " + json.dumps(made), flush=True)
        return
    out = Path(options.out)
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        for asked in options.rows.split(","):
            row = one_process(asked, options, sys.argv[1:])
            writer.writerow({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
