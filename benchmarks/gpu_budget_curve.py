"""Tokens per second against the memory budget: holdall beside the methods of `peers.py`, each row in its own process.

python benchmarks/gpu_budget_curve.py --budgets none,60,48,32,24,16,12,8,6,4 --methods plain,fsdp2,ours --out curve.csv

A budget is in GiB and is kept by CUDA's caching allocator; `none` is the whole device. A method is `ours`, `ours:PLANNER`, or
a name of `peers.py`. A row goes to the CSV when it is there, so that a run that was killed keeps what it has; `--resume` takes
the rows of an earlier file over and runs the others. A crash or a hang costs one row.

A peer needs what it needs, so it is not run where the answer is known: not under a budget that its last run stayed within, not
under one far below what it allocated, and not after it ran out of memory. `--exhaustive` runs it everywhere.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peers import (
    ADAMW,
    GIB,
    MAX_NORM,
    add_workload,
    build_ids,
    build_model,
    cap_memory,
    environment,
    explain_failure,
    finish,
    measure,
    split_name,
    use_wheels,
)

Row = dict[str, Any]

FIELDS = [
    *("method", "planner", "budget_gib", "status", "fits", "tokens_per_s", "step_s", "median_step_s", "predicted_step_s"),
    *("predicted_peak", "predicted_reserved", "peak_allocated", "peak_reserved", "peak_reserved_run", "device_used"),
    *("host_rss", "host_used", "predicted_host", "loss_first", "loss_last", "losses", "precision", "clip", "why", "actions"),
    *("harness_step_s", "harness_peak", "setup_s", "row_s", "shape", "batch", "seq", "steps", "warmup", "seed"),
    *("gpu", "torch", "python", "commit"),
]
SETTLED = ("ok", "oom", "infeasible", "too_small")  # these do not change when the row is run again
SPARE = 8 * GIB  # smaller loss chunks and buckets under a smaller cap save less than this


# -- one row of ours, in its own process -------------------------------------------------------------------------------


def run_ours(options: argparse.Namespace) -> Row:
    """Fit an ordinary training loop into the budget, run it, and put what was said beside what was seen."""
    import holdall

    result: Row = {**environment(), "clip": "yes" if options.clip else "off"}
    try:
        if not options.uncapped:
            cap_memory(options.budget, options.device)
        model = build_model(options.shape, seq=options.seq, dtype=torch.float32, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        ids = build_ids(options.shape, batch=options.batch, seq=options.seq, device=options.device)
        batch = {"input_ids": ids, "labels": ids}
        budget = "auto" if options.budget is None else f"{options.budget:g}GiB"
        precision = {} if options.precision == "none" else {"precision": options.precision}
        began = time.perf_counter()
        harness = holdall.fit(model, optimizer, batch, budget=budget, planner=options.planner, **precision)
        result["setup_s"] = time.perf_counter() - began
        result["precision"] = "bf16 weights, fp32 master" if options.precision == "bf16" else "fp32 weights"
        result |= describe_plan(harness.plan)

        def step() -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        result |= measure(step, device=options.device, warmup=options.warmup, steps=options.steps, tokens=ids.numel())
        measured = harness.measured()
        result |= {"harness_step_s": measured.seconds, "harness_peak": next(iter(measured.peak.values()))}
        result["status"] = "ok"
        print(harness.report())
    except holdall.Infeasible as refused:
        result |= {"status": "infeasible", "why": refused.fact}
    except Exception as error:
        traceback.print_exc()
        result |= explain_failure(error)
        if options.device == "cuda":
            result["peak_allocated"] = torch.cuda.max_memory_allocated()
            result["peak_reserved"] = result["peak_reserved_run"] = torch.cuda.max_memory_reserved()
    return result


def describe_plan(plan: Any) -> Row:
    """What the plan promises: the first tier is the accelerator's memory, those after it lie on the host."""
    home, *far = plan.predicted.peak.values()
    return {
        "predicted_step_s": plan.predicted.seconds,
        "predicted_peak": home,
        "predicted_reserved": plan.predicted.reserved,
        "predicted_host": sum(far),
        "actions": " ".join(f"{count}x{name}" for name, count in sorted(plan.count().items())) or "none",
    }


# -- which rows to run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    run: bool
    why: str = ""
    row: bool = False  # not run, and yet an answer that belongs into the file


def decide(method: str, budget: float | None, earlier: Iterable[Mapping[str, Any]], *, exhaustive: bool = False) -> Verdict:
    """Whether to run a method under a budget (GiB; None: no cap), from its rows so far."""
    mine = [row for row in earlier if row_name(row) == method]
    limit = bytes_of(budget)
    if any(bytes_of(row["budget_gib"]) == limit and row["status"] in SETTLED for row in mine):
        return Verdict(run=False, why="done")
    larger = [row for row in mine if bytes_of(row["budget_gib"]) > limit]
    ours = method.startswith("ours")
    stops = ("infeasible",) if ours else ("oom", "too_small", "error", "timeout")
    for row in larger:
        if row["status"] in stops:
            return Verdict(run=False, why=f"{row['status']} at {label(row['budget_gib'])} already")
    ran = [row for row in larger if row["status"] == "ok" and row.get("peak_allocated")]
    if ours or exhaustive or not ran:
        return Verdict(run=True)
    last = min(ran, key=lambda row: bytes_of(row["budget_gib"]))
    where = f"at {label(last['budget_gib'])}"
    if int(last["peak_reserved_run"]) <= limit:
        return Verdict(run=False, why=f"it took {int(last['peak_reserved_run']) / GIB:.1f} GiB {where}")
    if int(last["peak_allocated"]) > limit + SPARE:
        needs = f"not run: it allocated {int(last['peak_allocated']) / GIB:.1f} GiB {where}"
        return Verdict(run=False, why=needs, row=True)
    return Verdict(run=True)


