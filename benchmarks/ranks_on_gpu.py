"""The sharded path on one GPU (one rank, NCCL) beside the unsharded one, in one budget.

python benchmarks/ranks_on_gpu.py [--shape llama-3.2-3b] [--budget 24] [--ways fsdp,zero2] [--rows 1] [--tokens 2048]
                                  [--steps 8] [--optimizer sgd|adamw] [--out DIR] [--row-seconds 150] [--smoke]

Weights, gradients and the update are in bf16. With `adamw`, whose states a model of 3B parameters has no room for in 24 GiB
beside its weights and gradients, both paths keep states on the host. All else is `fit`'s defaults. Every row is a process
of its own: plain training without a budget, `fit` without a mesh, and `fit(..., mesh={"dp": 1})` for every way; `of_plain` is
the step's time of plain training over that of the row. `--smoke`: a tiny twin on the CPU, by gloo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from families_on_gpu import GIB, Cell, Table, compare, guarded, loss_of, ours, timed
from families_shapes import SHAPES

RECIPES = {"sgd": "bf16-weights", "adamw": "bf16-weights-adamw"}


class NarrowCell(Cell):
    """The shape with weights in bf16, on a part of its batch."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._rule = asked["optimizer"]
        super().__init__({**asked, "recipe": RECIPES[self._rule]}, lambda _: None)

    def build(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        model, batch = super().build()
        for parameter in model.parameters():  # buffers (rotary frequencies) keep their width
            parameter.data = parameter.data.to(torch.bfloat16)
        return model, batch

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self._rule == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def row(asked: dict[str, Any]) -> dict[str, Any]:
    """A row, in this process."""
    cell = NarrowCell(asked)
    if asked["method"] == "plain":
        return guarded(lambda: plain(cell, asked["steps"]))
    given: dict[str, Any] = {"steps": asked["steps"]}
    if asked["method"] != "unsharded":
        import torch.distributed as dist

        backend = "gloo" if cell.smoke else "nccl"
        store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        given |= {"mesh": {"dp": 1}, "shard": asked["method"]}
    made = guarded(lambda: ours(cell, asked["budget"], **given))
    if not cell.smoke:
        made["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return made


def plain(cell: NarrowCell, steps: int) -> dict[str, Any]:
    model, batch = cell.build()
    optimizer = cell.optimizer(model.parameters())

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = loss_of(model(**batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cell.norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return {"result": "ran", **timed(cell, step, steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b", choices=list(SHAPES))
    parser.add_argument("--budget", type=float, default=24.0, help="GiB")
    parser.add_argument("--ways", default="fsdp")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", default="sgd", choices=list(RECIPES))
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--row-seconds", type=float, default=150.0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", help="a row as JSON, in this process")
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(row(json.loads(options.one))))
        return
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(folder / ("ranks_smoke.csv" if options.smoke else "ranks_on_gpu.csv"), options.smoke)
    budget = int(options.budget * GIB)
    recipe = RECIPES[options.optimizer]
    asked = {"shape": options.shape, "rows": options.rows, "tokens": options.tokens, "steps": options.steps, "budget": budget}
    asked["optimizer"] = options.optimizer
    for method in ("plain", "unsharded", *options.ways.split(",")):
        if table.has(options.shape, recipe, method):
            continue
        one = json.dumps({**asked, "method": method, "smoke": options.smoke})
        head = {"shape": options.shape, "recipe": recipe, "method": method}
        began = time.monotonic()
        try:
            command = [sys.executable, __file__, "--one", one]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=options.row_seconds, check=False)
        except subprocess.TimeoutExpired:
            table.add({**head, "result": "failed", "message": f"took longer than {options.row_seconds:.0f} s"})
            continue
        said = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
        last = {"result": "failed", "message": ran.stderr[-250:]}
        made = {**head, **(json.loads(said[-1].removeprefix("RESULT ")) if said else last)}
        made["row_s"] = time.monotonic() - began
        if method != "plain" and made["result"] == "ran":
            made.setdefault("budget_gib", options.budget)
            compare(made, table.get(options.shape, recipe, "plain"), None)
        table.add(made)
    base = table.get(options.shape, recipe, "unsharded")
    for way in options.ways.split(","):
        mine = table.get(options.shape, recipe, way)
        if base and mine and base["result"] == mine["result"] == "ran":
            same = mine["losses"] == base["losses"]
            print(f"{way}: {mine['step_s'] / base['step_s']:.3f} of the unsharded step, losses equal: {same}")


if __name__ == "__main__":
    main()
