"""For tests of model states: a layer small enough for many runs, placements by name, and a comparison that says where."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdall.actions.place import Place, streamable
from holdall.types import Trace

KINDS = {
    "device": ("resident", "device"),
    "host": ("resident", "host"),
    "via_device": ("resident", "via_device"),
    "streamed": ("streamed", "host"),
}


class Layer(nn.Module):
    """Eight wide; its dropout shows whether random numbers are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).relu()), 0.1, self.training)


def place_of(trace: Trace, place: str) -> Place:
    """`host overlap_forward`: every unit that allows it, updated there and then; `mixed`: all kinds in turn."""
    kind, when = place.split()
    can = streamable(trace)
    turn = list(KINDS.values()) if kind == "mixed" else [KINDS[kind]]
    rows = {u.name: turn[n % len(turn)] for n, u in enumerate(trace.units)}
    return Place.of(trace, {u: ("resident" if u not in can else w, d) for u, (w, d) in rows.items()}, when=when, share=False)


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Paths at which two nests of dicts, lists, tensors and values are not the same, bit for bit."""
    if isinstance(theirs, dict):
        if not isinstance(mine, dict) or mine.keys() != theirs.keys():
            return [f"{path}: keys"]
        return [d for k in theirs for d in differences(mine[k], theirs[k], f"{path}/{k}")]
    if isinstance(theirs, (list, tuple)):
        if type(mine) is not type(theirs) or len(mine) != len(theirs):
            return [f"{path}: length or type"]
        return [d for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) for d in differences(a, b, f"{path}/{n}")]
    if isinstance(theirs, torch.Tensor):
        same = isinstance(mine, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if same else [path]
    return [] if mine == theirs else [path]
