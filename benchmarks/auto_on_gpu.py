"""Auto over several budgets on one GPU, in one process: predicted against measured, choice by choice.

python benchmarks/auto_on_gpu.py [--shape 3b] [--budgets 24,12,6:protrain] [--steps 6] [--no-clip] [--out results.csv]

A budget may name its planner; `24:auto-host` is auto without updates that pass through the device.
"""

from __future__ import annotations

import argparse
import collections
import csv
import gc
import json
import resource
import time
import traceback

import torch
from peers import SHAPES, build_ids, build_model

import holdall
from holdall.api import environment
from holdall.optim import _host
from holdall.types import Hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--budgets", default="24")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--head", default="auto")
    parser.add_argument("--hardware", default="", help="a probe's result; else this machine is probed")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--profile", default="", help="write Chrome traces of two steps into this folder")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--out", default="auto_on_gpu.csv")
    parser.add_argument("--trace", default="", help="also write the trace and the hardware into this folder")
    options = parser.parse_args()
    began = time.perf_counter()
    hardware = Hardware.load(options.hardware) if options.hardware else holdall.probe("cuda", quick=True)
    print(
        f"probe {time.perf_counter() - began:.1f} s, {hardware.updates / 1e9:.2f} Gparam/s on the host, "
        f"memory {hardware.bandwidth / 1e12:.2f} TB/s, link {hardware.tiers[1].read / 1e9:.1f}/"
        f"{hardware.tiers[1].write / 1e9:.1f} x {hardware.duplex:.2f}, context {hardware.context / 2**20:.0f} MiB",
        flush=True,
    )
    print(_host.backend(), flush=True)
    began = time.perf_counter()
    model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device="cpu").train()
    ids = build_ids(options.shape, batch=options.batch, seq=options.seq, device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began = time.perf_counter()
    head = int(options.head) if options.head.isdigit() else options.head
    trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16", head=head)
    print(f"traced in {time.perf_counter() - began:.1f} s; ops {sum(o.seconds for o in trace.ops):.3f} s", flush=True)
    if options.trace:
        trace.save(f"{options.trace}/trace.json")
        hardware.save(f"{options.trace}/hardware.json")
    rows = []
    for text in options.budgets.split(","):
        budget, _, planner = text.partition(":")
        name, _, option = planner.partition("-")
        extra = {"through": False} if option == "host" else {}
        row = {"budget_gib": budget, "planner": planner or options.planner}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        try:
            plan = holdall.plan(
                trace,
                budget=f"{budget}GiB",
                hardware=hardware,
                planner=name or options.planner,
                clips=not options.no_clip,
                **extra,
            )
            row |= run(plan, model, optimizer, batch, options)
        except holdall.HoldallError as error:
            row["why"] = str(error)[:300]
        except torch.OutOfMemoryError as error:
            row["why"] = str(error)[:300]
            rows.append(row)
            traceback.print_exc(limit=-3)
            print(json.dumps(row), flush=True)
            break  # the model is where it was caught
        rows.append(row)
        print(json.dumps(row), flush=True)
        optimizer = None
        gc.collect()
        torch.cuda.empty_cache()
    about = {**environment(), "shape": options.shape, "batch": options.batch, "seq": options.seq}
    with open(options.out, "w", newline="") as file:
        fields = list(dict.fromkeys(k for r in rows for k in r)) + list(about)
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows({**r, **about} for r in rows)


def run(plan, model, optimizer, batch, options):
    place = next((a for a in plan.actions if a.name == "place"), None)
    kept = collections.Counter(getattr(a, "keep", ()) for a in plan.actions if a.name == "recompute")
    print(f"planned in {plan.solve_seconds:.1f} s: {plan.summary()}", flush=True)
    print(collections.Counter(r[1:] for r in place.units) if place else "", dict(kept), plan.why[1], flush=True)
    began = time.perf_counter()
    with holdall.apply(plan, model, optimizer) as harness:
        setup = time.perf_counter() - began
        losses, norms = [], []

        def step():
            loss = model(**batch).loss
            loss.backward()
            if not options.no_clip:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        for _ in range(options.warmup):
            step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / options.steps
        free, total = torch.cuda.mem_get_info()
        measured = harness.measured()
        if options.profile:
            profile(step, f"{options.profile}/{plan.planner}-{plan.budget['gpu'] >> 30}.json.gz")
    predicted = plan.predicted
    return {
        "actions": json.dumps(plan.count()),
        "tokens_per_s": round(batch["input_ids"].numel() / seconds),
        "step_s": round(seconds, 4),
        "predicted_s": round(predicted.seconds, 4),
        "time_error": round(predicted.seconds / seconds - 1, 4),
        "stall_s": round(predicted.stall_seconds, 4),
        "recompute_s": round(predicted.recompute_seconds, 4),
        "predicted_gib": round(predicted.peak["gpu"] / 2**30, 3),
        "measured_gib": round(measured.peak["gpu"] / 2**30, 3),
        "reserved_gib": round((measured.reserved or 0) / 2**30, 3),
        "device_gib": round((total - free) / 2**30, 3),
        "predicted_host_gib": round(predicted.peak.get("cpu", 0) / 2**30, 2),
        "host_gib": round(measured.peak.get("cpu", 0) / 2**30, 2),
        "rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "solve_s": round(plan.solve_seconds, 1),
        "setup_s": round(setup, 1),
        "clipped": sum(float(n) > options.max_norm for n in norms),
        "losses": " ".join(f"{float(x):.4f}" for x in losses),
    }


def profile(step, path):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        step()
        step()
        torch.cuda.synchronize()
    prof.export_chrome_trace(path)


if __name__ == "__main__":
    main()
