"""An 8B Llama whose states fit neither the GPU nor the host: 24 GiB, 48 GiB of RAM and a disk, through `holdall.fit`.

python benchmarks/disk_on_gpu.py [--budget gpu=24GiB,cpu=48GiB,nvme=44GiB] [--rows reference,fit,ratel] [--steps 4]
                                 [--bound SECONDS] [--out FILE] [--smoke]

HOLDALL_NVME names the folder. `reference`: the same recipe without a plan (bf16 weights, float32 masters, AdamW, clipped), one
parameter updated after another so that float32 gradients never lie side by side, with checkpointing; all on the GPU. `fit`:
default options; any other name is a planner. Every row is a process of its own on the same weights and batch. `disk_s` is what
the disk needs for the bytes that the step moved, at the rates that the probe measured with both ways busy; `of_bound` is the
step over the longer of that and of `--bound`, the seconds of a step that no disk is part of. `--smoke`: a tiny twin on the CPU.
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

from families_on_gpu import GIB, Cell, differ, empty, enable_checkpointing
from long_contexts import Watch, host_bytes

import holdall

SHAPE = "llama-3.1-8b"
FIELDS = (
    "row", "budget", "result", "predicted_gib", "driver_gib", "reserved_gib", "predicted_peaks_gib", "host_gib", "predicted_s",
    "step_s", "disk_s", "of_bound", "traffic_gib", "rates_gb_s", "losses", "losses_differ_by", "steps_s", "fit_s", "close_s",
    "row_s", "actions", "notes", "message", "hardware", "torch", "commit",
)  # fmt: skip


def reference(cell: Cell, steps: int) -> dict[str, Any]:
    model, batch = cell.build()
    enable_checkpointing(model, "")
    parameters = list(model.parameters())
    masters = []
    for parameter in parameters:
        masters.append(parameter.detach())
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizers = [cell.optimizer([master]) for master in masters]
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        norms = torch.stack([p.grad.float().norm() for p in parameters])  # type: ignore[union-attr]
        scale = (cell.shape.norm / (norms.norm() + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for master, parameter, optimizer in zip(masters, parameters, optimizers, strict=True):
                master.grad = parameter.grad.float() * scale  # type: ignore[union-attr]
                parameter.grad = None
                optimizer.step()
                optimizer.zero_grad()
                parameter.copy_(master)
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        del loss
    return {"result": "ran", "losses": losses, "steps_s": seconds, "step_s": min(seconds[1:] or seconds)}


def ours(cell: Cell, planner: str, budget: dict[str, Any], steps: int, bound: float) -> dict[str, Any]:
    model, batch = cell.build()
    model.cpu()
    empty(cell)
    driver = None if cell.smoke else Watch()
    optimizer = cell.optimizer(model.parameters())
    began = time.perf_counter()
    chosen = {} if planner == "fit" else {"planner": planner}
    harness = holdall.fit(model, optimizer, batch, budget=budget, precision="bf16", **chosen)
    predicted = harness.plan.predicted
    row: dict[str, Any] = {"fit_s": time.perf_counter() - began, "predicted_s": predicted.seconds}
    row["predicted_gib"] = next(iter(predicted.peak.values())) / GIB
    row["predicted_peaks_gib"] = json.dumps({tier: round(size / GIB, 3) for tier, size in predicted.peak.items()})
    row["actions"] = " ".join(f"{n}x{k}" for k, n in sorted(harness.plan.count().items()))
    print(f"planned in {row['fit_s']:.0f} s: {row['predicted_s']:.2f} s, {row['predicted_peaks_gib']}", flush=True)
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cell.shape.norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", flush=True)
        del loss
    later = sorted(seconds[2:] or seconds)
    row |= {"losses": losses, "steps_s": seconds, "step_s": later[len(later) // 2], "host_gib": host_bytes() / GIB}
    model.state_dict()  # waits for the last update, whose bytes count
    measured = harness.measured()
    traffic = dict(measured.traffic) if measured else {}
    row["traffic_gib"] = json.dumps({link: round(size / GIB, 3) for link, size in traffic.items()})
    rates = {rate.tier: rate for rate in harness.plan.about.rates}
    row["rates_gb_s"] = json.dumps({name: [round(r.read / 1e9, 2), round(r.write / 1e9, 2)] for name, r in rates.items()})
    if "nvme" in rates:
        read = sum(size for link, size in traffic.items() if link.startswith("nvme->")) / rates["nvme"].read
        written = sum(size for link, size in traffic.items() if link.endswith("->nvme")) / rates["nvme"].write
        row["disk_s"] = max(read, written)
        row["of_bound"] = row["step_s"] / max(row["disk_s"], bound)
    if driver is not None:
        row |= {"driver_gib": driver.stop() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
    row["notes"] = " | ".join(" ".join(str(n).split()) for n in harness.notes)[:500]
    tell({"result": "ran", **row})  # before closing, which may want more memory than there is
    began = time.perf_counter()
    harness.close()
    return {"result": "ran", **row, "close_s": time.perf_counter() - began}


def child(options: argparse.Namespace) -> None:
    cell = Cell({"shape": SHAPE, "recipe": "bf16", "smoke": options.smoke}, lambda _: None)
    try:
        if options.child == "reference":
            made = reference(cell, options.steps)
        else:
            made = ours(cell, options.child, parsed(options.budget), options.steps, options.bound)
    except Exception as error:
        traceback.print_exc()
        made = {"result": "failed", "message": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    tell(made)


def tell(row: dict[str, Any]) -> None:
    print("ROW " + json.dumps(row), flush=True)


def parsed(budget: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in budget.split(","))  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="gpu=24GiB,cpu=48GiB,nvme=44GiB")
    parser.add_argument("--rows", default="reference,fit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--bound", type=float, default=0.0, help="seconds of a step that no disk is part of")
    parser.add_argument("--row-seconds", type=float, default=320.0)
    parser.add_argument("--out", default="benchmarks/results/disk_on_gpu.csv")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {"hardware": "CPU" if options.smoke else torch.cuda.get_device_name(), "torch": torch.__version__}
    about["commit"] = os.environ.get("HOLDALL_COMMIT") or git.stdout.strip()
    out = Path(options.out)
    is_new = not out.exists()
    expected: list[float] = []
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        for name in options.rows.split(","):
            row = {"row": name, "budget": "" if name == "reference" else options.budget, **one_process(name, options), **about}
            losses = row.get("losses", [])
            if name == "reference":
                expected = losses
            elif losses and expected:
                row["losses_differ_by"] = differ(losses, expected[: len(losses)])
            print({k: v for k, v in row.items() if k not in about}, flush=True)
            writer.writerow({k: shown(v) for k, v in row.items()})
            file.flush()


def one_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", name, "--budget", options.budget, "--steps", str(options.steps)]
    command += ["--bound", str(options.bound), *(["--smoke"] if options.smoke else [])]
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(options.row_seconds, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROW "):
                said = line
            else:
                print(f"  {name}: {line}", end="", flush=True)
        timer.cancel()
    row: dict[str, Any] = json.loads(said.removeprefix("ROW ")) if said else {"result": "failed"}
    if not said:
        row["message"] = f"ended with status {process.returncode} after {time.monotonic() - began:.0f} s"
    row["row_s"] = time.monotonic() - began
    return row


def shown(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps([shown(v) for v in value])
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
