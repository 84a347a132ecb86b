"""Every precision recipe beside bf16: a small GPT on the bundled text, on the CPU.

python benchmarks/recipes.py [--steps 300] [--only fp8,int4] [--commit HASH] [--out FILE] [--figure FILE]

All start from the same weights and see the same batches, with AdamW at one rate (the one that `optimizers.py` found for it).
Final loss: the mean of the last 20 steps. The band is how far above bf16's loss the recipe's paper lets one expect it; where a
paper says "on par" and no number, 2 % is our reading, and recipes without a claim on language models have none. Bytes are what
the step of a trace under the recipe saves for backward. bf16 has a second row with another seed, to show what chance does. A
recipe whose loss is not finite is said to diverge, with the first layer that gave such numbers.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from typing import Any

import torch
from optimizers import ADAMW, BATCH, SEQ, TAIL, VOCABULARY, SmallGPT
from rich.progress import track

import holdall
from holdall import precision
from holdall.api import environment
from holdall.training.data import Sequences, load_sequences, make_encoder

HEAD = "skip=head"  # a model of Hugging Face names its head itself
RECIPES: dict[str, tuple[float | None, str]] = {
    "bf16-master": (None, ""),
    "fp32": (0.02, "arXiv 1710.03740: mixed precision as float32"),
    "bf16-autocast": (0.02, "arXiv 1710.03740: mixed precision as float32"),
    "bf16-stochastic": (0.02, "arXiv 2010.06192: bf16 with stochastic rounding as float32"),
    f"fp8:{HEAD}": (0.02, "arXiv 2209.05433: as 16 bits"),
    f"fp8:scaling=row:{HEAD}": (0.02, "arXiv 2209.05433: as 16 bits"),
    f"fp8:scaling=delayed:{HEAD}": (0.02, "arXiv 2209.05433: as 16 bits"),
    f"mxfp8:{HEAD}": (0.02, "arXiv 2310.10537: MXFP8 as float32"),
    f"nvfp4:{HEAD}": (0.03, "arXiv 2509.25149: within 1.5 % of FP8's loss, with layers in bf16 that ours lacks"),
    f"int8:{HEAD}": (0.02, "arXiv 1805.11046: within 1 % of accuracy, on images"),
    f"int4:{HEAD}": (0.05, "arXiv 2306.11987: fine-tuning near 16 bits"),
    f"int4:sampling=false:{HEAD}": (0.05, "arXiv 2306.11987: fine-tuning near 16 bits"),
    f"fp4:{HEAD}": (None, "NeurIPS 2020: images and one LSTM"),
    "dorefa": (None, "arXiv 1606.06160: images"),
    "qat-int8": (0.02, "arXiv 1712.05877: near float32"),
    "qat-fp8": (None, "the same rule in FP8, by torchao"),
}


def train(name: str, data: Sequences, *, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = SmallGPT()
    first = {"tokens": data.batch(0, BATCH)["input_ids"]}
    saved = saved_bytes(name, model, first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW.lr, weight_decay=0.0)
    warm = max(1, steps // 10)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(n, steps) / steps))
    )
    losses: list[float] = []
    culprit = ""
    began = time.process_time()
    with precision.prepare(name, model, optimizer) as session:
        for n in range(steps):
            tokens = data.batch(n * BATCH, BATCH)["input_ids"]
            with session.autocast():
                loss = model(tokens)
            if not loss.isfinite():
                culprit = first_to_fail(model, tokens)
                break
            session.backward(loss)
            session.step()
            losses.append(loss.item())
            rate.step()
    final = sum(losses[-TAIL:]) / max(1, len(losses[-TAIL:]))
    return {
        "first_loss": round(losses[0], 4),
        "final_loss": round(final, 4) if not culprit else "",
        "diverged_at": f"step {len(losses)}, {culprit}" if culprit else "",
        "saved_bytes": saved,
        "cpu_seconds": round(time.process_time() - began, 1),
        "curve": [round(sum(losses[i : i + 10]) / len(losses[i : i + 10]), 4) for i in range(0, len(losses), 10)],
    }


def saved_bytes(name: str, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int | str:
    """What backward keeps, by a trace; a recipe that no plan takes has none."""
    try:
        trace = holdall.trace(model, batch, precision=None if name == "fp32" else name)
    except holdall.Unsupported:
        return ""
    return sum({s.tensor: trace.tensors[s.tensor].nbytes for s in trace.saves}.values())


def first_to_fail(model: torch.nn.Module, tokens: torch.Tensor) -> str:
    """The first module that makes a number that is not finite."""
    found: list[str] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: check(out, name, found))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return found[0] if found else "the loss"


def check(out: Any, name: str, found: list[str]) -> None:
    if isinstance(out, torch.Tensor) and not out.isfinite().all():
        found.append(name)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for row in rows:
        if row["recipe"] != "bf16-master, other seed":
            wide = row["recipe"] == "bf16-master"
            label = str(row["recipe"]).replace(f":{HEAD}", "")
            axes.plot(range(5, 10 * len(row["curve"]), 10), row["curve"], label=label, linewidth=2.5 if wide else 1.2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, mean of ten steps")
    axes.set_title("A small GPT on the bundled text, by precision recipe")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/recipes.csv")
    parser.add_argument("--figure", default="", help="draw the losses here (SVG)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="recipes, by commas; bf16-master always runs")
    parser.add_argument("--commit", default="", help="what to write into the column")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = Path(holdall.__file__).parent / "data" / "corpus.txt"
    data = load_sequences(text, make_encoder(None), seq=SEQ, vocabulary=VOCABULARY)
    chosen = options.only.split(",") if options.only else []
    runs = [("bf16-master", "bf16-master", 0), ("bf16-master, other seed", "bf16-master", 1)]
    runs += [(n, n, 0) for n in RECIPES if n != "bf16-master" and (not chosen or n.split(":")[0] in chosen)]
    where = {**environment(), "commit": options.commit}
    rows: list[dict[str, Any]] = []
    for label, name, seed in track(runs, description="recipes"):
        row = train(name, data, steps=options.steps, seed=seed)
        band, claim = RECIPES[name]
        above = row["final_loss"] / (rows[0] if rows else row)["final_loss"] - 1 if row["final_loss"] else math.inf
        within = "" if band is None else "yes" if above <= band else "no"
        about = {"recipe": label, "seed": seed, "steps": options.steps, **row}
        rows.append({**about, "above_bf16": round(above, 4), "band": band, "within": within, "claim": claim, **where})
        with Path(options.out).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if options.figure:
        draw(rows, Path(options.figure))
    print(f"{'recipe':>32} {'loss':>7} {'bf16':>7} {'band':>5} {'within':>6} {'saved':>11} {'s':>6}")
    for r in rows:
        band = "" if r["band"] is None else f"{r['band']:.0%}"
        loss = f"{r['final_loss']:>7.3f} {r['above_bf16']:>+7.1%}" if r["final_loss"] else f"diverged: {r['diverged_at']}"
        print(f"{r['recipe']:>32} {loss} {band:>5} {r['within']:>6} {r['saved_bytes']:>11} {r['cpu_seconds']:>6}")


if __name__ == "__main__":
    main()
