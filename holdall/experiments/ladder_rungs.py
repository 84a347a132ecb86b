"""The rungs of the ladder: techniques in the order in which people reach for them, each on top of those before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdall import optim

EXACT, REORDERED, LOSSY = "exact", "reordered", "lossy"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a rung may change about a training step."""

    dtype: str = "float32"  # of the parameters
    precision: str | None = None  # dtype of working copies; None: there are none
    head: str | int = "whole"  # or the number of parts in which the vocabulary head and loss are computed
    planner: str = "nop"
    options: dict[str, Any] = field(default_factory=dict)  # of the planner
    allow: tuple[str, ...] = ("keep",)
    in_backward: bool = False
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return f"{self.precision or self.dtype} and {self.optimizer}"

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer with its usual learning rate; a ladder compares memory and speed, and does not tune."""
        return optim.make(self.optimizer, model)


@dataclass(frozen=True, kw_only=True)
class Rung:
    name: str
    numerics: str  # relative to the rung before: exact (the same bits), reordered (sums in another order) or lossy
    says: str
    changes: dict[str, Any]
    narrow: bool = False  # computes in bf16, which few processors do fast


RUNGS = (
    Rung(name="plain", numerics=EXACT, says="nothing done", changes={}),
    Rung(
        name="bf16 copies",
        numerics=LOSSY,
        says="computes with bf16 copies of the float32 parameters",
        changes={"precision": "bf16"},
        narrow=True,
    ),
    Rung(
        name="recompute",
        numerics=EXACT,
        says="`auto` runs again in backward what the budget has no room for",
        changes={"planner": "auto", "allow": ("keep", "recompute")},
    ),
    Rung(
        name="chunked head",
        numerics=REORDERED,
        says="the loss of the vocabulary is taken a few rows at a time",
        changes={"head": 4},
    ),
    Rung(
        name="in backward",
        numerics=EXACT,
        says="parameters are updated as their gradients come; no clipping, no accumulation",
        changes={"in_backward": True},
    ),
    Rung(
        name="bf16 parameters",
        numerics=LOSSY,
        says="no float32 parameters any more; updates are rounded to bf16",
        changes={"dtype": "bfloat16", "precision": None},
        narrow=True,
    ),
    Rung(
        name="8-bit Adam",
        numerics=LOSSY,
        says="both moments in blocks of 8 bits",
        changes={"optimizer": "adam8bit:weight_decay=0.01"},
    ),
    Rung(
        name="GaLore",
        numerics=LOSSY,
        says="instead of 8 bits: moments in a space of a quarter of the rank",
        changes={"optimizer": "galore"},
    ),
    Rung(
        name="compressed",
        numerics=LOSSY,
        says="instead of recompute: activations wait in 4 bits (ActNN)",
        changes={"planner": "actnn", "options": {"bits": 4.0}, "allow": ("keep", "compress")},
    ),
)


def climb(first: Settings | None = None, *, narrow: bool = True) -> Iterator[tuple[Rung, Settings]]:
    """Each rung with everything below it; `first`: the settings of the lowest. `narrow`: those in bf16 too."""
    settings = first or Settings()
    for rung in RUNGS:
        if narrow or not rung.narrow:
            settings = replace(settings, **rung.changes)
            yield (replace(rung, says=f"{settings}, {rung.says}") if not rung.changes else rung), settings


def slowness_of_bf16(device: str, size: int = 96) -> float:
    """Time of a matmul in bf16 over that in float32; below 1 on a GPU, far above on many CPUs."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(size, size, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            (x @ x).sum().item()  # waits for the device
            best = min(best, time.perf_counter() - began)
        seconds.append(best)
    return seconds[1] / seconds[0]
