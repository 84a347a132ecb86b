"""Trains a causal language model on a file inside a budget: `holdall train` as a function.

The two nouns are here; `loop` turns the first into the second, `data` reads the file, `checkpoint` saves and resumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from holdall import optim
from holdall.errors import InvalidInput, unknown_name
from holdall.models import DTYPES
from holdall.problem import Budget, resolve_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """One run. `model`: a preset (from scratch) or a local folder (from its weights). Zero turns an option off where noted."""

    model: str
    data: Path
    out: Path
    budget: Budget = "auto"
    planner: str = "auto"
    hardware: str | None = None  # machine to plan for, by name or file; None: measure this one
    device: str = "auto"  # "auto": the GPU where there is one
    dtype: str = "float32"  # of the parameters
    precision: str | None = (
        None  # a recipe, one of `holdall precisions`, which also says the dtype; None: that of the parameters
    )
    field: str = "text"  # of a JSONL file
    batch: int = 4  # sequences in one forward
    seq: int = 512  # tokens in a sequence
    steps: int = 100  # in all, those before a resume included
    accumulate: int = 1  # forwards in one step
    optimizer: str = "adamw"  # one of `holdall optimizers`, with options as in galore:rank=64
    lr: float | None = None  # None: the optimizer's own, and 1e-4 for AdamW
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    warmup: int = 10  # steps
    clip: float = 1.0  # largest norm of the gradient; 0: off
    eval_every: int = 0  # steps; 0: at the end only
    eval_fraction: float = 0.05  # of the sequences; 0: none are held out
    save_every: int = 100  # steps; 0: at the end only
    keep: int = 2  # checkpoints
    resume: bool = True  # continue from the latest checkpoint in `out`, if there is one
    seed: int = 0
    compile: bool | str = False  # compile blocks that the plan runs op by op; a string names a back end of torch.compile
    record: Path | None = None  # folder for out-of-memory reports

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "steps", "accumulate", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "clip", "eval_every", "save_every", "weight_decay", "seed"):
            _at_least(name, getattr(self, name), 0)
        if self.seq < 2:
            raise InvalidInput("`seq` is 1, but the next token can only be learned from two", hint="use a longer sequence")
        if self.lr is not None and not (0 < self.lr < math.inf):
            raise InvalidInput(f"`lr` is {self.lr}, but must be above zero", hint="a usual value is 1e-4")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InvalidInput(f"`betas` is {self.betas}, but both must lie in [0, 1)", hint="usual values are (0.9, 0.999)")
        if not (0 <= self.eval_fraction < 1):
            hint = "use a small fraction such as 0.05, or 0 to hold nothing out"
            raise InvalidInput(f"`eval_fraction` is {self.eval_fraction}, but must lie in [0, 1)", hint=hint)
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        optim.read(self.optimizer)
        resolve_recipe(self.precision)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.accumulate * self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a run. A figure is None if nothing was measured: no step was left, or no data held out."""

    model: str
    steps: int
    checkpoint: Path
    resumed_from: int | None = None  # step; None: a new run
    seconds: float = 0.0  # of this run's steps
    tokens: int = 0  # read by this run
    first_loss: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    peak_bytes: int | None = None  # of the largest step
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    report: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


def _at_least(name: str, value: float, least: int) -> None:
    if not (least <= value < math.inf):
        raise InvalidInput(f"`{name}` is {value}, but must be at least {least}", hint=f"use {max(1, least)} or more")
