"""Every low-memory optimizer beside AdamW: a small GPT on the bundled text, on the CPU.

python benchmarks/optimizers.py [--steps 300] [--only galore,came] [--commit HASH] [--out benchmarks/results/optimizers.csv]
python benchmarks/optimizers.py --search --steps 120

All start from the same weights and see the same batches; nothing is clipped, since not all can. The rate rises over a tenth
of the steps and falls to a tenth as a cosine. Final loss: the mean of the last 20 steps. State bytes: what `state_bytes` said
before the first step, and the storages counted after the last. The learning rate of each, AdamW's too, is the best
of `TRIED` after 120 steps (`--search`). The band is how far above AdamW's loss the optimizer's paper lets one expect it;
where a paper says "on par" and no number, 2 % is our reading. AdamW has a second row with another seed, to show what chance
does.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

import holdall
from holdall.api import environment
from holdall.registry import member_class, member_names
from holdall.testing.optimizers import allocated
from holdall.training.data import Sequences, load_sequences, make_encoder

WIDTH, HEADS, LAYERS, SEQ, BATCH, VOCABULARY = 64, 4, 4, 64, 4, 256
RANK = WIDTH // 4
TAIL = 20  # steps whose mean is the final loss
ON_PAR = 0.02


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: a member of the folder with its options, its rate, and what its paper claims."""

    lr: float
    options: dict[str, Any] = field(default_factory=dict)  # of the group of inner matrices if `grouped`, else of all
    grouped: bool = False  # parameters are sorted by the class's own `groups(model, ...)`
    band: float | None = None  # relative to AdamW's loss; None: the paper claims nothing against AdamW here
    claim: str = ""
    around: Callable[[Any, nn.Module], AbstractContextManager[Any]] = lambda *_: nullcontext()  # what the loop must stand in