def row_name(row: Mapping[str, Any]) -> str:
    return f"ours:{row['planner']}" if row["method"] == "ours" else row["method"]


def bytes_of(budget: float | str | None) -> float:
    """A budget in bytes; no cap is more than any."""
    return float("inf") if budget in (None, "", "none") else float(budget) * GIB


def label(budget: float | str | None) -> str:
    return "no cap" if budget in (None, "", "none") else f"{float(budget):g} GiB"


# -- running a row -----------------------------------------------------------------------------------------------------


class Sampler(threading.Thread):
    """The most that was in use, above what was before, on the device (as its driver counts) and on the host.

    It lives in this process, so that the one being measured does not share its interpreter with it.
    """

    def __init__(self, every: float = 0.02) -> None:
        super().__init__(daemon=True)
        self.every = every
        self.stopped = threading.Event()
        self.read_device = _device_reader()
        self.least = self.most = self._read()

    def _read(self) -> tuple[int, int]:
        return self.read_device(), -psutil.virtual_memory().available

    def run(self) -> None:
        while not self.stopped.wait(self.every):
            now = self._read()
            self.most = tuple(map(max, self.most, now))
            self.least = tuple(map(min, self.least, now))  # the row before may still have been leaving at the start

    def stop(self) -> Row:
        self.stopped.set()
        self.join()
        device, host = (most - least for most, least in zip(self.most, self.least, strict=True))
        return {"device_used": device or None, "host_used": host}


def _device_reader() -> Any:
    """A function that says how many bytes of the first visible GPU are in use; always 0 where that cannot be asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    index = int(visible) if visible.isdigit() else 0
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:  # not installed, or there is no driver
        if not shutil.which("nvidia-smi"):
            return lambda: 0
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def ask() -> int:
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        return int(said) * 2**20 if said.isdigit() else 0

    return ask


def command(method: str, budget: float | None, options: argparse.Namespace) -> list[str]:
    here = Path(__file__).resolve().parent
    shared = [f"--{name}={getattr(options, name)}" for name in ("shape", "batch", "seq", "device", "steps", "warmup", "wheels")]
    shared.append("--clip" if options.clip else "--no-clip")
    if not method.startswith("ours"):
        cap = [] if budget is None else [f"--cap={budget:g}"]
        return [sys.executable, "-u", str(here / "peers.py"), method, *shared, *cap]
    ours = ["--worker=ours", f"--planner={method.partition(':')[2]}", f"--precision={options.precision}"]
    ours += [f"--budget={'none' if budget is None else format(budget, 'g')}"]
    ours += ["--uncapped"] if options.uncapped else []
    return [sys.executable, "-u", str(Path(__file__).resolve()), *ours, *shared]


def run_row(method: str, budget: float | None, options: argparse.Namespace) -> Row:
    """Run one row in a process of its own and return what it said, or why it said nothing."""
    logs = Path(f"{options.out}.logs")
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{method.replace(':', '-')}-{'none' if budget is None else format(budget, 'g')}.log"
    settings = options.ours_allocator if method.startswith("ours") else options.allocator
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"} | ({"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {})
    sampler = Sampler()
    began = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            command(method, budget, options), stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        sampler.start()
        try:
            process.wait(options.row_timeout)
            found: Row = {}
        except subprocess.TimeoutExpired:
            found = {"status": "timeout", "why": f"stopped after {options.row_timeout:.0f} s"}
        finally:
            with suppress(ProcessLookupError):  # the row's own session: the process and what it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    said = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if said:
        found |= json.loads(said[-1].removeprefix("RESULT "))
    elif not found:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        found = {"status": "error", "why": f"exit status {process.returncode}: {last[:300]}"}
    return {**found, **sampler.stop(), "row_s": time.perf_counter() - began}


# -- the file ----------------------------------------------------------------------------------------------------------


def complete(method: str, budget: float | None, found: Row, options: argparse.Namespace) -> Row:
    """A row of the file."""
    name, _, planner = method.partition(":")
    losses = found.pop("losses", [])
    workload = {key: getattr(options, key) for key in ("shape", "batch", "seq", "steps", "warmup", "commit")}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": 0,
        **workload,
        **{key: value for key, value in found.items() if value is not None},
        "method": name,
        "planner": planner,
        "budget_gib": "none" if budget is None else f"{budget:g}",
        "fits": found["status"] == "ok" and found.get("peak_reserved_run", 0) <= bytes_of(budget),
        **(
            {"loss_first": losses[0], "loss_last": losses[-1], "losses": " ".join(f"{v:.6f}" for v in losses)} if losses else {}
        ),
    }


def append(path: Path, row: Row) -> None:
    """Add a row now: the next one may be the last thing this machine does."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        if new:
            writer.writeheader()
        writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        file.flush()
        os.fsync(file.fileno())


