"""Small families of models over two ranks of gloo: `fit`'s defaults on each mesh, beside one process on the same batches.

python benchmarks/families_on_ranks.py [--ways fsdp,tp,cp] [--families all] [--share 100] [--seconds 150]
                                       [--out benchmarks/results/families_on_ranks.csv]

All ranks have the same batch and the same random state, and dropout is off, so that four clipped AdamW steps must have the
losses and gradient norms of one process: `equal` within 2e-5 and 2e-3 of them. `refused`: by a line, before the first step.
`--share`: the budget, in per cent of the peak of the mesh's step with everything kept. Rows of a family, way and share replace
older ones.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdall
from holdall.api import environment
from holdall.testing.conformance import make, seed
from holdall.testing.families import FAMILIES, Family
from holdall.testing.ranks import RanksFailed, on_ranks
from holdall.testing.worlds import machine

WAYS: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"dp": 2}},
    "zero2": {"mesh": {"dp": 2}, "shard": "zero2"},
    "zero3": {"mesh": {"dp": 2}, "shard": "zero3"},
    "tp": {"mesh": {"tp": 2}},
    "sequence": {"mesh": {"tp": 2}, "shard": "sequence"},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"ep": 2}},
}
STEPS = 4
LOSSES, NORMS = 2e-5, 2e-3  # relative
FIELDS = ("family", "kind", "way", "share", "result", "losses_apart", "norms_apart", "budget", "predicted", "measured")
MORE = ("actions", "message", "seconds", "python", "torch", "machine", "threads", "gpu", "commit", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="fsdp,tp,cp")
    parser.add_argument("--families", default="all", help="names, or all")
    parser.add_argument("--share", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=150.0, help="for one family")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/families_on_ranks.csv"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    about = {**environment(), "threads": 1, "commit": said or "unknown", "cpu": platform.processor() or platform.machine()}
    names = list(FAMILIES) if options.families == "all" else options.families.split(",")
    for way in options.ways.split(","):
        for name in names:
            began = time.perf_counter()
            try:
                found = on_ranks(2, trained, name, way, options.share, timeout=options.seconds)
                row = found[0] if found[0]["result"] == found[1]["result"] else {"result": "ranks disagree"}
            except RanksFailed as error:
                row = {"result": "failed", "message": str(error).strip().splitlines()[-1]}
            row |= {"family": name, "kind": FAMILIES[name].kind, "way": way, "share": options.share}
            row["seconds"] = round(time.perf_counter() - began, 1)
            print(way, name, row["result"], row.get("actions", ""), row.get("message", "")[:120], flush=True)
            write(options.out, {**row, **{key: about[key] for key in MORE if key in about}})


def trained(name: str, way: str, share: int) -> dict[str, Any]:
    """A row, on a rank."""
    family, given = FAMILIES[name], WAYS[way]
    try:
        expected = train(*world(family), family)
    except Exception as error:  # a family may raise anything
        return {"result": "plain training failed", "message": str(error)[:300]}
    try:
        budget = int(share / 100 * whole_peak(family, given))
        model, batch, optimizer = world(family)
        harness = holdall.fit(model, optimizer, batch, budget=budget, hardware=machine(), loss=family.loss, **given)
        with harness:
            losses, norms = train(model, batch, optimizer, family)
            predicted, measured = harness.plan.predicted.peak["cpu"], max(harness.step_peaks)
            actions = " ".join(f"{count}x{action}" for action, count in harness.plan.count().items())
    except holdall.HoldallError as error:
        return {"result": "refused", "message": str(error).splitlines()[0][:300]}
    except Exception:  # what should not be
        return {"result": "failed", "message": traceback.format_exc().strip().splitlines()[-1][:300]}
    apart = farthest(losses, expected[0]), farthest(norms, expected[1])
    return {
        "result": "equal" if apart[0] <= LOSSES and apart[1] <= NORMS else "different",
        "losses_apart": f"{apart[0]:.1e}",
        "norms_apart": f"{apart[1]:.1e}",
        "budget": budget,
        "predicted": predicted,
        "measured": measured,
        "actions": actions,
    }


def whole_peak(family: Family, given: dict[str, Any]) -> int:
    """Of a rank's step with everything kept."""
    model, batch, optimizer = world(family)
    trace = holdall.trace(model, batch, optimizer=optimizer, loss=family.loss, **given)
    return holdall.plan(trace, planner="nop", hardware=machine()).predicted.peak["cpu"]


def world(family: Family) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """The family's model, batch and optimizer, without dropout."""
    model, batch, optimizer = make(family)
    for owner in (*model.modules(), *(m.config for m in model.modules() if hasattr(m, "config"))):
        for key, value in list(vars(owner).items()):
            if isinstance(value, float) and ("drop" in key or (key == "p" and "Drop" in type(owner).__name__)):
                setattr(owner, key, 0.0)
    seed(1)
    return model, batch, optimizer


def train(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, family: Family) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of clipped steps."""
    losses, norms = [], []
    seed(1)
    for _ in range(STEPS):
        loss = family.loss_of(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def farthest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True))


def write(path: Path, row: dict[str, Any]) -> None:
    """Add a row, or replace that of the same family, way and share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    key = [str(row[k]) for k in ("family", "way", "share")]
    rows = [old for old in rows if [old[k] for k in ("family", "way", "share")] != key]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*FIELDS, *MORE), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


if __name__ == "__main__":
    main()
