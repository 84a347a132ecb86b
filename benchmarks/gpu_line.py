"""Auto, chen and plain on a GPU: predicted against measured peak and step time over activation budgets.

python benchmarks/gpu_line.py [--shape 1b] [--batch 4] [--seq 2048] [--out results.csv]
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import holdall
from holdall.api import environment
from holdall.testing.contracts import train

SHAPES = {
    "160m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--out", default="gpu_line.csv")
    parser.add_argument("--budgets", default="100,75,50,35,25")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=options.seq, use_cache=False, **SHAPES[options.shape])
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.randint(0, config.vocab_size, (options.batch, options.seq), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    start = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    train(model, batch, optimizer, 2)
    hardware = holdall.probe("cuda")
    print({t.name: (f"{t.read / 1e9:.1f}", f"{t.write / 1e9:.1f}") for t in hardware.tiers}, hardware.overhead)
    began = time.perf_counter()
    trace = holdall.trace(model, batch, optimizer=optimizer)
    del optimizer
    print(trace, f"traced in {time.perf_counter() - began:.1f} s")
    plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted
    fixed = sum(t.nbytes for t in trace.tensors.values() if t.born < 0)
    activations = plain.peak["gpu"] - fixed
    rows = []
    reference: list[float] = []
    for planner, share in [("nop", 100), *[("auto", int(s)) for s in options.budgets.split(",")], ("chen", 0)]:
        budget = hardware.home.capacity if planner != "auto" else fixed + activations * share // 100
        row = {"planner": planner, "share": share, "budget": budget}
        try:
            plan = holdall.plan(trace, planner=planner, budget=budget, hardware=hardware)
        except holdall.Infeasible as error:
            rows.append({**row, "why": error.fact})
            print(rows[-1])
            continue
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        with holdall.apply(plan, model, optimizer, enforce=False) as harness:
            losses = train(model, batch, optimizer, 6)
        reference = reference or losses
        measured = harness.measured()
        assert measured is not None
        row |= {
            "actions": str(plan.count()),
            "predicted_peak": plan.predicted.peak["gpu"],
            "measured_peak": measured.peak["gpu"],
            "peak_error": plan.predicted.peak["gpu"] / measured.peak["gpu"] - 1,
            "predicted_reserved": plan.predicted.reserved,
            "measured_reserved": measured.reserved,
            "predicted_s": plan.predicted.seconds,
            "measured_s": measured.seconds,
            "time_error": plan.predicted.seconds / measured.seconds - 1,
            "losses_equal": losses == reference,
            "solve_s": plan.solve_seconds,
            "notes": "; ".join(harness.notes),
        }
        rows.append(row)
        del harness, optimizer  # or the next row would carry this one's optimizer state
        print({k: (f"{v:.4g}" if isinstance(v, float) else v) for k, v in row.items()}, flush=True)
    about = environment()
    about["commit"] = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about |= {"shape": options.shape, "batch": options.batch, "seq": options.seq}
    fields = list(dict.fromkeys(k for row in rows for k in row)) + list(about)
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
