"""Planners by name beside `auto` on one model and one budget, through `holdall.fit`.

python benchmarks/members_on_gpu.py [--shape llama-3.2-3b] [--budget 24] [--planners auto,gemini,ratel:tier=host]
                                    [--steps 6] [--out DIR] [--minutes 9] [--smoke]

A planner's options follow its name, `name:option=value`; `save_on_cpu` is torch's own way, without a budget; `peer:zero2` is a
method of `peers.py` (DeepSpeed's stage 2 with its states on the host) on the same shape of 3B, 4 x 4096 tokens, clipped, under
the same cap. Every row is a process of its own, and the first one is plain training, whose losses the others must have (within
the tolerance of `families_on_gpu.py`); peers start from other weights. `--smoke`: a tiny twin on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from families_on_gpu import GIB, Table, budget_for, can_fork, compare, run_child, warm_imports
from families_shapes import SHAPES

PLANNERS = "auto,zero_offload,stronghold,zero_infinity:tier=host,patrickstar,gemini,elixir,ratel:tier=host"

OTHERS = ("reference", "save_on_cpu")  # not ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b", choices=list(SHAPES))
    parser.add_argument("--recipe", default="bf16", choices=["bf16", "autocast"])
    parser.add_argument("--budget", type=float, default=24.0, help="GiB")
    parser.add_argument("--planners", default=PLANNERS)
    parser.add_argument("--rows", type=int, help="so many sequences of the shape's batch")
    parser.add_argument("--tokens", type=int, help="so many tokens of each")
    parser.add_argument("--norm", type=float, help="clip to this norm; 1e-4: every step is clipped")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row is begun after so many")
    parser.add_argument("--row-seconds", type=float, default=120.0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    folder = Path(options.out)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    table = Table(folder / ("members_smoke.csv" if options.smoke else "members_on_gpu.csv"), options.smoke)
    warm_imports([options.shape])
    forks = can_fork(options.smoke)
    asked: dict[str, Any] = {"shape": options.shape, "recipe": options.recipe, "smoke": options.smoke, "untimed": False}
    asked |= {"budget": int(options.budget * GIB), "steps": options.steps, "rows": options.rows, "tokens": options.tokens}
    asked["norm"] = options.norm
    for planner in ("reference", *options.planners.split(",")):
        left = options.minutes * 60 - (time.monotonic() - began)
        if left < 5:
            print("no time is left; a second call goes on from here")
            break
        if table.has(options.shape, options.recipe, "plain" if planner == "reference" else planner):
            continue
        plain = table.get(options.shape, options.recipe, "plain")
        if options.smoke and plain:
            asked["budget"] = budget_for("half", options.shape, [plain], plain, smoke=True)
        if planner.startswith("peer:"):
            table.add(peer(planner, options, min(options.row_seconds, left), table.get(options.shape, options.recipe, "plain")))
            continue
        row_of = {**asked, "what": planner, "fit": {} if planner in OTHERS else fit_options(planner)}
        log = folder / "logs" / f"{options.shape}-{planner.replace(':', '-')}.log"
        for row in run_child(row_of, driver=table.driver, log=log, limit=min(options.row_seconds, left), forks=forks):
            if planner not in OTHERS:
                row.setdefault("budget_gib", asked["budget"] / GIB)
                compare(row, plain, table.get(options.shape, options.recipe, "checkpointing"))
            table.add(row)
    print(f"{time.monotonic() - began:.0f} s in all")


def peer(name: str, options: argparse.Namespace, limit: float, plain: dict[str, Any] | None) -> dict[str, Any]:
    """A row of a method of `peers.py`."""
    row: dict[str, Any] = {"shape": options.shape, "recipe": options.recipe, "method": name, "budget_gib": options.budget}
    command = [sys.executable, str(Path(__file__).with_name("peers.py")), name.removeprefix("peer:"), "--clip"]
    command += ["--shape", "tiny", "--device", "cpu", "--batch", "2", "--seq", "64"] if options.smoke else ["--shape", "3b"]
    command += [] if options.smoke else ["--cap", str(options.budget)]
    began = time.monotonic()
    try:
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        ran = subprocess.run([*command, "--steps", "4"], capture_output=True, text=True, timeout=limit, check=False, env=env)
    except subprocess.TimeoutExpired:
        return {**row, "result": "failed", "message": f"took longer than {limit:.0f} s"}
    said = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    found = json.loads(said[-1].removeprefix("RESULT ")) if said else {"status": "failed", "why": ran.stderr[-250:]}
    row["row_s"] = time.monotonic() - began
    if found["status"] != "ok":
        return {**row, "result": "failed", "message": " ".join(str(found.get("why")).split())}
    row |= {"result": "ran", "step_s": found["median_step_s"], "losses": found["losses"], "notes": found.get("precision", "")}
    row |= {"host_gib": found["host_rss"] / GIB}
    row |= {"reserved_gib": found["peak_reserved_run"] / GIB} if "peak_reserved_run" in found else {}
    row |= {"of_plain": plain["step_s"] / found["median_step_s"]} if plain else {}
    return row


def fit_options(planner: str) -> dict[str, Any]:
    """Arguments of `fit` for `name:option=value:option=value`."""
    name, *given = planner.split(":")
    return {"planner": name, **dict(one.split("=", 1) for one in given)}


if __name__ == "__main__":
    main()
