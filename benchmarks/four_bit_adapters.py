"""Adapters over a frozen 8B Llama in 4 bits (`precision="nf4"`) through `holdall.fit`: does it train in the budget, how fast?

python benchmarks/four_bit_adapters.py [--budget 12] [--tokens 2048] [--steps 5] [--recipe nf4] [--out FILE] [--smoke]
python benchmarks/four_bit_adapters.py --largest [--budget 24]

The model is on the host in bf16, with random weights: it never is on the GPU as a whole. Adapters of rank 16 on all linear
layers, by PEFT where it is installed (else the same pair of matrices by `Adapted`), with default options of `fit`. One sequence
of random ids is learnt by heart, so that the loss must fall. `--largest`: plans for longer and longer sequences on a model
without memory, then trains with the longest that fits. `--smoke`: a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from long_contexts import GIB, Watch, host_bytes
from torch import nn

import holdall
from holdall import models, precision
from holdall.analysis.largest import largest

FIELDS = (
    "model", "recipe", "adapters", "rank", "tokens", "budget_gib", "result", "predicted_gib", "measured_gib", "driver_gib",
    "host_gib", "predicted_s", "step_s", "tokens_per_s", "build_s", "pack_s", "fit_s", "steps_s", "losses", "actions",
    "refused", "notes", "hardware", "torch", "commit",
)  # fmt: skip
RANK = 16
_AT_ONCE = 1 << 27  # random numbers that are drawn together


class Adapted(nn.Module):
    """A linear layer with a pair of small matrices beside it, as PEFT's."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        given: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.empty(rank, base.in_features, **given))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **given))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self._scale = 8 / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_layer(x)
        narrow = nn.functional.linear(x.to(self.down.dtype), self.down)
        return y + (nn.functional.linear(narrow, self.up) * self._scale).to(y.dtype)


def adapt(model: Any) -> tuple[nn.Module, str]:
    """The model under adapters, and by whom."""
    try:
        import peft
    except ImportError:
        model.requires_grad_(False)
        head = model.get_output_embeddings()
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and child is not head:
                    setattr(module, name, Adapted(child, RANK))
        return model, "own"
    made = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    return made, f"peft {peft.__version__}"


def on_host(name: str, device: str) -> Any:
    """The shape with random weights in bf16 on the host, drawn on the device piece by piece."""
    model: Any = models.build(models.describe(name), device="meta", dtype="bfloat16")
    made: dict[int, nn.Parameter] = {}
    torch.manual_seed(0)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in made:
                values = torch.ones(p.shape, dtype=p.dtype)
                if p.dim() > 1:
                    for piece in values.view(-1).split(_AT_ONCE):
                        piece.copy_(torch.empty(piece.shape, dtype=p.dtype, device=device).normal_(std=0.02))
                made[id(p)] = nn.Parameter(values)
            module._parameters[key] = made[id(p)]
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its frequencies are no parameters
    return model.train()


def batch_of(model: Any, tokens: int, device: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=device)
    return {"input_ids": ids, "labels": ids.clone()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)


def run(name: str, recipe: str, tokens: int, budget: float, steps: int, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    model, by = adapt(on_host(name, device))
    batch = batch_of(model, tokens, device)
    row: dict[str, Any] = {"tokens": tokens, "adapters": by, "rank": RANK, "build_s": time.perf_counter() - began}
    began = time.perf_counter()
    precision.plannable(recipe).put_on_to_trace(model)()  # what packing takes by itself
    row["pack_s"] = time.perf_counter() - began
    driver = None
    if device == "cuda":
        torch.cuda.empty_cache()
        driver = Watch()
    optimizer = adamw(model)
    began = time.perf_counter()
    harness = holdall.fit(model, optimizer, batch, budget=int(budget * GIB), precision=recipe)
    row |= {"fit_s": time.perf_counter() - began, "predicted_s": harness.plan.predicted.seconds}
    row["actions"] = " ".join(f"{n}x{k}" for k, n in sorted(harness.plan.count().items()))
    seconds, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
        del loss
    row |= {"steps_s": json.dumps([round(s, 3) for s in seconds]), "losses": json.dumps([round(x, 4) for x in losses])}
    row |= {
        "step_s": min(seconds[1:] or seconds),
        "result": "ran" if steps == 1 or losses[-1] < losses[0] else "does not learn",
    }
    row["tokens_per_s"] = tokens / row["step_s"]
    home = next(iter(harness.plan.budget))
    row |= {"predicted_gib": harness.plan.predicted.peak[home] / GIB, "measured_gib": harness.measured().peak[home] / GIB}
    seen = row["measured_gib"]
    if driver is not None:
        row["driver_gib"] = seen = driver.stop() / GIB
    if seen > budget:
        row["result"] = "over budget"
    row["host_gib"] = host_bytes() / GIB
    row["notes"] = " | ".join(" ".join(str(n).split()) for n in harness.notes)[:500]
    harness.close()
    return row


def longest(name: str, recipe: str, budget: float, device: str, start: int, step: int, most: int) -> tuple[int, int | None]:
    """The most tokens that have a plan, and the least that were refused."""
    with torch.device("meta"):
        model, _ = adapt(models.build(models.describe(name), device="meta", dtype="bfloat16").train())
    optimizer = adamw(model)

    def plan(tokens: int) -> holdall.Plan:
        began = time.perf_counter()
        traced = holdall.trace(model, batch_of(model, tokens, device), optimizer=optimizer, device=device, precision=recipe)
        try:
            return holdall.plan(traced, budget=int(budget * GIB))
        finally:
            print(f"{tokens} tokens: {time.perf_counter() - began:.0f} s to trace and plan", flush=True)

    found = largest(plan, start=start, step=step, most=most, near=0.05)
    return found.value, found.beyond.value if found.beyond is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--recipe", default="nf4")
    parser.add_argument("--budget", type=float, help="GiB; 12, or 24 with --largest")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--start", type=int, default=65536, help="of the search")
    parser.add_argument("--out", default="benchmarks/results/four_bit_adapters.csv")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    name, device = ("tiny-llama", "cpu") if options.smoke else (options.model, "cuda")
    budget = options.budget or (24.0 if options.largest else 12.0)
    tokens, refused = 64 if options.smoke else options.tokens, None
    if options.smoke and options.budget is None:
        budget = 2**21 / GIB
    if options.largest:
        start, step, most = (32, 16, 1024) if options.smoke else (options.start, 4096, 2**20)
        tokens, refused = longest(name, options.recipe, budget, device, start, step, most)
        print(f"{tokens} tokens fit, {refused} do not", flush=True)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"model": name, "recipe": options.recipe, "budget_gib": budget, "refused": refused}
    row |= {"torch": torch.__version__, "commit": os.environ.get("HOLDALL_COMMIT") or git.stdout.strip()}
    row["hardware"] = "CPU" if options.smoke else torch.cuda.get_device_name()
    row |= run(name, options.recipe, tokens, budget, options.steps, device)
    out = Path(options.out)
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerow({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()})
    print(json.dumps(row, indent=1, default=str))


if __name__ == "__main__":
    main()
