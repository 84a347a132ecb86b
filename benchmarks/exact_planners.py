"""Planners of recomputation on a tiny GPT-2 and a tiny Llama: predicted step time, predicted and measured peak.

The exact planners (`checkmate`, `moccasin`) must never be slower, by the simulator, than a heuristic with the same actions, and
every measured peak must be within 1 % of the predicted one. The script ends with 1 if either does not hold.

python benchmarks/exact_planners.py [--layers 2,3] [--planners dtr,checkmate] [--time-limit 30] [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import holdall
from holdall.api import environment
from holdall.experiments.real_steps import run_steps
from holdall.experiments.request import budget_leaving, plain_outcome
from holdall.registry import member_names
from holdall.testing.worlds import machine

EXACT = ("checkmate", "moccasin")
OTHERS = ("nop", "actnn", "zero_offload")  # which recompute nothing
HEURISTICS = tuple(name for name in member_names("planners") if name not in EXACT + OTHERS)
SHARES = (70, 60, 50, 40)  # % of plain training's activations
NEAR = 0.01  # of the predicted peak
BATCH, SEQ, VOCAB = 4, 64, 256


def build(name: str, layers: int) -> torch.nn.Module:
    """With the default config, in which keys and values are kept for decoding."""
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=layers, n_head=4, n_positions=SEQ)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def compare(name: str, layers: int, time_limit: float, planners: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every planner and budget; by recomputation alone."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    model = build(name, layers)
    trace = holdall.trace(model, batch, optimizer=adamw(model), device="cpu")
    plain = plain_outcome(trace, machine())
    rows = []
    for share in SHARES:
        for planner in planners:
            row: dict[str, Any] = {"model": name, "layers": layers, "share": share, "planner": planner}
            row |= {"budget_bytes": budget_leaving(plain, share / 100), "plain_seconds": plain.seconds}
            options = {"time_limit": time_limit} if planner in EXACT else {}
            try:
                plan = holdall.plan(
                    trace, planner=planner, budget=row["budget_bytes"], hardware=machine(), allow=["recompute"], **options
                )
            except holdall.Infeasible:
                rows.append(row | {"problem": "does not fit"})
                print(*row.values(), "does not fit", flush=True)
                continue
            row |= {
                "predicted_seconds": plan.predicted.seconds,
                "predicted_overhead": round(plan.predicted.seconds / plain.seconds - 1, 6),
                "predicted_peak_bytes": plan.predicted.peak["cpu"],
                "measured_peak_bytes": measured_peak(plan, build(name, layers), batch),
                "solve_seconds": round(plan.solve_seconds, 2),
                "problem": "",
            }
            rows.append(row)
            print(*row.values(), flush=True)
    return rows


def measured_peak(plan: holdall.Plan, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of two real steps; 0: an online planner found nothing to evict."""
    try:
        seen = run_steps(model, adamw(model), (batch for _ in range(2)), plan=plan).report
    except holdall.OverBudget:
        return 0
    assert seen is not None and seen.measured is not None
    return seen.measured.peak["cpu"]


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """Where an exact planner is slower than a heuristic, or a measured peak is not the predicted one."""
    found = []
    for row in rows:
        where = f"{row['model']} {row['layers']} layers {row['share']} % {row['planner']}"
        others = [r for r in rows if all(r[k] == row[k] for k in ("model", "layers", "share")) and r["planner"] in HEURISTICS]
        best = min((r["predicted_seconds"] for r in others if not r["problem"]), default=float("inf"))
        if row["planner"] in EXACT and row.get("predicted_seconds", float("inf")) > best * (1 + 1e-9):
            found.append(f"{where}: slower than a heuristic")
        if not row["problem"] and abs(row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1) > NEAR:
            found.append(f"{where}: measured {row['measured_peak_bytes']}, predicted {row['predicted_peak_bytes']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--layers", default="2,3")
    parser.add_argument("--planners", default=",".join((*HEURISTICS, *EXACT)))
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for an exact planner")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_planners.csv"))
    asked = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    rows = []
    for name in asked.models.split(","):
        for layers in asked.layers.split(","):
            rows += compare(name, int(layers), asked.time_limit, asked.planners.split(","))
    about = {**environment(), "commit": commit, "seed": 0, "time_limit": asked.time_limit}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *about])
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    wrong = faults(rows)
    print("\n".join(wrong) or f"{len(rows)} rows: exact planners are never slower, and every peak is within 1 %")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