def take_over(options: argparse.Namespace) -> list[Row]:
    """Settled rows of the same workload from the file to resume; ours only where they are of the same commit."""
    source = options.resume or options.out
    if not source.exists():
        return []
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    same = [r for r in rows if all(r[k] == str(getattr(options, k)) for k in ("shape", "batch", "seq"))]
    kept = [r for r in same if r["status"] in SETTLED and (r["method"] != "ours" or r["commit"] == options.commit)]
    if source.resolve() != options.out.resolve():
        for row in kept:
            append(options.out, row)
    return kept


def describe(row: Row) -> str:
    """One line about a row."""

    def gib(key: str) -> str:
        return f"{int(row[key]) / GIB:.1f}" if row.get(key) else "--"

    if row["status"] != "ok":
        return f"{row['status']}: {row.get('why', '')}"
    said = f" (said {row['predicted_step_s']:.3f})" if row.get("predicted_step_s") else ""
    expected = f" (said {gib('predicted_peak')})" if row.get("predicted_peak") else ""
    return (
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.3f} s{said}, peak {gib('peak_allocated')}{expected}, "
        f"reserved {gib('peak_reserved_run')}, device {gib('device_used')}, host {gib('host_rss')} GiB, "
        f"loss {row['loss_first']:.4f} -> {row['loss_last']:.4f}"
    )


# -- the command line --------------------------------------------------------------------------------------------------


def drive(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        with suppress(ModuleNotFoundError):  # only the sampler wants it
            use_wheels(options.wheels, ["pynvml"])
    began = time.perf_counter()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = take_over(options)
    planned = [(method, budget) for method in options.methods for budget in options.budgets]
    for number, (method, budget) in enumerate(planned, 1):
        elapsed = time.perf_counter() - began
        head = f"[{elapsed:4.0f} s] {number}/{len(planned)} {method} {label(budget)}:"
        verdict = decide(method, budget, rows, exhaustive=options.exhaustive)
        if not verdict.run and not verdict.row:
            print(head, "skipped,", verdict.why, flush=True)
            continue
        if verdict.run and elapsed > options.time_limit:
            print(f"[{elapsed:4.0f} s] the time limit is over; {len(planned) - number + 1} rows left for --resume", flush=True)
            break
        found = run_row(method, budget, options) if verdict.run else {"status": "too_small", "why": verdict.why}
        row = complete(method, budget, found, options)
        append(options.out, row)
        rows.append(row)
        print(head, describe(row), f"[{row.get('row_s', 0):.0f} s]", flush=True)


def parse_budget(text: str) -> float | None:
    return None if text.strip() == "none" else float(text)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload(parser)
    parser.set_defaults(clip=True)
    parser.add_argument("--budgets", default="none,60,48,32,24,16,12,8,6,4", help="GiB, or `none`")
    parser.add_argument("--methods", default="plain,checkpointing,bf16_master,torchao,fsdp2,zero2,zero3,ours")
    parser.add_argument("--planner", default="auto", help="for `ours` without one")
    parser.add_argument("--precision", default="bf16", help="what `ours` asks for; `none`: leave the weights as they are")
    parser.add_argument("--uncapped", action="store_true", help="plan `ours` for the budget, and let the allocator take more")
    parser.add_argument("--allocator", default="expandable_segments:True", help="PYTORCH_CUDA_ALLOC_CONF of the peers")
    parser.add_argument("--ours-allocator", default="", help="PYTORCH_CUDA_ALLOC_CONF of `ours`")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("budget_curve.csv"))
    parser.add_argument("--resume", type=Path, default=None, help="take the rows of this file over (default: those of --out)")
    parser.add_argument("--time-limit", type=float, default=400, help="seconds after which no row is begun")
    parser.add_argument("--row-timeout", type=float, default=170, help="seconds after which a row is stopped")
    parser.add_argument("--exhaustive", action="store_true", help="run peers also where the answer is known")
    parser.add_argument("--commit", default="", help="goes into every row")
    parser.add_argument("--worker", choices=("ours",), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=parse_budget, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warmup < 3:
        parser.error("--warmup must be 3 or more: the first steps fill pools and caches")
    options.budgets = sorted((parse_budget(b) for b in options.budgets.split(",")), key=bytes_of, reverse=True)
    options.methods = [f"ours:{options.planner}" if m == "ours" else m for m in options.methods.split(",")]
    for method in options.methods:
        if not method.startswith("ours:"):
            split_name(method)
    return options


def main() -> None:
    options = parse_options()
    if options.worker:
        finish(run_ours(options))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a row's process does not outlive this one
        drive(options)


if __name__ == "__main__":
    main()
