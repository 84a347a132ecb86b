"""One long sequence through `holdall.fit`: does it train in the budget, and how many tokens a second?

python benchmarks/long_contexts.py [--rows llama-3.2-3b:full:131072,llama-3.1-8b:lora:131072] [--budget 24] [--steps 3]
                                   [--out FILE] [--smoke]

`full`: all weights, `precision="bf16"` with float32 masters. `lora`: PEFT adapters of rank 16 on all linear layers of a frozen
bf16 model. Both start on the CPU, as a model does that is too large for the GPU. Every row is a process of its own, with
default options of `fit`; the peak is what the driver saw less what was in use before. One sequence of random ids is learnt by
heart, so that the loss must fall. `--smoke`: tiny twins on the CPU with 64 tokens.
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
from pathlib import Path
from typing import Any

import torch

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a bare checkout is enough

import holdall
from holdall import models

GIB = 2**30
FIELDS = (
    "model", "kind", "tokens", "budget_gib", "result", "predicted_gib", "reserved_gib", "driver_gib", "host_gib", "predicted_s",
    "step_s", "tokens_per_s", "fit_s", "steps_s", "losses", "actions", "notes", "message", "hardware", "torch", "commit",
)  # fmt: skip
TINY = {"llama-3.2-3b": "tiny-llama", "llama-3.1-8b": "tiny-llama"}


def run(name: str, kind: str, tokens: int, budget: float, steps: int, smoke: bool) -> dict[str, Any]:
    device = "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    source = models.describe(TINY.get(name, name) if smoke else name)
    with torch.device(device):  # a model of this size is drawn fastest there
        model = models.build(source, device=device, dtype="bfloat16" if kind == "lora" else "float32").train()
    ids = torch.randint(3, model.config.vocab_size, (1, 64 if smoke else tokens), device=device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    options: dict[str, Any] = {"precision": "bf16"}
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        options = {}
    model.cpu()
    driver = None
    if not smoke:
        torch.cuda.empty_cache()
        driver = Watch()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    began = time.perf_counter()
    harness = holdall.fit(model, optimizer, batch, budget=int(budget * GIB), **options)
    row: dict[str, Any] = {"fit_s": time.perf_counter() - began, "predicted_s": harness.plan.predicted.seconds}
    row["predicted_gib"] = next(iter(harness.plan.predicted.peak.values())) / GIB
    row["actions"] = " ".join(f"{n}x{k}" for k, n in sorted(harness.plan.count().items()))
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
        del loss
    row |= {"steps_s": json.dumps([round(s, 3) for s in seconds]), "losses": json.dumps([round(x, 4) for x in losses])}
    row |= {
        "step_s": min(seconds[1:] or seconds),
        "result": "ran" if steps == 1 or losses[-1] < losses[0] else "does not learn",
    }
    row["tokens_per_s"] = ids.numel() / row["step_s"]
    if driver is not None:
        row |= {"driver_gib": driver.stop() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        if row["driver_gib"] > budget:
            row["result"] = "over budget"
    row["host_gib"] = host_bytes() / GIB
    row["notes"] = " | ".join(" ".join(str(n).split()) for n in harness.notes)[:500]
    print("ROW " + json.dumps(row), flush=True)  # also kept if closing takes longer than there is time
    harness.close()
    return row


def host_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


class Watch:
    """The most that the driver saw in use, less what was in use at the start."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._idle, self._most, self._is_over = self._used(), 0, threading.Event()
        torch.cuda.reset_peak_memory_stats()
        self._idle -= torch.cuda.memory_reserved()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _poll(self) -> None:
        while not self._is_over.wait(0.01):
            self._most = max(self._most, self._used() - self._idle)

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self._most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", default="llama-3.2-3b:full:131072,llama-3.1-8b:lora:131072", help="model:full|lora:tokens,..."
    )
    parser.add_argument("--budget", type=float, default=24.0, help="GiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--row-seconds", type=float, default=300.0)
    parser.add_argument("--out", default="benchmarks/results/long_contexts.csv")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, kind, tokens = options.child.split(":")
        try:
            made = run(name, kind, int(tokens), options.budget, options.steps, options.smoke)
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
            row = one_process(asked, options)
            writer.writerow({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(row, flush=True)


def one_process(asked: str, options: argparse.Namespace) -> dict[str, Any]:
    name, kind, tokens = asked.split(":")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {
        "model": name,
        "kind": kind,
        "tokens": 64 if options.smoke else int(tokens),
        "budget_gib": options.budget,
    }
    row |= {"torch": torch.__version__, "commit": os.environ.get("HOLDALL_COMMIT") or git.stdout.strip()}
    row["hardware"] = "CPU" if options.smoke else torch.cuda.get_device_name()
    command = [sys.executable, __file__, "--child", asked, "--budget", str(options.budget), "--steps", str(options.steps)]
    text = ""
    process = subprocess.Popen([*command, *(["--smoke"] if options.smoke else [])], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(options.row_seconds, process.kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            text = line[4:]
        else:
            print(line, end="", flush=True)
    process.wait()
    timer.cancel()
    return row | (json.loads(text) if text else {"result": "failed", "message": f"ended with status {process.returncode}"})


if __name__ == "__main__":
    main()
