"""Whether two versions of this package make the same plans, action by action.

python benchmarks/same_plans.py dump before.json      (in the tree of one version)
python benchmarks/same_plans.py dump after.json       (in the tree of the other)
python benchmarks/same_plans.py compare before.json after.json

A dump holds the plans of 13 small families on two fixed machines (copies that overlap with computation, and copies that do
not), for budgets of 80, 65, 50 and 35 % of what plain training takes, by several planners and sets of allowed actions; and of
two larger shapes for a GPU (`--shapes`, none with `--shapes ""`). Nothing is measured, so equal code gives equal dumps. It uses
the public API alone, and so runs on older versions too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import holdall
from holdall import models
from holdall.testing.worlds import HUGGING_FACE, PLAIN, family, machine

SHARES = (80, 65, 50, 35)
LINK = 1e8  # bytes a second: about as much is gained by copies as by running blocks again
ACTIVATIONS = ("recompute", "offload")
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "auto, activations": {"allow": ACTIVATIONS},
    "auto, recompute": {"allow": ("recompute",)},
    "auto, offload": {"allow": ("offload",)},
    "auto, compress": {"allow": ("compress",)},
    "pofo": {"planner": "pofo"},
    "rockmate": {"planner": "rockmate", "menus": "cut"},
    "protrain": {"planner": "protrain"},
}
SHAPED = ("auto", "auto, activations", "pofo")  # of the larger shapes


def batch_for(name: str) -> Any:
    """Large enough for activations to matter."""
    if name in HUGGING_FACE:
        return models.sample_batch(models.describe(name), batch=8, seq=64)
    if name == "convnet":
        return torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,))
    return (torch.randint(0, 64, (16, 48)),)


def small(names: list[str]) -> Iterator[tuple[str, Any, Any, str]]:
    """(name, trace, machine, way) for the small families."""
    for name in names:
        model = family(name)[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        trace = holdall.trace(model, batch_for(name), optimizer=optimizer)
        for overlap in (False, True):
            where = f"{name}, copies {'overlap' if overlap else 'wait'}"
            yield from ((where, trace, machine(overlap=overlap, read=LINK, write=LINK), way) for way in WAYS)


def shaped(names: list[str]) -> Iterator[tuple[str, Any, Any, str]]:
    """The same for larger shapes, in bfloat16 on a GPU."""
    for name in names:
        source = models.describe(name)
        model = models.build(source, device="meta")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = models.sample_batch(source, batch=4, seq=1024)
        trace = holdall.trace(model, batch, optimizer=optimizer, device="cuda", precision="bf16")
        yield from ((name, trace, "h200", way) for way in SHAPED)


def plan_of(trace: Any, hardware: Any, budget: int, options: dict[str, Any]) -> dict[str, Any]:
    """What the dump says of one plan."""
    try:
        made = holdall.plan(trace, hardware=hardware, budget=budget, **options)
    except holdall.HoldallError as refused:
        return {"refused": type(refused).__name__, "smallest": getattr(refused, "smallest", None)}
    data = made.to_json()
    return {"actions": data["actions"], "peak": dict(made.predicted.peak), "seconds": made.predicted.seconds}


def dump(path: Path, families: list[str], shapes: list[str]) -> None:
    found: dict[str, Any] = {}
    for where, trace, hardware, way in track([*small(families), *shaped(shapes)], description="planning"):
        plain = holdall.plan(trace, planner="nop", hardware=hardware).predicted
        full = next(iter(plain.peak.values()))
        for share in SHARES:
            found[f"{where}; {way}; {share} %"] = plan_of(trace, hardware, full * share // 100, WAYS[way])
    path.write_text(json.dumps(found, indent=1))
    refused = sum("refused" in entry for entry in found.values())
    print(f"{len(found)} plans, {refused} of them refusals, written to {path}")


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for every difference."""
    lines = [f"{key}: only in one of them" for key in sorted(before.keys() ^ after.keys())]
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        for fact in sorted((a.keys() | b.keys()) - {"actions"}):
            if a.get(fact) != b.get(fact):
                lines.append(f"{key}: {fact} {a.get(fact)} -> {b.get(fact)}")
        some, others = a.get("actions", []), b.get("actions", [])
        lines += [f"{key}: - {action}" for action in some if action not in others]
        lines += [f"{key}: + {action}" for action in others if action not in some]
        if some != others and sorted(map(str, some)) == sorted(map(str, others)):
            lines.append(f"{key}: the same actions in another order")
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["dump", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--families", default=",".join([*PLAIN, *HUGGING_FACE]))
    parser.add_argument("--shapes", default="gpt2,llama-3.2-3b")
    options = parser.parse_args()
    if options.verb == "dump":
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as fresh:
            os.environ["HOLDALL_CACHE"] = fresh  # a plan that was remembered says nothing of this version
            names, shapes = ([n for n in text.split(",") if n] for text in (options.families, options.shapes))
            dump(options.files[0], names, shapes)
        return
    before, after = (json.loads(path.read_text()) for path in options.files)
    lines = compare(before, after)
    print("\n".join(lines))
    print(f"{len(before)} and {len(after)} plans compared; {len(lines)} differences")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
