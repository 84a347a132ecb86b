"""Auto over several budgets on one GPU, in one process: predicted against measured, choice by choice.

python benchmarks/auto_on_gpu.py [--shape 3b] [--budgets 24,12,24@1e9,24@1e-3+1e9,6:protrain] [--steps 6] [--out results.csv]
python benchmarks/auto_on_gpu.py --cpu-check   the same code on a tiny model and a CPU: no figures worth keeping

What is measured is `holdall.fit`, which begins with a plan that was made ahead (`fit(..., plan=...)`): fallbacks, corrections
by measured times and repeats take part, and a row is about the plan that its last step ran under (`plan_changed`, `notes`).

A budget may name its planner; `24:auto-host` is auto without updates that pass through the device. `24@1e9` clips to that norm,
which is to say never, and `24@1e-3` always: an update may begin before it is known whether gradients are clipped, so both are
worth a row. `24@1e-3+1e9` is both, one after the other in one run: a row for each, warmed up anew. `24:auto-through` lets units
pass through the device whatever the probe says. All plans are made first, in processes side by side. Minutes may lie between
that and a row, and a host that others share is not as fast all the time: its rate is measured again before a row, and what the
plan says is renewed by it, as if it were made then (`planned_step_s` is what it said when it was made). Rows have the columns
of `gpu_budget_curve.py`, are added at the end of the file as they come, and can be plotted with its.
"""

from __future__ import annotations

import argparse
import collections
import csv
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu_budget_curve import FIELDS, Row, describe_plan
from peers import ADAMW, SHAPES, build_ids, build_model

import holdall
from holdall.api import environment
from holdall.machine.host_rates import host_rates
from holdall.planning.finish import outcome_of
from holdall.problem import make_problem
from holdall.runtime.budget.meter import device_context
from holdall.types import Hardware, Plan, Trace
from holdall.updates import host_adam

CONTEXT = 20 * 2**20  # bytes of kernels that the first steps still load
MORE = (
    "max_norm",
    "steps_clipped",
    "steps_ahead",
    "predicted_if_not_clipped_s",
    "planned_step_s",
    "planned_if_not_clipped_s",
    "host_gparam_s",
    "host_beside_gparam_s",
    "read_beside",
    "solve_s",
    "harness_host",
    "seconds_of_steps",
    "retries",
    "plan_changed",
    "notes",
)


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
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which no row is begun")
    parser.add_argument("--commit", default="", help="goes into every row")
    parser.add_argument("--profile", default="", help="write Chrome traces of two steps into this folder")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--out", default="auto_on_gpu.csv")
    parser.add_argument("--trace", default="", help="also write the trace, the hardware and the plans into this folder")
    parser.add_argument("--plans", default="", help="a folder with 24.json and so on, planned before: no tracing, no planning")
    parser.add_argument("--cpu-check", action="store_true", help="a tiny model on the CPU: does the code run?")
    options = parser.parse_args()
    options.device = "cpu" if options.cpu_check else "cuda"
    if options.cpu_check:
        options.shape, options.batch, options.seq = "tiny", 2, 32
    began = started = time.perf_counter()
    model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device="cpu").train()
    ids = build_ids(options.shape, batch=options.batch, seq=options.seq, device=options.device)
    batch = {"input_ids": ids, "labels": ids}
    print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as made:
        if not options.plans:
            look(model, batch, options, Path(made))
            plan_all(Path(made), options)
        first = [model]
        del model  # a row lets go of its model when it is over
        rows(first, batch, options, Path(options.plans or made), started)