ENTRIES: dict[str, dict[str, Entry]] = {
    "adafactor": {
        "adafactor": Entry(lr=1e-1, band=ON_PAR, claim="arXiv 1804.04235: as Adam on WMT En-De"),
        "adafactor, momentum": Entry(
            lr=1e-1, options={"beta1": 0.9}, band=ON_PAR, claim="arXiv 1804.04235: as Adam on WMT En-De"
        ),
    },
    "came": {"came": Entry(lr=3e-4, band=ON_PAR, claim="arXiv 2307.02047: as Adam or better, BERT and GPT-2")},
    "adam_mini": {
        "adam-mini": Entry(lr=3e-3, grouped=True, band=ON_PAR, claim="arXiv 2406.16793: on par with AdamW, GPT-2 and Llama"),
    },
    "apollo": {
        "apollo": Entry(
            lr=1e-2, grouped=True, options={"rank": RANK}, band=ON_PAR, claim="arXiv 2412.05270: AdamW's perplexity or better"
        ),
        "apollo-mini": Entry(
            lr=1e-2,
            grouped=True,
            options={"rank": 1, "scale_type": "tensor", "scale": 128.0},
            band=ON_PAR,
            claim="arXiv 2412.05270: AdamW's perplexity or better",
        ),
    },
    "muon": {
        "muon": Entry(
            lr=1e-2, grouped=True, band=ON_PAR, claim="arXiv 2502.16982: AdamW's loss with about half of the training"
        )
    },
    "galore": {
        "galore": Entry(
            lr=3e-2, grouped=True, options={"rank": RANK}, band=ON_PAR, claim="arXiv 2403.03507: comparable, LLaMA 60M-1B"
        ),
        "galore, 8-bit": Entry(
            lr=3e-2, grouped=True, options={"rank": RANK, "bits": 8}, band=ON_PAR, claim="arXiv 2403.03507: comparable"
        ),
        "q-galore (without int8 weights)": Entry(
            lr=3e-2,
            grouped=True,
            options={"rank": RANK, "bits": 8, "projector_bits": 4, "lazy": True},
            band=ON_PAR,
            claim="arXiv 2407.08296: comparable",
        ),
    },
    "flora": {"flora": Entry(lr=1e-1, options={"rank": RANK}, claim="arXiv 2402.03293: against Adafactor with momentum only")},
    "adam8bit": {
        "adam-8bit": Entry(
            lr=3e-3, grouped=True, band=0.01, claim="arXiv 2110.02861: 32-bit Adam's results; 1 % is our reading"
        )
    },
    "lomo": {"lomo": Entry(lr=3e-1, claim="arXiv 2306.09782: SGD, for fine-tuning")},
    "adalomo": {"adalomo": Entry(lr=1e-1, band=ON_PAR, claim="arXiv 2310.10195: on par with AdamW, instruction tuning")},
    "mezo": {"mezo": Entry(lr=1e-3, claim="arXiv 2305.17333: for fine-tuning with prompts; thousands of steps")},
    "deepzero": {
        "deepzero": Entry(
            lr=1e-1,
            options={"keep": 6e-5, "mu": 1e-2},
            claim="arXiv 2310.02025: image models; here 10 coordinates a step of 235,904, for time",
        )
    },
    "compact": {
        "compact": Entry(
            lr=3e-3,
            grouped=True,
            options={"rank": RANK},
            claim="arXiv 2410.15352: a small loss of perplexity, no bound given",
            around=lambda optimizer, model: optimizer.sketching(model),
        )
    },
}
ADAMW = Entry(lr=3e-3)
TRIED: dict[str, tuple[float, ...]] = {
    "adamw": (1e-3, 3e-3, 1e-2),
    "adafactor": (3e-2, 1e-1, 3e-1),
    "came": (1e-4, 3e-4, 1e-3),
    "adam_mini": (1e-3, 3e-3, 1e-2),
    "apollo": (3e-3, 1e-2, 3e-2),
    "muon": (3e-3, 1e-2, 3e-2),
    "galore": (1e-2, 3e-2, 1e-1),
    "flora": (3e-2, 1e-1, 3e-1),
    "adam8bit": (1e-3, 3e-3, 1e-2),
    "lomo": (1e-1, 3e-1, 1.0),
    "adalomo": (3e-2, 1e-1, 3e-1),
    "mezo": (1e-5, 1e-4, 1e-3),
    "deepzero": (1e-2, 1e-1),
    "compact": (1e-3, 3e-3, 1e-2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, self.head_dim)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(seen.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class SmallGPT(nn.Module):
    """Some 0.24 million parameters; the head is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next token."""
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make(name: str, entry: Entry, model: nn.Module) -> Any:
    """The optimizer over the model's parameters."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=entry.lr, weight_decay=0.0)
    cls = member_class("optim", name)
    if entry.grouped:
        return cls(cls.groups(model, **entry.options), lr=entry.lr)
    return cls(model.parameters(), lr=entry.lr, **entry.options)


def train(name: str, entry: Entry, data: Sequences, *, steps: int, seed: int) -> dict[str, Any]:
    """One run: losses, state and seconds."""
    torch.manual_seed(seed)
    model = SmallGPT()
    optimizer = make(name, entry, model)
    said = [optimizer.state_bytes(p) for p in model.parameters()] if name != "adamw" else []
    warm = max(1, steps // 10)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min(1.0, (n + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * min(n, steps) / steps))
    )
    losses = []
    began = time.process_time()  # one thread: what it computed, whoever else was at work
    with entry.around(optimizer, model):
        for n in range(steps):
            tokens = data.batch(n * BATCH, BATCH)["input_ids"]
            if getattr(optimizer, "forward_only", False):
                with torch.no_grad():
                    losses.append(float(optimizer.step(lambda tokens=tokens: model(tokens))))
            else:
                loss = model(tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            rate.step()
    seconds = time.process_time() - began
    measured = sum(allocated(optimizer.state.get(p, {})) for p in model.parameters())
    final = sum(losses[-TAIL:]) / len(losses[-TAIL:])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": round(losses[0], 4),
        "final_loss": round(final, 4),
        "predicted_state": sum(said) if said else "",
        "measured_state": measured,
        "cpu_seconds": round(seconds, 1),
    }


def search(names: list[str], data: Sequences, steps: int) -> None:
    """All rates of `TRIED` for the first entry of each member; its other entries use the same rate."""
    for name in names:
        entry = next(iter({"adamw": {"adamw": ADAMW}, **ENTRIES}[name].values()))
        for lr in TRIED[name]:
            row = train(name, replace(entry, lr=lr), data, steps=steps, seed=0)
            used = "  (in use)" if lr == entry.lr else ""
            print(f"{name:>10}  {lr:<7g} {row['final_loss']:.3f}{used}", flush=True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/optimizers.csv")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="names of the folder, by commas")
    parser.add_argument("--commit", default="", help="what to write into the column")
    parser.add_argument("--search", action="store_true", help="try the learning rates, write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = Path(holdall.__file__).parent / "data" / "corpus.txt"
    data = load_sequences(text, make_encoder(None), seq=SEQ, vocabulary=VOCABULARY)
    names = [n for n in member_names("optim") if not options.only or n in options.only.split(",")]
    if options.search:
        search([n for n in TRIED if n in names or (n == "adamw" and not options.only)], data, options.steps)
        return
    runs = [("adamw", "adamw", ADAMW, 0), ("adamw", "adamw, other seed", ADAMW, 1)]
    for name in names:  # one without an entry runs as it comes
        runs += [(name, label, entry, 0) for label, entry in ENTRIES.get(name, {name: Entry(lr=1e-3)}).items()]
    where = {**environment(), "commit": options.commit}
    rows: list[dict[str, Any]] = []
    for name, label, entry, seed in track(runs, description="optimizers"):
        row = train(name, entry, data, steps=options.steps, seed=seed)
        reference = (rows[0] if rows else row)["final_loss"]
        above = row["final_loss"] / reference - 1
        within = "" if entry.band is None else "yes" if above <= entry.band else "no"
        told = " ".join(f"{k}={v}" for k, v in entry.options.items())
        about = {"optimizer": label, "options": told, "lr": entry.lr, "seed": seed, "steps": options.steps}
        claims = {"above_adamw": round(above, 4), "band": entry.band, "within": within, "claim": entry.claim}
        rows.append({**about, **row, **claims, **where})
        write(Path(options.out), rows)
    share = rows[0]["measured_state"]
    print(
        f"{'optimizer':>32} {'lr':>7} {'loss':>7} {'AdamW':>7} {'band':>5} {'within':>6} {'state':>9} {'of AdamW':>8} {'s':>6}"
    )
    for r in rows:
        band = "" if r["band"] is None else f"{r['band']:.0%}"
        state = f"{r['measured_state']:>9,} {r['measured_state'] / share:>8.1%}"
        loss = f"{r['final_loss']:>7.3f} {r['above_adamw']:>+7.1%}"
        print(f"{r['optimizer']:>32} {r['lr']:>7g} {loss} {band:>5} {r['within']:>6} {state} {r['cpu_seconds']:>6}")
    wrong = [r["optimizer"] for r in rows if r["predicted_state"] not in ("", r["measured_state"])]
    print(f"state bytes predicted wrongly: {', '.join(wrong) or 'none'}")


if __name__ == "__main__":
    main()
