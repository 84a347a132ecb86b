"""Placements of model states on a GPU, one after the other: predicted against measured, and where the time goes.

python benchmarks/engine_variants.py [--shape 3b] [--steps 6] [--variants a,b] [--out results.csv]
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import resource
import time

import torch
from peers import SHAPES, build_ids, build_model

import holdall
from holdall.actions.place import Place
from holdall.actions.recompute import Recompute
from holdall.api import environment
from holdall.cost.roofline import cost_trace
from holdall.planners.nop import Nop
from holdall.planning.finish import finish
from holdall.types import Problem


def variants(trace):
    """Name -> (actions, when)."""
    layers = [u.name for u in trace.units if ".layers." in u.name]
    recompute = [Recompute.of(trace, [b]) for b in trace.blocks if ".layers." in b.name]

    def placed(first, rest, weights="resident", when="overlap_forward", device=0, slots=2):
        """`device`: so many layers updated on the device; of the rest every other as `first` and `rest` say."""
        rows = {}
        for n, name in enumerate(layers):
            update = "device" if n < device else (first if n % 2 else rest)
            rows[name] = (weights, update)
        return [Place.of(trace, rows, when=when, slots=slots), *recompute]

    return {
        "all-device": [Place.all(trace), *recompute],
        "host": placed("host", "host"),
        "via_device": placed("via_device", "via_device"),
        "mixed": placed("via_device", "host"),
        "mixed-device4": placed("via_device", "host", device=4),
        "host-backward": placed("host", "host", when="backward"),
        "mixed-backward": placed("via_device", "host", when="backward"),
        "streamed": placed("host", "host", weights="streamed"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--variants", default="host,via_device,mixed,mixed-device4,host-backward,streamed,all-device")
    parser.add_argument("--out", default="engine_variants.csv")
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    hardware = holdall.probe("cuda", quick=True)
    print("probe", hardware.overhead, [(t.name, t.read, t.write) for t in hardware.tiers], hardware.updates, flush=True)
    rows = []
    model = optimizer = None
    for name in options.variants.split(","):
        if model is None:
            began = time.perf_counter()
            model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device="cpu").train()
            ids = build_ids(options.shape, batch=4, seq=options.seq, device="cuda")
            batch = {"input_ids": ids, "labels": ids}
            print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        began = time.perf_counter()
        trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16")
        traced = time.perf_counter() - began
        problem = Problem(
            trace=cost_trace(trace, hardware),
            hardware=hardware,
            budget={t.name: t.capacity for t in hardware.tiers},
            reads_gradients="backward" not in name,
        )
        row = {"variant": name}
        try:
            plan = finish(Nop(), problem, variants(problem.trace)[name])
            began = time.perf_counter()
            harness = holdall.apply(plan, model, optimizer, enforce=False)
            setup = time.perf_counter() - began
            losses, waits = [], []
            clock = []
            for _ in range(options.steps + 2):
                torch.cuda.synchronize()
                clock.append(time.perf_counter())
                loss = model(**batch).loss
                loss.backward()
                if problem.reads_gradients:
                    began = time.perf_counter()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    waits.append(time.perf_counter() - began)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            began = time.perf_counter()  # steady state: nothing waits in between
            for _ in range(options.steps):
                loss = model(**batch).loss
                loss.backward()
                if problem.reads_gradients:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            launched = (time.perf_counter() - began) / options.steps
            torch.cuda.synchronize()
            steady = (time.perf_counter() - began) / options.steps
            if options.profile:
                _profile(model, batch, optimizer, problem.reads_gradients, f"{options.profile}/{name}.json")
            measured = harness.measured()
            harness.close()
            tokens = batch["input_ids"].numel()
            row |= {
                "step_s": round(steady, 4),
                "tokens_per_s": round(tokens / steady),
                "launch_s": round(launched, 4),
                "events_s": round(measured.seconds, 4),
                "predicted_s": round(plan.predicted.seconds, 4),
                "predicted_gib": round(plan.predicted.peak["gpu"] / 2**30, 2),
                "measured_gib": round(measured.peak["gpu"] / 2**30, 2),
                "reserved_gib": round((measured.reserved or 0) / 2**30, 2),
                "predicted_host_gib": round(plan.predicted.peak.get("cpu", 0) / 2**30, 1),
                "host_gib": round(measured.peak.get("cpu", 0) / 2**30, 1),
                "rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
                "setup_s": round(setup, 1),
                "trace_s": round(traced, 1),
                "clip_s": round(sum(waits) / max(1, len(waits)), 4),
                "loss": [round(float(x), 4) for x in losses],
            }
        except Exception as error:
            import traceback

            traceback.print_exc()
            row["why"] = repr(error)[:200]
            model = None
        rows.append(row)
        print(json.dumps(row), flush=True)
        optimizer = None
        gc.collect()
        torch.cuda.empty_cache()
    about = environment()
    with open(options.out, "w", newline="") as file:
        fields = list(dict.fromkeys(k for r in rows for k in r)) + list(about)
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows({**r, **about} for r in rows)


def _profile(model, batch, optimizer, reads_gradients, path):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            if reads_gradients:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    with open(path.replace(".json", ".txt"), "w") as file:
        file.write(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        file.write(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=30))
    prof.export_chrome_trace(path + ".gz")


if __name__ == "__main__":
    main()