def rows(first, batch, options, plans, started):
    """A row for every budget and norm. `first`: holds the model of the first one."""
    model = first.pop()
    about = {
        "method": "ours",
        "precision": "bf16 weights, fp32 master",
        "shape": options.shape,
        "batch": options.batch,
        "seq": options.seq,
        "steps": options.steps,
        "warmup": options.warmup,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "",
        "torch": torch.__version__,
        "python": environment()["python"],
        "commit": options.commit,
    }
    for text in options.budgets.split(","):
        if time.perf_counter() - started > options.time_limit:
            print(f"the time limit is over: {text} and what follows was not run")
            break
        of, _, norms = text.partition("@")
        budget, _, planner = of.partition(":")
        max_norms = [float(n) for n in norms.split("+")] if norms else [options.max_norm]
        row = {**about, "budget_gib": budget, "planner": planner or options.planner, "max_norm": max_norms[0], "fits": False}
        row |= {"clip": "off" if options.no_clip else "yes"}
        if model is None:  # every row begins with the same weights
            model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device="cpu").train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        try:
            plan = load_plan(plans, of)
            if not options.plans and options.device == "cuda":
                plan, rates = renew(plan, plans)
                row |= rates
            for found in run(plan, model, optimizer, batch, options, max_norms, asked(plans, options, of)):
                row |= found
                write(options.out, row)
        except holdall.HoldallError as error:
            row |= {"status": "infeasible" if isinstance(error, holdall.Infeasible) else "error", "why": str(error)[:300]}
        except torch.OutOfMemoryError as error:
            row |= {"status": "oom", "why": str(error)[:300]}
            traceback.print_exc(limit=-3)
        if row["status"] != "ok":
            write(options.out, row)
        planned = row["status"] in ("ok", "oom")
        model, optimizer = (None, None) if planned else (model, None)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def plan_all(folder: Path, options) -> None:
    """A plan for every budget, each by a process of its own: planning wants the host's cores and not the GPU."""
    began = time.perf_counter()
    wanted = list(dict.fromkeys(text.partition("@")[0] for text in options.budgets.split(",")))
    workers = min(len(wanted), (os.cpu_count() or 1) // 2)
    if workers <= 1:
        for of in wanted:
            make_plan(folder, options, of)
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for _ in pool.map(partial(make_plan, folder, options), wanted):
                pass
    if options.trace:
        for file in folder.glob("*.json"):
            shutil.copy(file, options.trace)
    print(f"planned for {', '.join(wanted)} in {time.perf_counter() - began:.1f} s", flush=True)


def asked(folder: Path, options, of: str) -> dict[str, Any]:
    """What `holdall.plan` and `holdall.fit` are given for a budget, which may name its planner."""
    budget, _, planner = of.partition(":")
    name, _, option = planner.partition("-")
    extra = {"host": {"via_device": False}, "through": {"via_device": True}}.get(option, {})
    known = folder / "hardware.json"
    reads_gradients, hardware = not options.no_clip, known if known.exists() else options.hardware or None
    return {
        "budget": f"{budget}GiB",
        "hardware": hardware,
        "planner": name or options.planner,
        "reads_gradients": reads_gradients,
        **extra,
    }


def make_plan(folder: Path, options, of: str) -> None:
    """Written to the folder, or why there is none."""
    try:
        holdall.plan(folder / "trace.json", **asked(folder, options, of)).save(_plan_file(folder, of))
    except holdall.HoldallError as error:
        _plan_file(folder, of).with_suffix(".txt").write_text(str(error))


def load_plan(folder: Path, of: str) -> Plan:
    refused = _plan_file(folder, of).with_suffix(".txt")
    if refused.exists():
        raise holdall.Infeasible(refused.read_text())
    return Plan.load(_plan_file(folder, of))


def renew(plan: Plan, folder: Path) -> tuple[Plan, Row]:
    """The same plan with the seconds that it takes at the host's present rate; that rate and what was said, for the row."""
    began = time.perf_counter()
    host = host_rates(torch.device("cuda"))
    torch.cuda.empty_cache()
    hardware = replace(Hardware.load(folder / "hardware.json"), **asdict(host))
    problem = make_problem(Trace.load(folder / "trace.json"), budget=dict(plan.budget), hardware=hardware)
    clipped, not_clipped = (outcome_of(replace(problem, clipped=is_clipped), plan.actions) for is_clipped in (True, False))
    before = plan.about.seconds_if_not_clipped
    about = replace(plan.about, seconds_if_not_clipped=None if before is None else not_clipped.seconds)
    print(
        f"{host.updates / 1e9:.2f} Gparam/s on the host ({host.updates_beside / 1e9:.2f} beside copies, "
        f"which keep {host.read_beside:.2f}), {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    renewed = replace(plan, predicted=replace(plan.predicted, seconds=clipped.seconds), about=about)
    return renewed, {
        "host_gparam_s": round(host.updates / 1e9, 3),
        "host_beside_gparam_s": round(host.updates_beside / 1e9, 3),
        "read_beside": round(host.read_beside, 3),
        "planned_step_s": plan.predicted.seconds,
        "planned_if_not_clipped_s": before,
    }


def _plan_file(folder: Path, of: str) -> Path:
    return folder / f"{of.replace(':', '-')}.json"


def look(model, batch, options, folder: Path) -> None:
    """Write down the trace of a step, and the machine."""
    began = time.perf_counter()
    hardware = Hardware.load(options.hardware) if options.hardware else holdall.probe(options.device, quick=True)
    print(
        f"probe {time.perf_counter() - began:.1f} s, {hardware.updates / 1e9:.2f} Gparam/s on the host "
        f"({hardware.updates_beside / 1e9:.2f} beside copies, which keep {hardware.read_beside:.2f}), "
        f"memory {hardware.bandwidth / 1e12:.2f} TB/s, context {hardware.context / 2**20:.0f} MiB",
        flush=True,
    )
    for tier in hardware.tiers[1:]:
        print(f"{tier.name}: {tier.read / 1e9:.1f}/{tier.write / 1e9:.1f} GB/s x {hardware.duplex:.2f}", flush=True)
    print(host_adam.backend(), flush=True)
    began = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    trace = holdall.trace(model, batch, optimizer=optimizer, device=options.device, precision="bf16", head=head_of(options))
    print(f"traced in {time.perf_counter() - began:.1f} s; ops {sum(o.seconds for o in trace.ops):.3f} s", flush=True)
    if options.device == "cuda":
        kernels = device_context(torch.device("cuda", 0))  # more of them are loaded by now
        hardware = replace(hardware, context=max(hardware.context, kernels) + CONTEXT)
    trace.save(folder / "trace.json")
    hardware.save(folder / "hardware.json")


def head_of(options) -> str | int:
    return int(options.head) if options.head.isdigit() else options.head


def write(path: str, row: Row) -> None:
    """At the end of the file, and to the screen."""
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, [*FIELDS, *MORE])
        if not file.tell():
            writer.writeheader()
        writer.writerow(row)
    print(json.dumps({k: row[k] for k in row if k not in ("gpu", "torch", "python", "commit", "precision")}), flush=True)


def run(plan, model, optimizer, batch, options, max_norms, given) -> Iterator[Row]:
    """A row for each norm to clip to, in one run of `fit` that begins with the plan."""
    place = next((a for a in plan.actions if a.name == "place"), None)
    print(f"planned in {plan.solve_seconds:.1f} s: {plan.summary()}", flush=True)
    print(collections.Counter(r[1:] for r in place.units) if place else "", plan.why[1:2], flush=True)
    began = time.perf_counter()
    gc.collect()  # now rather than in a step: tracing and planning left much to look through
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    own = {"precision": "bf16", "head": head_of(options), "device": options.device, "plan": plan}
    with holdall.fit(model, optimizer, batch, **own, **given) as harness:
        setup = time.perf_counter() - began
        for max_norm in max_norms:
            found = measure(harness, model, optimizer, batch, options, max_norm)
            yield {"setup_s": round(setup, 1), "plan_changed": harness.plan.actions != plan.actions, **found}
        if options.profile:
            step = partial(train_step, model, optimizer, batch, None if options.no_clip else max_norms[-1])
            profile(step, f"{options.profile}/{plan.planner}-{next(iter(plan.budget.values())) >> 30}.json.gz")


def measure(harness, model, optimizer, batch, options, max_norm) -> Row:
    losses, norms, before = [], [], len(harness.step_seconds)
    on_gpu = options.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def step():
        loss, norm = train_step(model, optimizer, batch, None if options.no_clip else max_norm)
        losses.append(loss)
        norms.append(norm)

    for _ in range(options.warmup):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(options.steps):
        step()
    wait()
    seconds = (time.perf_counter() - began) / options.steps
    plan = harness.plan  # the one that the last step ran under
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    rss = psutil.Process().memory_info().rss
    measured, reserved = harness.measured(), torch.cuda.max_memory_reserved() if on_gpu else 0
    home = next(iter(plan.budget))
    every = harness.step_seconds[before:]
    ahead = sum(harness.were_ahead[-options.steps :])
    if_not = plan.about.seconds_if_not_clipped
    return {
        **describe_plan(plan),
        "max_norm": max_norm,
        "predicted_step_s": if_not if if_not is not None and 2 * ahead > options.steps else plan.predicted.seconds,
        "predicted_if_not_clipped_s": if_not,
        "status": "ok",
        "fits": True,
        "tokens_per_s": round(batch["input_ids"].numel() / seconds, 1),
        "step_s": round(seconds, 5),
        "median_step_s": round(statistics.median(every[options.warmup :]), 5),
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else measured.peak[home],
        "peak_reserved": reserved,
        "peak_reserved_run": reserved,
        "device_used": total - free,
        "host_rss": rss,
        "harness_step_s": measured.seconds,
        "harness_peak": measured.peak[home],
        "harness_host": sum(size for tier, size in measured.peak.items() if tier != home),
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-1]),
        "losses": " ".join(f"{float(x):.6f}" for x in losses),
        "solve_s": round(plan.solve_seconds, 1),
        "steps_clipped": sum(n is not None and float(n) > max_norm for n in norms),
        "steps_ahead": ahead,
        "seconds_of_steps": " ".join(f"{s:.3f}" for s in every),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if on_gpu else 0,
        "notes": "; ".join(harness.notes),
    }


def train_step(model, optimizer, batch, max_norm):
    """The loop of a user: (its loss, the norm before clipping)."""
    loss = model(**batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) if max_norm is not None else None
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def profile(step, path):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        step()
        step()
        torch.cuda.synchronize()
    prof.export_chrome_trace(path)


if __name__ == "__main__":
    main()
